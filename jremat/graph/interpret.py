"""The one interpreter of jaxprs: a program evaluated equation by equation, with a rule for what each of them does.

Under ``jax.make_jaxpr`` it rewrites programs: names put on values, remats taken away, values handed out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from jremat.jax_internals import COND, inner_jaxprs, is_call, opened

Rule = Callable[[Any, list[Any], tuple[Any, ...]], Sequence[Any]]
"""From an equation, its inputs and the equations that were entered around it, outermost first, to its outputs."""


def interpret(
    jaxpr: Any,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    rule: Rule,
    enter: Callable[[Any], bool] = is_call,
    around: tuple[Any, ...] = (),
) -> list[Any]:
    """Evaluate an open jaxpr.

    Args:
        jaxpr: open.
        consts, inputs: arrays or tracers.
        rule: evaluates an equation that isn't entered, e.g. ``lambda eqn, inputs, around: bind(eqn, inputs)``.
        enter: whether an equation that runs its inside once is evaluated as if that stood in its place.
        around: the equations that were entered around this jaxpr.

    Returns:
        Its outputs.

    >>> import jax.numpy as jnp
    >>> from jremat.jax_internals import bind
    >>> closed = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x) + 1)(0.0)
    >>> seen = lambda eqn, inputs, around: print(eqn.primitive.name, len(around)) or bind(eqn, inputs)
    >>> outputs = interpret(closed.jaxpr, closed.consts, [0.0], seen)
    sin 1
    add 0
    """
    env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, inputs))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else env[v]

    for eqn in jaxpr.eqns:
        given = [read(v) for v in eqn.invars]
        if enter(eqn):
            inner = inner_jaxprs(eqn)[0][0]
            outs: Sequence[Any] = interpret(opened(inner), consts_of(inner), given, rule, enter, (*around, eqn))
        else:
            outs = rule(eqn, given, around)
        env |= dict(zip(eqn.outvars, outs))
    return [read(v) for v in jaxpr.outvars]


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """The constants of a closed jaxpr; an open one that stands in an equation has none."""
    return jaxpr.consts if isinstance(jaxpr, core.ClosedJaxpr) else ()


def retraced(jaxpr: Any, evaluate: Callable[[Any, Sequence[Any], Sequence[Any]], Sequence[Any]]) -> Any:
    """The program of ``evaluate(inner, consts, inputs)`` in the place of a jaxpr, closed where that is closed."""
    inner = opened(jaxpr)
    new = jax.make_jaxpr(lambda *inputs: evaluate(inner, consts_of(jaxpr), inputs))(*(v.aval for v in inner.invars))
    if isinstance(jaxpr, core.ClosedJaxpr):
        return new
    assert not new.consts, "an open body holds no constants"
    return new.jaxpr


def with_jaxprs(eqn: Any, change: Callable[[int, Any], Any]) -> dict[str, Any]:
    """The parameter of a loop, a branch or a call to change, so that it holds ``change(k, jaxpr)`` for each jaxpr."""
    changed = tuple(change(k, jaxpr) for k, (jaxpr, _) in enumerate(inner_jaxprs(eqn)))
    return {"branches": changed} if eqn.primitive.name == COND else {"jaxpr": changed[0]}
