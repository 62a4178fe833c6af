"""What is kept although a remat was meant to let it go: by its readers, as a mask, as a carry."""

from collections.abc import Iterator
from typing import Any

from jax.extend import core

from jremat.calibration import LINT
from jremat.check.finding import Finding, Rule
from jremat.check.policy_answers import decision, decisions_by_name
from jremat.check.rules.kernels import kernels
from jremat.check.rules.names import rulings, tags_in
from jremat.check.sites import Site, bodies, equations
from jremat.check.subject import Subject, of_body
from jremat.graph.flops import Flops
from jremat.graph.trace import aval_bytes, user_line
from jremat.jax_internals import SCAN, inner_jaxprs, is_call, opened, tagged_name
from jremat.policy import OFFLOAD, RECOMPUTE

_BITS = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform", "random_gamma"})


def _saves_nothing(subject: Subject) -> Iterator[Finding]:
    for site in subject.sites:
        by_itself = of_body(site).rows.device_bytes * site.repeats
        if site.around or not by_itself or next(kernels(site.body), None) is not None:
            continue
        bare = subject.without([site])
        saved = bare.rows.device_bytes - subject.rows.device_bytes
        if saved > 0:
            continue
        left_out = _left_out(site)
        again = _all(subject.flops) - _all(bare.flops)
        if again > 0:
            yield Finding(
                rule=SAVES_NOTHING.slug,
                message="the remat saves nothing: what its body makes is kept by others that read it, or what it "
                f"starts from must be kept instead ({-saved:,} bytes more)",
                place=site.source,
                cure="put the readers inside the same remat, or leave the value out of the whole block's policy "
                "(jremat.checkpoint(block, policies.get('but:NAME'))), which discards it for all its readers",
                cost_flops=again,
            )
        elif left_out:
            yield Finding(
                rule=SAVES_NOTHING.slug,
                message=f"the policy leaves out {', '.join(left_out)}, but keeps the value before each tag in its "
                "place: nothing is recomputed",
                place=site.source,
                cure=f"jremat.checkpoint(f, policies.get('but:{','.join(left_out)}')), which decides on the value",
                cost_bytes=by_itself,
            )


def _left_out(site: Site) -> list[str]:
    if site.ours:  # which leaves the value before a tag out too
        return []
    recomputed = {name for name, decision in decisions_by_name(site.policy).items() if decision is RECOMPUTE}
    return sorted(recomputed & tags_in(of_body(site)))


def _all(counted: Flops) -> int:
    return counted.matmul.recompute + counted.other.recompute


def _masks(subject: Subject) -> Iterator[Finding]:
    if not any(eqn.primitive.name in _BITS for eqn, _, _ in equations(subject.jaxpr)):
        return
    inside = {line for site in subject.sites for _, _, line in equations(site.body)}
    seen = set()
    for jaxpr, repeats in _with_repeats(subject.pullback):
        for var in jaxpr.outvars:
            made = _random(jaxpr, var) if not isinstance(var, core.Literal) else None
            line = user_line(made) if made is not None else ""
            if made is not None and line in inside and var not in seen and jaxpr is not subject.pullback:
                seen.add(var)
                yield _mask(line, aval_bytes(var.aval) * repeats)
    top = subject.pullback
    for var in dict.fromkeys(v for v in top.outvars if not isinstance(v, core.Literal)):
        made = _random(top, var)
        if made is not None and user_line(made) in inside:
            yield _mask(user_line(made), aval_bytes(var.aval))
    for jaxpr in bodies(subject.jaxpr):
        for site in subject.sites:
            for eqn in jaxpr.eqns:
                if eqn in site.eqns:
                    yield from _handed_in(jaxpr, eqn, site)


def _handed_in(jaxpr: Any, eqn: Any, site: Site) -> Iterator[Finding]:
    for var in eqn.invars:
        made = _random(jaxpr, var) if not isinstance(var, core.Literal) else None
        if made is not None:
            yield _mask(user_line(made), aval_bytes(var.aval) * site.repeats // len(site.eqns))


def _mask(line: str, nbytes: int) -> Finding:
    return Finding(
        rule=DROPOUT_MASK.slug,
        message="a random mask is kept for the backward pass, though its key would do",
        place=line,
        cure="draw the mask inside the remat, from a key that is handed in, and keep neither it nor its bits by policy "
        "(or a dropout with a derivative of its own, which keeps the key alone)",
        cost_bytes=nbytes,
    )


def _with_repeats(jaxpr: Any, repeats: int = 1) -> Iterator[tuple[Any, int]]:
    """Every scan body, whose outputs are stacked, with how often it runs."""
    for eqn in opened(jaxpr).eqns:
        for inner, times in inner_jaxprs(eqn):
            if eqn.primitive.name == SCAN:
                yield opened(inner), repeats * times
            yield from _with_repeats(inner, repeats * times)


def _random(jaxpr: Any, var: Any) -> Any:
    """The equation that made a value out of random bits and nothing that floats, or None."""
    makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    if var not in makers or getattr(var.aval, "size", 0) <= LINT.key_words:
        return None
    drawn, todo, seen = False, [var], set()
    while todo:
        v = todo.pop()
        if v in seen:
            continue
        seen.add(v)
        eqn = makers.get(v)
        if eqn is None:
            if aval_bytes(v.aval) and v in jaxpr.invars and _floats(v) and v.aval.size > 1:
                return None
            continue
        drawn |= any(e.primitive.name in _BITS and e.outvars[0].aval.size > LINT.key_words for e, _, _ in _steps(eqn))
        todo += [u for u in eqn.invars if not isinstance(u, core.Literal)]
    return makers[var] if drawn else None


def _steps(eqn: Any) -> Iterator[tuple[Any, int, str]]:
    if is_call(eqn):
        for inner, _ in inner_jaxprs(eqn):
            yield from equations(inner)
    else:
        yield eqn, 1, ""


def _floats(v: Any) -> bool:
    return "float" in str(getattr(v.aval, "dtype", ""))


def _offloaded_carry(subject: Subject) -> Iterator[Finding]:
    moved = {name for row in subject.rows if row.decision is OFFLOAD for name in (row.mark, row.name)}
    for ruling in rulings(subject):
        body = ruling.site.body
        for eqn in body.eqns:
            name = tagged_name(eqn.primitive, eqn.params)
            if name is None or decision(ruling.policy, eqn) is not OFFLOAD:
                continue
            nbytes = aval_bytes(eqn.outvars[0].aval) * ruling.site.repeats
            if eqn.outvars[0] in body.outvars and name not in moved:
                yield _carry(
                    f"the policy offloads {name!r}, which is what the block hands on: its own backward never reads it, "
                    "and the next block keeps it on the device, as its input",
                    user_line(eqn),
                    nbytes,
                )
            elif eqn.invars[0] in body.invars and name in moved and _read_bare(body, eqn):
                yield _carry(
                    f"the policy offloads {name!r}, a block's input, but the input itself is read too: it is kept on "
                    "the device as well",
                    user_line(eqn),
                    nbytes,
                )


def _read_bare(body: Any, tag: Any) -> bool:
    readers = [e for e in body.eqns if e is not tag and tag.invars[0] in e.invars]
    return any(e.primitive.name not in ("add", "add_any", "sub", "neg") for e in readers)


def _carry(message: str, place: str, nbytes: int) -> Finding:
    return Finding(
        rule=OFFLOAD_CARRY.slug,
        message=message,
        place=place,
        cure="tag the block's input where the block begins, and use the result alone from there on: "
        "x = jremat.tag(x, 'block_in'), with policies.get('offload_inputs')",
        cost_bytes=nbytes,
    )


SAVES_NOTHING = Rule(
    "saves-nothing",
    "a remat around a part of a block whose output is kept all the same",
    "another reader keeps the output, or the remat's input has to be kept in its place",
    "leave the value out for all its readers",
    _saves_nothing,
)
DROPOUT_MASK = Rule(
    "dropout-mask",
    "dropout masks kept under remat",
    "a mask is a byte an element; the key that it is drawn from takes eight bytes",
    "draw the mask inside the remat",
    _masks,
)
OFFLOAD_CARRY = Rule(
    "offload-carry",
    "offload of a scan's carry: no effect",
    "a block's backward never reads its own output; what is kept is the next block's input, under no name",
    "tag the block's input instead",
    _offloaded_carry,
)
RULES = (SAVES_NOTHING, DROPOUT_MASK, OFFLOAD_CARRY)
