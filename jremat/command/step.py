"""A gradient computation of any function, for those who ask what it needs as it runs."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jremat.graph.arguments import take_apart


def gradient_step(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Forward and backward of ``f``, and the arguments to call it with.

    Differentiated by every floating-point array. What isn't a scalar is summed up by the cotangents, which come as
    arguments.

    Returns:
        ``step(arrays, cotangents)`` to the result and the gradients, and those two arguments, as shapes.

    >>> step, (arrays, cotangents) = gradient_step(lambda x: x * x, (jnp.ones(2),), {})
    >>> [gradient.tolist() for gradient in step([jnp.ones(2)], [jnp.ones(2)])[1]]
    [[2.0, 2.0]]
    """
    arguments = take_apart(f, args, kwargs)
    arrays = [jax.ShapeDtypeStruct(jnp.shape(leaf), _dtype(leaf)) for leaf in arguments.arrays]
    active = [k for k, leaf in enumerate(arrays) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    given = jax.tree.leaves(jax.eval_shape(arguments.call, *arrays))
    cotangents = [out for out in given if jnp.issubdtype(out.dtype, jnp.inexact)]

    def step(arrays: list[Any], cotangents: list[Any]) -> Any:
        def of_active(*chosen: Any) -> Any:
            places = dict(zip(active, chosen))
            out = arguments.call(*(places.get(k, leaf) for k, leaf in enumerate(arrays)))
            leaves = jax.tree.leaves(out)
            return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)], leaves

        _, pull, out = jax.vjp(of_active, *(arrays[k] for k in active), has_aux=True)
        return out, pull(cotangents)

    return step, (arrays, cotangents)


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
