"""Marks on every value that a function makes, and a gradient's program that hands the marked values out.

A mark is a name (JAX's ``checkpoint_name``), so it goes where the value goes: into the first run and into remat's
rerun, under one and the same name. What a derivative makes for itself bears none.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jremat.graph.interpret import consts_of, interpret, retraced
from jremat.graph.trace import MARK, user_line
from jremat.jax_internals import (
    CUSTOM_JVP,
    REMAT_SCOPE,
    SCAN,
    bind,
    inner_jaxprs,
    is_call,
    is_ref,
    is_remat,
    loop_parts,
    opened,
    scopes,
    tagged_name,
)

_HEAD = f"{MARK}replay."
# What only copies its input is as right as that.
_COPIES = frozenset(
    {"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "iota", "slice", "copy", "copy_p"}
    | {"optimization_barrier", "reduce_precision", "stop_gradient", "sharding_constraint", "concatenate", "pad"}
)


@dataclass(frozen=True)
class Tap:
    """One value that is handed out.

    Args:
        mark: the name that it bears: ours, or the user's tag.
        name: the user's tag, or the primitive that made it.
        shape: of one copy.
        dtype: its NumPy name.
        source: the user's line.
        again: whether remat recomputed it, or the first run made it.
        loops: how many axes, one for each loop around it, stand before its own.
    """

    mark: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    source: str
    again: bool = False
    loops: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """What the first run's value and the one recomputed have in common."""
        return self.mark, self.shape, self.dtype


@dataclass(frozen=True)
class Marked:
    """A program whose every value bears a name.

    Args:
        closed: the program, a closed jaxpr.
        taps: by mark, what was marked.
    """

    closed: Any
    taps: dict[str, Tap]


def marked(closed: Any, prefix: str = "") -> Marked:
    """The same program with a mark on every value that it makes, in loops and remats too, but for what is tagged.

    Kernels with a derivative of their own, branches and ``while`` loops are marked from outside. ``prefix`` tells the
    marks of one program from those of another inside it.
    """
    taps: dict[str, Tap] = {}
    count = itertools.count()

    def run(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], around: tuple[Any, ...] = ()) -> list[Any]:
        return interpret(jaxpr, consts, inputs, rule, around=around)

    def rule(eqn: Any, given: Sequence[Any], around: tuple[Any, ...]) -> list[Any]:
        if eqn.primitive.name == SCAN or (is_remat(eqn) and "jaxpr" in eqn.params):
            body = lambda inner, consts, inputs: run(inner, consts, inputs, around)
            inside = retraced(inner_jaxprs(eqn)[0][0], body)
            return bind(eqn, given, jaxpr=inside)
        return [named(eqn, k, out, innermost(around)) for k, out in enumerate(bind(eqn, given))]

    def named(eqn: Any, k: int, out: Any, call: Any) -> Any:
        aval = eqn.outvars[k].aval
        tagged = tagged_name(eqn.primitive, eqn.params) is not None
        if tagged or eqn.primitive.name in _COPIES or not _is_plain(aval):
            return out
        mark = f"{_HEAD}{prefix}{next(count)}"
        taps[mark] = Tap(mark, eqn.primitive.name, tuple(aval.shape), str(aval.dtype), user_line(eqn, call))
        return checkpoint_name(out, mark)

    avals = [v.aval for v in closed.jaxpr.invars]
    new = jax.make_jaxpr(lambda *inputs: run(closed.jaxpr, closed.consts, inputs))(*avals)
    return Marked(new, taps)


Tapped = tuple[list[Any], list[Tap], list[Any]]
"""The outputs; what is handed out beside them, as data; and as arrays."""


def tapped(
    jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], taps: dict[str, Tap], around: tuple[Any, ...] = ()
) -> Tapped:
    """Evaluate an open ``jaxpr`` of a marked program, or of its gradient, handing out what bears a name.

    A rerun starts behind a barrier, as in JAX's own remat, so that the compiler can't take the first run's values for
    it.

    Args:
        consts, inputs: arrays or tracers.
        taps: of the marks.
        around: the equations that it is inside of.
    """
    found: list[Tap] = []
    values: list[Any] = []

    def rule(eqn: Any, given: Sequence[Any], around: tuple[Any, ...]) -> Sequence[Any]:
        inside = (*around, eqn)
        if is_remat(eqn):
            inner = inner_jaxprs(eqn)[0][0]
            given = list(lax.optimization_barrier(given))
            outs, more, made = tapped(opened(inner), consts_of(inner), given, taps, inside)
        elif eqn.primitive.name == SCAN:
            outs, more, made = _scan(eqn, given, taps, inside)
        else:
            outs, more, made = bind(eqn, given), [], []
            name = tagged_name(eqn.primitive, eqn.params)
            if name is not None and _is_plain(eqn.outvars[0].aval):
                again = any(REMAT_SCOPE in scopes(step) for step in inside)
                more, made = [_tap(eqn, name, taps, again, innermost(around))], outs
        found.extend(more)
        values.extend(made)
        return outs

    enter = lambda eqn: is_call(eqn) or eqn.primitive.name == CUSTOM_JVP
    return interpret(jaxpr, consts, inputs, rule, enter, around), found, values


def innermost(around: tuple[Any, ...]) -> Any:
    """The innermost call among the equations around another, or None."""
    return next((eqn for eqn in reversed(around) if is_call(eqn)), None)


def _scan(eqn: Any, given: Sequence[Any], taps: dict[str, Tap], inside: tuple[Any, ...]) -> Tapped:
    num_consts, num_carry = loop_parts(eqn)
    rows = num_consts + num_carry
    inner = eqn.params["jaxpr"]
    found: list[Tap] = []

    def turn(carry: Any, row: Any) -> tuple[Any, Any]:
        inputs = [*given[:num_consts], *carry, *row]
        outs, more, values = tapped(opened(inner), consts_of(inner), inputs, taps, inside)
        found[:] = more
        return outs[:num_carry], (outs[num_carry:], values)

    params = {key: eqn.params[key] for key in ("reverse", "length", "unroll")}
    last, (stacked, values) = lax.scan(turn, list(given[num_consts:rows]), list(given[rows:]), **params)
    return [*last, *stacked], [replace(tap, loops=tap.loops + 1) for tap in found], values


def _tap(eqn: Any, name: str, taps: dict[str, Tap], again: bool, call: Any) -> Tap:
    aval = eqn.outvars[0].aval
    own = Tap(name, name, tuple(aval.shape), str(aval.dtype), user_line(eqn, call))
    return replace(taps.get(name, own), again=again)


def _is_plain(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", jax.dtypes.float0)
    return dtype != jax.dtypes.float0 and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) and not is_ref(aval)
