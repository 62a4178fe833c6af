"""What a function keeps, offloads and recomputes under a policy, one row a value, each with its reason."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from jremat.graph.arguments import Arguments, take_apart
from jremat.graph.flops import Flops, flops_of
from jremat.graph.paths import path_of
from jremat.graph.residuals import row_of
from jremat.graph.trace import MARK, aval_bytes
from jremat.jax_internals import inner_jaxprs, opened, tagged_name
from jremat.policy import OFFLOAD, LayerPlan, Policy
from jremat.policy.places import numbered_alike
from jremat.policy.shown import filled, human_flops
from jremat.report.backward_readers import Uses
from jremat.report.forward_and_backward import BothWays, both_ways
from jremat.report.kept_reasons import SCHEDULED, PolicyRules, why_kept
from jremat.report.model_parts import ORDER, layers_of, module_of, part_of
from jremat.report.recompute import RecomputedValue, recomputed_values
from jremat.transform.checkpoint import checkpoint, expect_policy

Fate = Literal["kept", "offloaded", "recomputed", "input"]
"""What becomes of a value between the passes: kept on the device, in the host's memory, recomputed; or an argument of
the function that the backward pass reads too, which is there anyway."""


@dataclass(frozen=True)
class ExplainedValue:
    """One value.

    Args:
        value: its tag, or the operation that makes it and the module that it is in.
        part: of the model that it belongs to, e.g. ``attention``.
        fate: what becomes of it.
        layers: of a plan, that it is of, e.g. ``0-5``; nothing where no plan says.
        shape, dtype: of one copy.
        copies: how many there are: kept together, or recomputed one after the other.
        bytes: of all copies.
        source: the user's line.
        why: it is kept, or read again.
        read_by: operations of the backward pass that need it.
        recompute_flops: matmul FLOPs spent to recompute all copies, steps on the way included.
        recompute_other_flops: of the rest.
        fetched: recomputed by moving or casting alone, of what is there anyway (weights).
        path: the modules that make it, as ``layers_*/attn/q_proj``: what a policy selects by.
    """

    value: str
    part: str
    fate: Fate
    layers: str
    shape: tuple[int, ...]
    dtype: str
    copies: int
    bytes: int
    source: str
    why: str
    read_by: tuple[str, ...] = ()
    recompute_flops: int = 0
    recompute_other_flops: int = 0
    fetched: bool = False
    path: str = ""


@dataclass(frozen=True)
class Explanation:
    """Every value that matters to the backward pass; iterates over its rows, by part, largest first.

    Args:
        policy: the spec, or nothing where the function is as it is.
        rows: kept, offloaded, recomputed and input.
        forward_flops: matmul FLOPs of one forward pass.
        unread: names in the function of values that the backward pass neither keeps nor recomputes.

    >>> import jax.numpy as jnp
    >>> found = explain(jnp.sin, jnp.ones(4))
    >>> found.kept_bytes, [row.fate for row in found]
    (16, ['kept'])
    """

    policy: str
    rows: tuple[ExplainedValue, ...]
    forward_flops: int
    unread: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[ExplainedValue]:
        return iter(self.rows)

    def of(self, *fates: Fate) -> tuple[ExplainedValue, ...]:
        """The rows of these fates."""
        return tuple(row for row in self.rows if row.fate in fates)

    @property
    def kept_bytes(self) -> int:
        """In device memory, arguments left out."""
        return sum(row.bytes for row in self.of("kept"))

    @property
    def offloaded_bytes(self) -> int:
        """In the host's memory."""
        return sum(row.bytes for row in self.of("offloaded"))

    @property
    def recompute_flops(self) -> int:
        """Matmul FLOPs recomputed: what ``jremat.flops`` counts for the gradient."""
        return sum(row.recompute_flops for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Every figure, ready for JSON."""
        totals = {
            "policy": self.policy,
            "kept_bytes": self.kept_bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "input_bytes": sum(row.bytes for row in self.of("input")),
            "recompute_flops": self.recompute_flops,
            "recompute_other_flops": sum(row.recompute_other_flops for row in self.rows),
            "forward_flops": self.forward_flops,
            "unread": self.unread,
        }
        return totals | {"rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        lines = [
            f"{row.bytes:>14,}  {row.fate:<10}  {row.part:<12}  {row.value}  {where(row)}  {row.why}"
            for row in self.of("kept", "offloaded", "recomputed")
            if not row.fetched
        ]
        share = ""
        if self.forward_flops:
            share = f", {self.recompute_flops / self.forward_flops:.1%} of the forward's matmul FLOPs"
        total = f"{self.kept_bytes:,} bytes kept, {self.offloaded_bytes:,} on the host"
        lines.append(f"{total}; recompute: {human_flops(self.recompute_flops)}{share}")
        return "\n".join(filled(line, " " * 16) for line in lines)

    __repr__ = __str__


def explain(
    f: Callable[..., Any],
    *args: Any,
    policy: Policy | None = None,
    strict: bool = True,
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    **kwargs: Any,
) -> Explanation:
    """What ``f`` keeps, offloads and recomputes for its gradient, under ``policy`` or as it is, and why.

    Nothing is run. Read from one program of the function and its pullback; kept bytes are ``jremat.residuals``' and the
    recompute is ``jremat.flops``', to the byte and the FLOP.

    Args:
        f: the forward function of a block or a loss.
        args, kwargs: arrays or ``jax.ShapeDtypeStruct``, in pytrees; differentiated by all that float.
        policy: of one block; None: what the function already does.
        strict, static_argnames, static_argnums: as of ``jremat.checkpoint``.

    Returns:
        Rows with fate, part, bytes, source line, reason and cost; ``.kept_bytes``, ``.recompute_flops``.

    Raises:
        ValueError: as ``jremat.checkpoint``.

    >>> import jax.numpy as jnp
    >>> from jremat.policy import Policy, tag
    >>> def mlp(x, w):
    ...     return jnp.sin(tag(x @ w, "up")) @ w.T
    >>> x, w = jnp.ones((8, 4)), jnp.ones((4, 16))
    >>> [(row.value, row.why) for row in explain(mlp, x, w, policy=Policy.save("up")).of("kept")]
    [('up', 'named up')]
    >>> explain(mlp, x, w, policy=Policy()).recompute_flops  # x @ w, once more
    1024
    """
    if policy is not None:
        expect_policy(policy)
        f = checkpoint(f, policy, strict=strict, static_argnames=static_argnames, static_argnums=static_argnums)
    return explain_call(take_apart(f, args, kwargs, static_argnames, static_argnums), PolicyRules(policy))


def explain_call(arguments: Arguments, rules: PolicyRules) -> Explanation:
    """As ``explain``, of a function that is under its policy already; ``rules`` say which, for the reasons."""
    program = both_ways(arguments)
    rows = [*_kept(program, rules), *_merged(recomputed_values(program.backward_equations), rules)]
    forward = sum((flops_of(eqn) for eqn in program.forward_equations), Flops())
    spec = "" if rules.policy is None else rules.policy.spec
    shown = {row.value for row in rows} | {row.value.partition(" of ")[0] for row in rows}
    unread = tuple(name for name in dict.fromkeys(_names(program.forward_equations)) if name not in shown)
    return Explanation(spec, tuple(sorted(rows, key=_place)), forward.total, unread)


def where(row: ExplainedValue) -> str:
    """The path and the line of a value."""
    return "  ".join(filter(None, (row.path, row.source)))


def _names(equations: Sequence[Any]) -> Iterator[str]:
    """The users' names of values in a program, loops and calls included, in order."""
    for eqn in equations:
        name = tagged_name(eqn.primitive, eqn.params)
        if name is not None and not name.startswith(MARK):
            yield name
        for jaxpr, _ in inner_jaxprs(eqn):
            yield from _names(opened(jaxpr).eqns)


def _place(row: ExplainedValue) -> tuple[Any, ...]:
    known = ORDER.index(row.part) if row.part in ORDER else len(ORDER)
    return known, row.part, _FATES.index(row.fate), -row.bytes


WORDS = {
    "dot_general": "matmul",
    "conv_general_dilated": "convolution",
    "convert_element_type": "cast",
    "broadcast_in_dim": "broadcast",
    "select_n": "select",
}
"""What a reader calls the operations that JAX calls otherwise."""

_FATES = ("kept", "offloaded", "recomputed", "input")


def _kept(program: BothWays, rules: PolicyRules) -> Iterator[ExplainedValue]:
    uses, backward = Uses(), frozenset(map(id, program.backward_equations))
    for origin, held in program.kept:
        found = row_of(origin, program.paths)
        readers = list(dict.fromkeys(r for var in held for r in uses.readers(program.jaxpr, var, backward)))
        scope = origin.scope
        if found.kind == "kept":
            fate: Fate = "offloaded" if found.decision is OFFLOAD else "kept"
            why = why_kept(origin, rules, scope, readers)
            why += f", as {found.decision.value}" * found.decision.compresses
        else:
            fate, why = "input", "an argument" if found.kind == "input" else "closed over"
        value, part = _named(found.name, found.primitive, found.dtype, scope, found.source)
        if why.startswith(SCHEDULED):
            value, part = "states of the schedule", "layer inputs"
        yield ExplainedValue(
            value=value if fate != "input" else found.source,
            part=part if fate != "input" else "arguments",
            fate=fate,
            layers=_layers(scope, rules),
            shape=found.shape,
            dtype=found.dtype,
            copies=found.copies,
            bytes=found.bytes,
            source=found.source,
            why=why,
            read_by=tuple(map(str, readers)),
            path=found.path if fate != "input" else "",
        )


def _merged(again: Iterator[RecomputedValue], rules: PolicyRules) -> Iterator[ExplainedValue]:
    """One row a value, where several loops recompute it."""
    rows: dict[Any, ExplainedValue] = {}
    for value in again:
        row = _recomputed(value, rules)
        key = row.value, row.part, row.layers, row.shape, row.dtype, row.source, row.fetched, value.twin
        old = rows.get(key)
        if old is not None:
            row = ExplainedValue(
                **(
                    vars(row)
                    | {
                        name: getattr(old, name) + getattr(row, name)
                        for name in ("copies", "bytes", "recompute_flops", "recompute_other_flops")
                    }
                    | {"path": row.path if row.path == old.path else numbered_alike(row.path)}
                )
            )
        rows[key] = row
    yield from rows.values()


def _recomputed(value: RecomputedValue, rules: PolicyRules) -> ExplainedValue:
    dtype = str(value.aval.dtype)
    name, part = _named(value.tag, value.primitive, dtype, value.scope, value.source)
    return ExplainedValue(
        value=name,
        part=part,
        fate="recomputed",
        layers=_layers(value.scope, rules),
        shape=tuple(value.aval.shape),
        dtype=dtype,
        copies=value.times,
        bytes=aval_bytes(value.aval) * value.times,
        source=value.source,
        why="fetched again" if value.fetched else "not kept: recomputed",
        recompute_flops=value.flops.recompute,
        recompute_other_flops=value.flops.other.recompute,
        fetched=value.fetched,
        path=path_of(value.scope),
    )


def _named(tag: str | None, primitive: str, dtype: str, scope: str, source: str) -> tuple[str, str]:
    """What a value is called, and its part."""
    module = module_of(scope)
    if dtype.startswith("key<"):
        return tag or "random key", "random keys"
    if primitive == "scan" and tag is None:
        return ("layer input" if "float" in dtype else "loop counter"), "layer inputs"
    part = part_of(tag, scope, source)
    primitive = WORDS.get(primitive, primitive)
    if tag is not None:
        return (f"{tag} of {module}" if tag == "norm_stats" and module else tag), part
    return (f"{primitive} of {module}" if module else primitive), part


def _layers(scope: str, rules: PolicyRules) -> str:
    place = layers_of(scope)
    if place is None or not isinstance(rules.policy, LayerPlan):
        return ""
    first, last, turn = place
    _, segment = rules.at(scope)
    step = len(segment.pattern) if segment is not None and turn is not None else 1
    if step == 1:
        return f"{first}-{last}" if last > first else str(first)
    start = first + (turn or 0)
    return f"{start}-{last - (last - start) % step} by {step}"
