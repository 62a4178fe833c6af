"""Run a traced function again, with names put on chosen values."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from jremat.graph.named import bind_named
from jremat.graph.trace import REWRITABLE
from jremat.jax_internals import COND, bind, inner_jaxprs, is_call, opened


def evaluate(
    jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], marks: Mapping[str, str], prefix: str = ""
) -> list:
    """Evaluate ``jaxpr``, naming the values of ``marks``.

    Args:
        jaxpr: open; read by ``jremat.trace`` into the graph that ``marks`` speaks of.
        consts, inputs: arrays or tracers.
        marks: value id in that graph -> name; ids inside scans and branches are named there.
        prefix: of the ids, inside another operation.

    Returns:
        The outputs.
    """
    count = itertools.count()
    active = [x for x in (*consts, *inputs) if jnp.issubdtype(getattr(x, "dtype", bool), jnp.inexact)]

    def run(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list:
        env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, inputs))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, core.Literal) else env[v]

        for eqn in jaxpr.eqns:
            given = [read(v) for v in eqn.invars]
            if is_call(eqn):
                (inner, _), *_ = inner_jaxprs(eqn)
                outs = run(opened(inner), _consts(inner), given)
            else:
                key = f"{prefix}{next(count)}"
                names = [marks.get(key if k == 0 else f"{key}:{k}") for k in range(len(eqn.outvars))]
                if inside := _marked_inside(eqn, key, marks):
                    outs = bind(eqn, given, **inside)
                    outs = [checkpoint_name(out, name) if name else out for out, name in zip(outs, names)]
                else:
                    outs = bind_named(eqn, given, names, active) if any(names) else bind(eqn, given)
            env |= dict(zip(eqn.outvars, outs))
        return [read(v) for v in jaxpr.outvars]

    return run(jaxpr, consts, inputs)


def _consts(jaxpr: Any) -> Sequence[Any]:
    return jaxpr.consts if isinstance(jaxpr, core.ClosedJaxpr) else ()


def _marked_inside(eqn: Any, key: str, marks: Mapping[str, str]) -> dict[str, Any]:
    """The parameters to change so that the marks inside a loop body or a branch are named there."""
    if eqn.primitive.name not in REWRITABLE or not any(mark.startswith(f"{key}/") for mark in marks):
        return {}
    jaxprs = [jaxpr for jaxpr, _ in inner_jaxprs(eqn)]
    marked = tuple(
        _rebuilt(jaxpr, marks, f"{key}/{f'{k}.' if len(jaxprs) > 1 else ''}") for k, jaxpr in enumerate(jaxprs)
    )
    return {"branches": marked} if eqn.primitive.name == COND else {"jaxpr": marked[0]}


def _rebuilt(jaxpr: Any, marks: Mapping[str, str], prefix: str) -> Any:
    """The same jaxpr with names inside, closed if it was closed."""
    inner, consts = opened(jaxpr), _consts(jaxpr)
    new = jax.make_jaxpr(lambda *inputs: evaluate(inner, consts, inputs, marks, prefix))(
        *(v.aval for v in inner.invars)
    )
    if isinstance(jaxpr, core.ClosedJaxpr):
        return new
    assert not new.consts, "an open loop body holds no constants"
    return new.jaxpr
