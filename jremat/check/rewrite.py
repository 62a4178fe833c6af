"""A traced program with some of its remats, or other wrappings, taken away."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.extend import core

from jremat.graph.trace import REWRITABLE
from jremat.jax_internals import COND, bind, inner_jaxprs, is_call, is_remat, opened


def inlined(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], drop: Collection[int]) -> list[Any]:
    """Evaluate ``jaxpr``, calls entered and the wrappings of ``drop`` as if they weren't there.

    Args:
        jaxpr: open.
        consts, inputs: arrays or tracers.
        drop: ids of equations that run their inside once, as a remat does; inner ones too.
    """
    env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, inputs))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else env[v]

    for eqn in jaxpr.eqns:
        given = [read(v) for v in eqn.invars]
        if is_call(eqn) or id(eqn) in drop:
            (inner, _), *_ = inner_jaxprs(eqn)
            outs = inlined(opened(inner), _consts(inner), given, drop)
        else:
            outs = bind(eqn, given, **_changed(eqn, drop))
        env |= dict(zip(eqn.outvars, outs))
    return [read(v) for v in jaxpr.outvars]


def _changed(eqn: Any, drop: Collection[int]) -> dict[str, Any]:
    """The parameters of a loop, a branch or a remat that holds something to drop."""
    kind = eqn.primitive.name
    rewritable = kind in REWRITABLE or (is_remat(eqn) and "jaxpr" in eqn.params)
    if not rewritable or not any(_holds(inner, drop) for inner, _ in inner_jaxprs(eqn)):
        return {}
    changed = tuple(_rebuilt(inner, drop) for inner, _ in inner_jaxprs(eqn))
    return {"branches": changed} if kind == COND else {"jaxpr": changed[0]}


def _holds(jaxpr: Any, drop: Collection[int]) -> bool:
    return any(
        id(eqn) in drop or any(_holds(inner, drop) for inner, _ in inner_jaxprs(eqn)) for eqn in opened(jaxpr).eqns
    )


def _rebuilt(jaxpr: Any, drop: Collection[int]) -> Any:
    inner = opened(jaxpr)
    new = jax.make_jaxpr(lambda *inputs: inlined(inner, _consts(jaxpr), inputs, drop))(*(v.aval for v in inner.invars))
    if isinstance(jaxpr, core.ClosedJaxpr):
        return new
    assert not new.consts, "an open body holds no constants"
    return new.jaxpr


def _consts(jaxpr: Any) -> Sequence[Any]:
    return jaxpr.consts if isinstance(jaxpr, core.ClosedJaxpr) else ()
