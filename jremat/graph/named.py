"""Names put on the outputs of an operation where its derivative reads them, so that what is kept isn't run again."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from jremat.graph.differentiate import is_inexact, of_places, zero_tangent
from jremat.graph.interpret import interpret
from jremat.jax_internals import bind, differentiates

Vars = set[Any]


def bind_named(eqn: Any, inputs: Sequence[Any], names: Sequence[str | None], others: Sequence[Any] = ()) -> list[Any]:
    """Run one equation, its outputs under ``names``, which its derivative reads too.

    JAX's rules read the output as the primitive gave it: with a name on a copy of it, ``jax.checkpoint`` would keep the
    copy and run the operation again. Where a rule reads it, the equation gets a rule of its own: the primitive's own,
    with the name on the output where it is made.

    Args:
        eqn: the equation.
        inputs: of it.
        names: of its outputs, or None.
        others: what is differentiated around it. JAX leaves the call of a custom rule alone where none of its inputs is
            differentiated, and hears no name inside; with these as inputs too, it enters.
    """
    if not differentiates(eqn) or not _reads_outputs(eqn, inputs):
        return _name(bind(eqn, inputs), names)
    count = len(inputs)

    @jax.custom_jvp
    def named(*given: Any) -> list[Any]:
        return _name(bind(eqn, given[:count]), names)

    @functools.partial(named.defjvp, symbolic_zeros=True)
    def rule(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        primals, tangents = primals[:count], tangents[:count]
        active = [k for k, t in enumerate(tangents) if not isinstance(t, SymbolicZero) and is_inexact(t)]
        if not active:
            outs = _name(bind(eqn, primals), names)
            return outs, [zero_tangent(out) for out in outs]
        derivative = _derivative(eqn, primals, active)
        given = [*primals, *(tangents[k] for k in active)]
        outs = _run(derivative, given, names)
        primal_outs, moved = outs[: len(outs) // 2], outs[len(outs) // 2 :]
        moving = _depending(derivative.jaxpr, derivative.jaxpr.invars[count:])
        flags = [not isinstance(v, core.Literal) and v in moving for v in derivative.jaxpr.outvars[len(moved) :]]
        return primal_outs, [t if flag else zero_tangent(out) for t, flag, out in zip(moved, flags, primal_outs)]

    return list(named(*inputs, *others))


def _name(outs: Sequence[Any], names: Sequence[str | None]) -> list[Any]:
    return [checkpoint_name(out, name) if name else out for out, name in zip(outs, names, strict=True)]


def _derivative(eqn: Any, primals: Sequence[Any], active: Sequence[int]) -> Any:
    """The closed jaxpr of (inputs, tangents of the active ones) to outputs and tangents, calls entered."""

    def moved(*given: Any) -> list[Any]:
        at, along = given[: len(primals)], given[len(primals) :]
        of_active = of_places(lambda *filled: bind(eqn, filled), at, active)
        outs, out_tangents = jax.jvp(of_active, tuple(at[k] for k in active), tuple(along))
        return [*outs, *out_tangents]

    types = [jax.typeof(x) for x in primals]
    closed = jax.make_jaxpr(moved)(*types, *(types[k].to_tangent_aval() for k in active))
    return jax.make_jaxpr(lambda *given: _run(closed, given, ()))(*(v.aval for v in closed.jaxpr.invars))


def _run(closed: Any, inputs: Sequence[Any], names: Sequence[str | None]) -> list[Any]:
    """Evaluate a derivative, calls entered; the first outputs, and what is made beside them, are named."""
    heads = list(closed.jaxpr.outvars[: len(names)])
    beside = next((name for name in names if name), None)

    def named(step: Any, given: Sequence[Any], around: tuple[Any, ...]) -> list[Any]:
        makes = any(names) and any(var in heads for var in step.outvars)  # what the rule needs is made beside
        found = [names[heads.index(var)] if var in heads else beside if makes else None for var in step.outvars]
        return _name(bind(step, given), found)

    outs = interpret(closed.jaxpr, closed.consts, inputs, named)
    made = {v for step in closed.jaxpr.eqns for v in step.outvars}
    for k, v in enumerate(heads):  # an output that is an input, or a constant
        if names[k] and (isinstance(v, core.Literal) or v not in made):
            outs[k] = checkpoint_name(outs[k], names[k])
    return outs


def _depending(jaxpr: Any, given: Sequence[Any]) -> Vars:
    found: Vars = set(given)
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, core.Literal) and v in found for v in eqn.invars):
            found |= set(eqn.outvars)
    return found


def _reads_outputs(eqn: Any, inputs: Sequence[Any]) -> bool:
    """Whether the derivative of an equation, by what floats, reads what the equation makes."""
    places = [k for k, v in enumerate(eqn.invars) if not isinstance(v, core.Literal) and is_inexact(v.aval)]
    if not any(is_inexact(v.aval) for v in eqn.outvars):
        return False
    # One by one: some rules refuse an input, of which nothing says whether it is differentiated.
    return any(_reads_by(eqn, inputs, [k]) for k in places)


def _reads_by(eqn: Any, inputs: Sequence[Any], active: Sequence[int]) -> bool:
    try:
        jaxpr = _derivative(eqn, inputs, active).jaxpr
    except Exception:  # whatever a rule raises: it will be raised again where the function is differentiated so
        return False
    moving = _depending(jaxpr, jaxpr.invars[len(inputs) :])
    if not any(not isinstance(v, core.Literal) and v in moving for v in jaxpr.outvars[len(eqn.outvars) :]):
        return False
    heads = {v for v in jaxpr.outvars[: len(eqn.outvars)] if not isinstance(v, core.Literal)}
    made = {v for step in jaxpr.eqns if heads & set(step.outvars) for v in step.outvars}
    return any(not isinstance(v, core.Literal) and v in made for step in jaxpr.eqns for v in step.invars)
