"""Names put on the outputs of an operation where its derivative reads them, so that what is kept isn't run again."""

import functools
import itertools
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
    copy and run the operation again. Where a rule reads it, what the rule computes on the way to the outputs is run and
    named, and the outputs get the rest of the rule as their derivative. The names stand outside of any rule, since
    ``jax_remat3`` reads none inside.

    Args:
        eqn: the equation.
        inputs: of it.
        names: of its outputs, or None.
        others: what is differentiated around it. JAX leaves the call of a custom rule alone where none of its inputs is
            differentiated, and recomputes what the call reads; with these as inputs too, it enters.
    """
    places = _places_that_read(eqn, inputs) if differentiates(eqn) else []
    if not places:
        return _name(bind(eqn, inputs), names)
    derivative = _derivative(eqn, inputs, places)
    makers = [(step.primitive, len(step.outvars)) for step in _makers(derivative.jaxpr)]
    outs, made = _run_makers(derivative, inputs, names)
    return _with_rule(eqn, inputs, outs, made, makers, others)


def bind_supplied(
    eqn: Any, inputs: Sequence[Any], supplied: Sequence[Any | None], others: Sequence[Any] = ()
) -> list[Any]:
    """The outputs of one equation where they are not supplied, all with its derivative at ``inputs``.

    The derivative reads the supplied outputs too, so that the operation isn't run for them.

    Args:
        eqn, inputs, others: as of ``bind_named``.
        supplied: for each output what stands in its place, or None.
    """
    outs = bind(eqn, inputs)
    given = [out if own is None else own for out, own in zip(outs, supplied, strict=True)]
    if differentiates(eqn) and _places_that_read(eqn, inputs):
        return _with_rule(eqn, inputs, given, [], [], others)
    return [out if own is None else with_derivative_of(own, out, *others) for out, own in zip(outs, supplied)]


def with_derivative_of(value: Any, other: Any, *others: Any) -> Any:
    """``value``, with the derivative of another of its type; ``others`` as of ``bind_named``."""
    return _value_of(value, other, *others) if is_inexact(value) else value


@jax.custom_jvp
def _value_of(value: Any, other: Any, *others: Any) -> Any:
    return value


@functools.partial(_value_of.defjvp, symbolic_zeros=True)
def _value_of_rule(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[1]


def _with_rule(
    eqn: Any,
    inputs: Sequence[Any],
    outs: Sequence[Any],
    made: Sequence[Sequence[Any]],
    makers: Sequence[tuple[Any, int]],
    others: Sequence[Any],
) -> list[Any]:
    """``outs`` with the derivative of an equation at ``inputs``, which reads them and what its steps made, if known."""
    sizes = (len(outs), *(len(of_step) for of_step in made), len(inputs), len(others))

    @jax.custom_jvp
    def with_rule(*given: Any) -> list[Any]:
        return list(given[: len(outs)])

    @functools.partial(with_rule.defjvp, symbolic_zeros=True)
    def rule(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        heads, *known, at, _ = _split(primals, sizes)
        along = _split(tangents, sizes)[-2]
        active = [k for k, t in enumerate(along) if not isinstance(t, SymbolicZero) and is_inexact(t)]
        if not active:
            return heads, [zero_tangent(out) for out in heads]
        moved = _derivative(eqn, at, active)
        same = made and makers == [(step.primitive, len(step.outvars)) for step in _makers(moved.jaxpr)]
        return heads, _tangents(moved, at, [along[k] for k in active], heads, known if same else None)

    return list(with_rule(*outs, *itertools.chain(*made), *inputs, *others))


def _name(outs: Sequence[Any], names: Sequence[str | None]) -> list[Any]:
    return [checkpoint_name(out, name) if name else out for out, name in zip(outs, names, strict=True)]


def _split(values: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    ends = [*itertools.accumulate(sizes, initial=0)]
    return [list(values[start:end]) for start, end in itertools.pairwise(ends)]


def _derivative(eqn: Any, primals: Sequence[Any], active: Sequence[int]) -> Any:
    """The closed jaxpr of (inputs, tangents of the active ones) to outputs and tangents, calls entered."""

    def moved(*given: Any) -> list[Any]:
        at, along = given[: len(primals)], given[len(primals) :]
        of_active = of_places(lambda *filled: bind(eqn, filled), at, active)
        outs, out_tangents = jax.jvp(of_active, tuple(at[k] for k in active), tuple(along))
        return [*outs, *out_tangents]

    types = [jax.typeof(x) for x in primals]
    closed = jax.make_jaxpr(moved)(*types, *(types[k].to_tangent_aval() for k in active))
    entered = lambda *given: interpret(closed.jaxpr, closed.consts, given, lambda step, inputs, _: bind(step, inputs))
    return jax.make_jaxpr(entered)(*(v.aval for v in closed.jaxpr.invars))


def _heads(jaxpr: Any) -> list[Any]:
    """The variables of the outputs in a derivative, which come before their tangents."""
    return jaxpr.outvars[: len(jaxpr.outvars) // 2]


def _makers(jaxpr: Any) -> list[Any]:
    """The steps of a derivative that make an output. What they make beside it, the rule may read too."""
    heads = _variables(_heads(jaxpr))
    return [step for step in jaxpr.eqns if heads.intersection(step.outvars)]


def _run_makers(
    derivative: Any, inputs: Sequence[Any], names: Sequence[str | None]
) -> tuple[list[Any], list[list[Any]]]:
    """The outputs of an operation and all that each step makes that makes one, under their names; no tangents."""
    jaxpr, heads = derivative.jaxpr, _heads(derivative.jaxpr)
    beside = next(name for name in names if name)
    makers, read = _makers(jaxpr), _variables(heads)
    for step in reversed(jaxpr.eqns):
        if read.intersection(step.outvars):
            read |= _variables(step.invars)
    made: list[list[Any]] = []

    def run(step: Any, given: Sequence[Any], around: tuple[Any, ...]) -> list[Any]:
        if not read.intersection(step.outvars):
            return [None] * len(step.outvars)
        outs = bind(step, given)
        if any(step is maker for maker in makers):
            outs = _name(outs, [names[heads.index(v)] if v in heads else beside for v in step.outvars])
            made.append(outs)
        return outs

    without = [None] * (len(jaxpr.invars) - len(inputs))
    outs = interpret(jaxpr.replace(outvars=heads), derivative.consts, [*inputs, *without], run)
    named = _variables([v for step in makers for v in step.outvars])
    # What is an input, or a constant, no step makes.
    is_named = [not isinstance(v, core.Literal) and v in named for v in heads]
    return _name(outs, [None if done else name for done, name in zip(is_named, names)]), made


def _tangents(
    derivative: Any, at: Sequence[Any], along: Sequence[Any], outs: Sequence[Any], known: Sequence[Sequence[Any]] | None
) -> list[Any]:
    """The tangents of the outputs from these, and from what the steps that make them gave, where known."""
    jaxpr, heads, makers = derivative.jaxpr, _heads(derivative.jaxpr), _makers(derivative.jaxpr)

    def run(step: Any, inputs: Sequence[Any], around: tuple[Any, ...]) -> Sequence[Any]:
        place = next((k for k, maker in enumerate(makers) if step is maker), None)
        if place is None:
            return bind(step, inputs)
        found = bind(step, inputs) if known is None else known[place]
        return [outs[heads.index(v)] if v in heads else x for v, x in zip(step.outvars, found)]

    moved = jaxpr.outvars[len(heads) :]
    moving = _depending(jaxpr, jaxpr.invars[len(at) :])
    found = interpret(jaxpr.replace(outvars=moved), derivative.consts, [*at, *along], run)
    moves = [not isinstance(v, core.Literal) and v in moving for v in moved]
    return [t if flag else zero_tangent(out) for t, flag, out in zip(found, moves, outs)]


def _variables(some: Sequence[Any]) -> Vars:
    return {v for v in some if not isinstance(v, core.Literal)}


def _depending(jaxpr: Any, given: Sequence[Any]) -> Vars:
    found: Vars = set(given)
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, core.Literal) and v in found for v in eqn.invars):
            found |= set(eqn.outvars)
    return found


def _places_that_read(eqn: Any, inputs: Sequence[Any]) -> list[int]:
    """The places of the inputs of an equation by which its derivative reads what the equation makes."""
    places = [k for k, v in enumerate(eqn.invars) if not isinstance(v, core.Literal) and is_inexact(v.aval)]
    if not any(is_inexact(v.aval) for v in eqn.outvars):
        return []
    # One by one: some rules refuse an input, of which nothing says whether it is differentiated.
    return [k for k in places if _reads_by(eqn, inputs, [k])]


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
