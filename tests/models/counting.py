"""Counts read from jaxprs by hand, so that the models' tests lean on nothing of ours."""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import jax
from jax.extend import core


def kept(fn: Callable, *args: Any) -> list[jax.core.ShapedArray]:
    """What ``fn`` keeps for its backward, arguments left out."""
    jaxpr = jax.make_jaxpr(lambda *args: jax.vjp(fn, *args)[1])(*args).jaxpr
    arguments = set(jaxpr.invars)
    return [v.aval for v in jaxpr.outvars if not isinstance(v, core.Literal) and v not in arguments]


def kept_shapes(fn: Callable, *args: Any) -> list[tuple[str, tuple[int, ...]]]:
    return sorted((str(aval.dtype), aval.shape) for aval in kept(fn, *args))


def kept_bytes(fn: Callable, *args: Any) -> int:
    """Bytes of ``kept``; a random key counts as its two words."""
    return sum(
        aval.size * (8 if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key) else aval.dtype.itemsize)
        for aval in kept(fn, *args)
    )


def matmuls(fn: Callable, *args: Any) -> tuple[int, int]:
    """(How many, a loop's body counted once; their FLOPs, loops multiplied by their trips) when ``fn`` runs."""
    flops = [
        trips * _flops(eqn)
        for eqn, trips in equations(jax.make_jaxpr(fn)(*args).jaxpr)
        if eqn.primitive.name == "dot_general"
    ]
    return len(flops), sum(flops)


def gradient_matmuls(fn: Callable, *args: Any) -> tuple[int, int]:
    """``matmuls`` of the gradients of ``fn``'s sum with respect to every argument."""
    return matmuls(jax.grad(lambda *args: fn(*args).sum(), argnums=tuple(range(len(args)))), *args)


def equations(jaxpr: Any, trips: int = 1) -> Iterator[tuple[Any, int]]:
    """Every equation, inner ones too, with how often it runs."""
    for eqn in jaxpr.eqns:
        yield eqn, trips
        inner = trips
        if eqn.primitive.name == "scan":
            inner *= eqn.params["length"]
        if eqn.primitive.name == "while":
            (less,) = eqn.params["cond_jaxpr"].jaxpr.eqns  # counter < literal
            assert less.primitive.name == "lt" and less.invars[0] is eqn.params["cond_jaxpr"].jaxpr.invars[0]
            inner *= int(less.invars[1].val)
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple | list) else (value,):
                sub = getattr(sub, "jaxpr", sub)
                if hasattr(sub, "eqns"):
                    yield from equations(sub, inner)


def _flops(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.invars[0].aval.shape
    return 2 * prod(eqn.outvars[0].aval.shape) * prod(lhs[axis] for axis in contracted)
