"""A training step around any loss, in shapes: the gradient, its sum over micro-batches, the optimizer's update."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

OPTIMIZERS: Mapping[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "momentum": lambda: optax.sgd(1e-3, momentum=0.9),
    "sgd": lambda: optax.sgd(1e-3),
}
"""Two running means a parameter, one, or none; of the dtype of what they update, as optax makes them."""


def train_step(
    f: Callable[..., Any],
    params: Any,
    batch: tuple[Any, ...],
    out: Any,
    *,
    optimizer: str = "adamw",
    master_weights: bool = False,
    accumulate: int = 1,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A jitted step whose state is donated, and the shapes to call it with.

    Args:
        f: ``f(params, *batch)`` to a scalar, or to arrays whose cotangents come as one more argument: a part of a
            model.
        params, batch: shapes, in numbers or letters.
        out: of ``f``.
        optimizer: of ``OPTIMIZERS``.
        master_weights: the optimizer updates float32 copies, from which the weights are cast.
        accumulate: micro-batches; above 1 their gradients are added to a float32 sum, here that of the last.

    Returns:
        ``step(params, (masters, optimizer's state), sum, cotangents, *batch)`` and its arguments.
    """
    wide = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32)
    masters = jax.tree.map(wide, params) if master_weights else None
    state = masters, jax.eval_shape(OPTIMIZERS[optimizer]().init, masters or params)
    summed = jax.tree.map(wide, params) if accumulate > 1 else None
    whole = isinstance(out, jax.ShapeDtypeStruct) and not out.shape
    cotangents = None if whole else out

    def step(params: Any, state: Any, summed: Any, cotangents: Any, *batch: Any) -> Any:
        if whole:
            value, grads = jax.value_and_grad(f)(params, *batch)
        else:
            value, pull = jax.vjp(lambda p: f(p, *batch), params)
            (grads,) = pull(cotangents)
        return *_update(optimizer)(params, state, summed, grads), value

    return jax.jit(step, donate_argnums=(0, 1, 2)), (params, state, summed, cotangents, *batch)


@functools.cache
def _update(optimizer: str) -> Callable[..., Any]:
    """New weights and state, traced once for all steps of one kind."""

    def update(params: Any, state: Any, summed: Any, grads: Any) -> Any:
        masters, means = state
        if summed is not None:
            grads = jax.tree.map(lambda total, one: total + one.astype(total.dtype), summed, grads)
        if masters is not None:
            grads = jax.tree.map(lambda g, m: g.astype(m.dtype), grads, masters)
        updates, means = OPTIMIZERS[optimizer]().update(grads, means, masters or params)
        new = optax.apply_updates(masters or params, updates)
        weights = jax.tree.map(lambda n, p: n.astype(p.dtype), new, params)
        return weights, (new if masters is not None else None, means)

    return jax.jit(update, inline=True)
