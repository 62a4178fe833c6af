"""A gradient computation of any function, for those who ask what it needs as it runs."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jremat.graph.arguments import take_apart
from jremat.graph.differentiate import is_inexact


def gradient_step(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Forward and backward of ``f``, and the arguments to call it with.

    Differentiated by every floating-point array. What isn't a scalar is summed up by the cotangents, which come as
    arguments.

    Returns:
        ``step(arrays, cotangents)`` to the result and the gradients, and those two arguments, as shapes by name.

    >>> step, (arrays, cotangents) = gradient_step(lambda x: x * x, (jnp.ones(2),), {})
    >>> list(arrays), list(cotangents)
    (['argument 0'], ['cotangent 0'])
    >>> [gradient.tolist() for gradient in step({"argument 0": jnp.ones(2)}, {"cotangent 0": jnp.ones(2)})[1]]
    [[2.0, 2.0]]
    """
    arguments = take_apart(f, args, kwargs)
    arrays = {
        path: jax.ShapeDtypeStruct(jnp.shape(leaf), getattr(leaf, "dtype", None) or jnp.result_type(leaf))
        for path, leaf in zip(arguments.array_paths, arguments.arrays)
    }
    active = [path for path, leaf in arrays.items() if is_inexact(leaf)]
    given = filter(is_inexact, jax.tree.leaves(jax.eval_shape(arguments.call, *arrays.values())))
    cotangents = {f"cotangent {k}": out for k, out in enumerate(given)}
    paths, places = tuple(arrays), tuple(cotangents)

    def step(arrays: Mapping[str, Any], cotangents: Mapping[str, Any]) -> Any:
        def of_active(*chosen: Any) -> Any:
            own = dict(arrays) | dict(zip(active, chosen))
            leaves = jax.tree.leaves(arguments.call(*(own[path] for path in paths)))
            return [leaf for leaf in leaves if is_inexact(leaf)], leaves

        _, pull, out = jax.vjp(of_active, *(arrays[path] for path in active), has_aux=True)
        return out, pull([cotangents[place] for place in places])

    return step, (arrays, cotangents)
