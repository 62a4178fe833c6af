"""A traced program with some of its remats, or other wrappings, taken away."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jremat.graph.interpret import interpret, retraced, with_jaxprs
from jremat.graph.trace import REWRITABLE
from jremat.jax_internals import bind, inner_jaxprs, is_call, is_remat, opened


def inlined(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], drop: Collection[int]) -> list[Any]:
    """Evaluate ``jaxpr``, calls entered and the wrappings of ``drop`` as if they weren't there.

    Args:
        jaxpr: open.
        consts, inputs: arrays or tracers.
        drop: ids of equations that run their inside once, as a remat does; inner ones too.
    """
    return interpret(
        jaxpr,
        consts,
        inputs,
        lambda eqn, given, _: bind(eqn, given, **_changed(eqn, drop)),
        lambda eqn: is_call(eqn) or id(eqn) in drop,
    )


def remats(jaxpr: Any) -> Iterator[int]:
    """The ids of the equations of JAX's remat in a jaxpr and in its loops, branches and remats."""
    for eqn in opened(jaxpr).eqns:
        if is_remat(eqn):
            yield id(eqn)
        if is_call(eqn) or is_remat(eqn) or eqn.primitive.name in REWRITABLE:
            for inner, _ in inner_jaxprs(eqn):
                yield from remats(inner)


def _changed(eqn: Any, drop: Collection[int]) -> dict[str, Any]:
    """The parameters of a loop, a branch or a remat that holds something to drop."""
    rewritable = eqn.primitive.name in REWRITABLE or (is_remat(eqn) and "jaxpr" in eqn.params)
    if not rewritable or not any(_holds(inner, drop) for inner, _ in inner_jaxprs(eqn)):
        return {}
    return with_jaxprs(
        eqn, lambda _, jaxpr: retraced(jaxpr, lambda inner, consts, inputs: inlined(inner, consts, inputs, drop))
    )


def _holds(jaxpr: Any, drop: Collection[int]) -> bool:
    return any(
        id(eqn) in drop or any(_holds(inner, drop) for inner, _ in inner_jaxprs(eqn)) for eqn in opened(jaxpr).eqns
    )
