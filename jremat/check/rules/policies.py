"""Policies that don't mean what they seem to: by batch dimension, by None, by count, under another remat."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from jremat.check.finding import Finding, Rule
from jremat.check.policy_answers import answers_differ, decision, decision_on, private
from jremat.check.rules.costs import rerun_flops
from jremat.check.rules.names import rulings, tags_in
from jremat.check.sites import Site, equations
from jremat.check.subject import Subject, of_body, of_site
from jremat.graph.trace import MARK, aval_bytes
from jremat.policy import RECOMPUTE, Policy

_UNBATCHED = (((1,), (0,)), ((), ()))


def _no_batch_dims(subject: Subject) -> Iterator[Finding]:
    for ruling in rulings(subject):
        dots = _dots(ruling.site.body)
        if ruling.site.marked:  # it was decided on the block as written, before any vmap
            continue
        if not dots or not all(eqn.params["dimension_numbers"][1][0] for eqn, _, _ in dots):
            continue
        eqn, _, line = dots[0]
        policy = private(ruling.policy)
        flat = [jax.ShapeDtypeStruct(v.aval.shape[-2:] or (1, 1), v.aval.dtype) for v in eqn.invars]
        unbatched = decision_on(policy, eqn.primitive, flat, {**eqn.params, "dimension_numbers": _UNBATCHED})
        if unbatched is not RECOMPUTE and all(decision(policy, e) is RECOMPUTE for e, _, _ in dots):
            yield Finding(
                rule=NO_BATCH_DIMS.slug,
                message=f"the policy keeps matmuls without batch dimensions, and all {len(dots)} here have one: "
                "it keeps none of them",
                place=line or ruling.site.source,
                cure="put jremat.checkpoint(block, policy), which decides on the block as written, inside the vmap; "
                "or keep by name, or every matmul (dots_saveable)",
                cost_flops=rerun_flops(ruling.site),
            )


def _dots(jaxpr: Any) -> list[tuple[Any, int, str]]:
    return [found for found in equations(jaxpr) if found[0].primitive.name == "dot_general"]


def _none(subject: Subject) -> Iterator[Finding]:
    for site in subject.sites:
        if site.policy is not None or site.third:
            continue
        names = sorted(name for name in tags_in(of_body(site)) if not name.startswith(MARK))
        if names and (again := rerun_flops(site)):
            yield Finding(
                rule=POLICY_NONE.slug,
                message="the remat has policy=None, which recomputes everything (it is 'full', not 'none') "
                f"and ignores the names in it: {', '.join(names)}",
                place=site.source,
                cure="to keep everything, take the remat away (policies.get('none')); to keep nothing, say so: "
                "policies.get('full') or jax.checkpoint_policies.nothing_saveable",
                cost_flops=again,
            )


def _counting(subject: Subject) -> Iterator[Finding]:
    for site in subject.sites:
        dots = _dots(site.body)
        if not dots or not answers_differ(site.policy, dots[0][0]):
            continue
        policy = private(site.policy)
        order = [(eqn, line, decision(policy, eqn)) for eqn, _, line in equations(site.body)]
        matmuls = [(line, decision) for eqn, line, decision in order if eqn.primitive.name == "dot_general"]
        kept = [f"{k} ({line})" for k, (line, decision) in enumerate(matmuls, 1) if decision is not RECOMPUTE]
        yield Finding(
            rule=COUNTED_MATMULS.slug,
            message=f"the policy decides by count: of {len(matmuls)} matmuls it keeps {', '.join(kept) or 'none'}; "
            "one matmul more, before them, and it keeps the others",
            place=site.source,
            cure="keep by name: policies.get('torchtitan_selective_op') names what torchtitan's count keeps in a "
            "Llama block; or save:NAME,NAME with jremat.tag on the matmuls meant",
            cost_flops=rerun_flops(site),
        )


def _unheard(subject: Subject) -> Iterator[Finding]:
    for site in subject.sites:
        if not site.third or site.policy is None or site.ours:
            continue
        wanted = _permitted(site)
        kept = Counter((row.primitive, row.shape, row.dtype) for row in of_site(site).rows)
        lost = wanted - kept
        if lost:
            nbytes = sum(jax.numpy.dtype(dtype).itemsize * _size(shape) * n for (_, shape, dtype), n in lost.items())
            yield Finding(
                rule=UNHEARD_POLICY.slug,
                message="jax_remat3 doesn't ask this policy about every operation: not kept, though it says so: "
                + ", ".join(f"{name} {dtype}{list(shape)}" for name, shape, dtype in sorted(lost)),
                place=site.source,
                cure="use jremat.checkpoint(f, policy) or jremat.remat(Block, policy), which hold under every JAX",
                cost_bytes=nbytes * site.repeats,
                cost_flops=rerun_flops(site),
            )


def _permitted(site: Site) -> Counter[tuple[str, tuple[int, ...], str]]:
    """What the backward pass reads of the body and the policy permits to keep."""
    policy = private(site.policy)
    found: Counter[tuple[str, tuple[int, ...], str]] = Counter()
    if isinstance(policy, Policy) and policy.strict_only:
        return found
    needed = Counter((row.primitive, row.shape, row.dtype) for row in of_body(site).rows.kept)
    for eqn, _, _ in equations(site.body):
        for var in eqn.outvars:  # none of a callback
            key = (eqn.primitive.name, tuple(var.aval.shape), str(var.aval.dtype))
            if found[key] < needed[key] and decision(policy, eqn) is not RECOMPUTE and aval_bytes(var.aval):
                found[key] += 1
    return found


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


NO_BATCH_DIMS = Rule(
    "no-batch-dims",
    "dots_with_no_batch_dims_saveable keeps nothing under vmap, pipeline stages or experts",
    "vmap over weights gives every matmul a batch dimension, so the policy recomputes all of them",
    "decide before the vmap (jremat.checkpoint), or keep by name",
    _no_batch_dims,
)
POLICY_NONE = Rule(
    "policy-none",
    "`none`, None and `full` confused: a remat without a policy around values with names",
    "policy=None recomputes everything and ignores the names",
    "take the remat away, or say nothing_saveable",
    _none,
)
COUNTED_MATMULS = Rule(
    "counted-matmuls",
    "every second matmul is kept, and a new one shifts which",
    "a policy that counts has a memory: another matmul, another trace, and it keeps the others",
    "keep by name",
    _counting,
)
UNHEARD_POLICY = Rule(
    "unheard-policy",
    "a plain callable policy under jax_remat3 keeps less than it says",
    "jax_remat3 asks a policy at names, matmuls and convolutions only, or not at all",
    "jremat.checkpoint or jremat.remat",
    _unheard,
)
RULES = (NO_BATCH_DIMS, POLICY_NONE, COUNTED_MATMULS, UNHEARD_POLICY)
