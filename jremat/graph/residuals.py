"""What a function keeps for its backward pass, read from the program that JAX makes of it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jremat.graph.arguments import Arguments
from jremat.graph.differentiate import kept_by_pullback
from jremat.graph.paths import path_of
from jremat.graph.trace import MARK, aval_bytes, user_line
from jremat.graph.two_passes import OF_FORMAT, PACKED
from jremat.jax_internals import CUSTOM_JVP, SCAN, inner_jaxprs, is_call, opened, scopes, tagged_name
from jremat.policy.decision import OFFLOAD, SAVE, Decision
from jremat.policy.ops import family_of
from jremat.policy.shown import aligned

UNREAD = f"{MARK}unread"
"""The name of what is handed to the backward pass for derivatives of it alone; it doesn't read it, nor is it kept in a
compiled step."""


@dataclass(frozen=True)
class Residual:
    """One value that is alive between the forward and the backward pass.

    Args:
        name: the user's tag, or None.
        shape: of one copy.
        dtype: its NumPy name.
        copies: how many are alive: the product of the scan lengths around it.
        bytes: of all copies.
        kind: ``kept``: made by the function; ``input``: an argument, alive anyway; ``constant``: closed over.
        decision: SAVE in device memory, OFFLOAD in host memory, or how it is compressed; then the packed values and
            their scales are two rows.
        family, primitive: of the operation that made it.
        source: the user's line, ``file.py:12 (function)``, or the argument's path.
        mark: the name under which it is kept, where a strict policy put one on it.
        path: the modules that made it, ``layers_0/attn``.
    """

    name: str | None
    shape: tuple[int, ...]
    dtype: str
    copies: int
    bytes: int
    kind: str
    decision: Decision
    family: str
    primitive: str
    source: str
    mark: str | None = None
    path: str = ""


@dataclass(frozen=True)
class Residuals:
    """Everything that a function keeps for its backward pass; iterates over its rows.

    ``total_bytes`` counts what the function made and kept, on device and host; arguments and constants, which are alive
    anyway, stand apart in ``input_bytes``.
    """

    rows: tuple[Residual, ...]

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def kept(self) -> tuple[Residual, ...]:
        """The rows that the function made."""
        return tuple(row for row in self.rows if row.kind == "kept")

    @property
    def total_bytes(self) -> int:
        """Bytes made and kept, on device and host."""
        return sum(row.bytes for row in self.kept)

    @property
    def host_bytes(self) -> int:
        """Those in host memory."""
        return sum(row.bytes for row in self.kept if row.decision is OFFLOAD)

    @property
    def device_bytes(self) -> int:
        """Those in device memory."""
        return self.total_bytes - self.host_bytes

    @property
    def input_bytes(self) -> int:
        """Bytes of arguments and constants that the backward pass reads too."""
        return sum(row.bytes for row in self.rows if row.kind != "kept")

    def __str__(self) -> str:
        rows = [
            (
                f"{row.bytes:,}",
                f"{row.dtype}{list(row.shape)}{f' x{row.copies}' if row.copies > 1 else ''}",
                row.name or row.primitive,
                row.source + _WORDS.get(row.decision, f"  as {row.decision.value}"),
            )
            for row in sorted(self.kept, key=lambda row: -row.bytes)
        ]
        total = f"{self.total_bytes:,}", f"bytes kept in {len(self.kept)} value{'s' * (len(self.kept) != 1)}, traced"
        # The last line's words may be longer than a shape.
        lines = aligned([("bytes", "shape", "value", "made at"), *rows, total[:1]], right=[0]).splitlines()
        return "\n".join([*lines[:-1], f"{lines[-1]}  {total[1]}"])

    __repr__ = __str__


_WORDS = {SAVE: "", OFFLOAD: "  on the host"}


def read_residuals(arguments: Arguments) -> Residuals:
    """The residuals of a call, differentiated by every floating-point array among its arguments.

    Exact: read from the outputs of ``jax.vjp``'s own program, as JAX's own listing is, with tags and source lines found
    inside loops too.
    """
    kept = kept_by_pullback(arguments.call)
    args, kwargs = arguments.to_trace()
    with arguments.naming_parameters():
        jaxpr = jax.make_jaxpr(arguments.over_arrays(kept))(*args, **kwargs).jaxpr
    found = [origin_of(jaxpr, var) for var in jaxpr.outvars if not isinstance(var, core.Literal)]
    # two outputs that are one value are kept once
    by_value = {origin.key: origin for origin in found if origin.mark != UNREAD}
    return Residuals(tuple(row_of(origin, arguments.array_paths) for origin in by_value.values()))


@dataclass(frozen=True)
class Origin:
    """Where a variable of a program was made, looked for through calls, loops and tags."""

    key: Any  # the variable at the top level that holds it: equal for equal values
    aval: Any  # of one copy
    copies: int = 1
    tag: str | None = None
    mark: str | None = None
    eqn: Any = None
    source: str = ""
    place: int | None = None  # of the input that it is
    decision: Decision = SAVE
    constant: bool = False
    trail: tuple[Any, ...] = ()  # the calls and loops that it was looked for through, outermost first

    @property
    def scope(self) -> str:
        """The name scopes around it, outermost first."""
        return "/".join(map(scopes, dict.fromkeys((*self.trail, *([self.eqn] if self.eqn is not None else [])))))


def origin_of(jaxpr: Any, var: Any) -> Origin:
    """Where a variable of an open jaxpr was made."""
    if var in jaxpr.invars:
        return Origin(var, var.aval, place=jaxpr.invars.index(var))
    eqn = next((e for e in jaxpr.eqns if var in e.outvars), None)
    if eqn is None:
        return Origin(var, var.aval, constant=True)
    name, k, line = eqn.primitive.name, eqn.outvars.index(var), user_line(eqn)
    if name == "reduce_precision" and _rounds_nothing(eqn) and not isinstance(eqn.invars[0], core.Literal):
        made = origin_of(jaxpr, eqn.invars[0])  # remat puts it on what it keeps; the value is the one before
        return replace(made, tag=made.tag or _tag_read(jaxpr, var))
    if name == "device_put" and _to_host(eqn, k) and not isinstance(eqn.invars[k], core.Literal):
        return replace(origin_of(jaxpr, eqn.invars[k]), key=var, decision=OFFLOAD)
    if name == "broadcast_in_dim" and _stacks_one(eqn) and not isinstance(eqn.invars[0], core.Literal):
        made = origin_of(jaxpr, eqn.invars[0])  # a layer that stands alone keeps what others stack
        made = made if made.eqn is not None else replace(made, eqn=eqn, source=line)
        return replace(made, key=var, place=None, constant=False, trail=(eqn, *made.trail))
    tag = tagged_name(eqn.primitive, eqn.params)
    if tag is not None:
        mark, _, form = tag.partition(OF_FORMAT) if tag.startswith(MARK) else (tag, "", "")
        given = _before_packing(jaxpr, eqn.invars[0]) if form else eqn.invars[0]
        made = Origin(var, var.aval) if isinstance(given, core.Literal) else origin_of(jaxpr, given)
        if made.eqn is None:
            made = replace(made, eqn=eqn, source=line)
        name = (made.tag or _tag_read(jaxpr, var)) if tag.startswith(MARK) else tag
        decision = Decision(form) if form else made.decision
        made = replace(made, key=var, tag=name, mark=mark, decision=decision, place=None, constant=False)
        return replace(made, aval=var.aval, copies=1) if form else made
    if is_call(eqn) or name in (SCAN, CUSTOM_JVP):
        inner = opened(inner_jaxprs(eqn)[0][0])
        if not isinstance(inner.outvars[k], core.Literal):
            origin = origin_of(inner, inner.outvars[k])
            if origin.place is not None and name != SCAN:
                given = eqn.invars[origin.place]
                return (
                    Origin(var, var.aval, eqn=eqn, source=line)
                    if isinstance(given, core.Literal)
                    else origin_of(jaxpr, given)
                )
            stacked = name == SCAN and len(var.aval.shape) > len(origin.aval.shape)
            copies = origin.copies * (eqn.params["length"] if stacked else 1)
            source = user_line(origin.eqn, eqn) if name != SCAN and origin.eqn is not None else origin.source or line
            made = replace(origin, key=var, copies=copies, eqn=origin.eqn or eqn, source=source)
            return replace(made, place=None, constant=False, trail=(eqn, *origin.trail))
    return Origin(var, var.aval, tag=_tag_read(jaxpr, var), eqn=eqn, source=line)


def _tag_read(jaxpr: Any, var: Any) -> str | None:
    """The user's tag that reads a variable."""
    readers = (tagged_name(e.primitive, e.params) for e in jaxpr.eqns if var in e.invars)
    return next((name for name in readers if name and not name.startswith(MARK)), None)


def _before_packing(jaxpr: Any, var: Any) -> Any:
    """The value of which ``var`` is a packed part."""
    makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    waiting = [var]
    while waiting:
        eqn = makers.get(waiting.pop())
        if eqn is not None and tagged_name(eqn.primitive, eqn.params) == PACKED:
            return eqn.invars[0]
        waiting += [v for v in eqn.invars if not isinstance(v, core.Literal)] if eqn is not None else []
    return var


def _rounds_nothing(eqn: Any) -> bool:
    own = jnp.finfo(eqn.outvars[0].aval.dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (own.nexp, own.nmant)


def _stacks_one(eqn: Any) -> bool:
    """Whether all that is done is a new first axis of length 1."""
    given, made = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return made == (1, *given) and tuple(eqn.params["broadcast_dimensions"]) == tuple(range(1, len(made)))


def _to_host(eqn: Any, k: int) -> bool:
    device = eqn.params["devices"][k]
    return "host" in str(getattr(device, "memory_kind", device)).lower()


def row_of(origin: Origin, paths: tuple[str, ...]) -> Residual:
    """The row of an origin; ``paths`` are those of the program's inputs."""
    kind, family, primitive, source = "kept", "other", "name", origin.source
    if origin.place is not None:
        kind, family, primitive, source = "input", "input", "input", paths[origin.place]
    elif origin.constant:
        kind, family, primitive, source = "constant", "constant", "constant", "closed over"
    elif tagged_name(origin.eqn.primitive, origin.eqn.params) is None:
        primitive = origin.eqn.primitive.name
        family = family_of(primitive, origin.eqn.params)
    return Residual(
        name=origin.tag,
        shape=tuple(origin.aval.shape),
        dtype=str(origin.aval.dtype),
        copies=origin.copies,
        bytes=aval_bytes(origin.aval) * origin.copies,
        kind=kind,
        decision=origin.decision,
        family=family,
        primitive=primitive,
        source=source,
        mark=origin.mark,
        path=path_of(origin.scope),
    )
