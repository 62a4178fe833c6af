"""A small stack with dropout, and what the executor's tests ask of it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jremat
import policies
from jremat.policy import tag
from jremat.transform.chain import stack

L, B, H, F = 7, 4, 8, 32  # layers, batch, hidden, MLP
STATE, UP = B * H * 4, B * F * 4  # bytes of a carry and of an MLP's inside
DOTS = "dots_with_no_batch_dims_saveable"
PLANS = (
    "none",
    "full",
    "save:up",
    DOTS,
    "every_k:3",
    "every_k:3,full",
    "every_k:7",
    "alternate:2",
    "block:2",
    "torchtitan:3",
    "revolve:1",
    "revolve:2",
    "revolve:7",
    "mix:3*full,2*every_k:2,2*save:up",
)


def block(p: Any, x: jax.Array, scale: jax.Array) -> jax.Array:
    """A residual MLP with dropout. x: [b, h]."""
    y = jnp.tanh(tag(x @ p["in"], "up")) * scale
    dropped = jnp.where(jax.random.bernoulli(p["key"], 0.8, y.shape), y / 0.8, 0.0)
    return x + dropped @ p["out"]


def weights(num_layers: int = L) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "in": jax.random.normal(keys[0], (num_layers, H, F)) * H**-0.5,
        "out": jax.random.normal(keys[1], (num_layers, F, H)) * F**-0.5,
        "key": jax.random.split(keys[2], num_layers),
    }


X, SCALE = jax.random.normal(jax.random.key(4), (B, H)), jnp.linspace(0.5, 1.5, F)


def plain(p: Any, x: jax.Array, scale: jax.Array) -> jax.Array:
    return lax.scan(lambda x, p: (block(p, x, scale), None), x, p)[0]


def loss(run: Any, key: Any) -> Any:
    return lambda real, x, scale: (run(real | {"key": key}, x, scale) ** 2).sum()


def value_and_gradients(run: Any, num_layers: int = L) -> Any:
    p = weights(num_layers)
    real = {n: p[n] for n in ("in", "out")}
    return jax.jit(jax.value_and_grad(loss(run, p["key"]), argnums=(0, 1, 2)))(real, X, SCALE)


ROUNDING = 1e-5
"""The largest error of float32, where sums run in another order."""


def largest_error(found: Any, expected: Any) -> float:
    """Relative to each array's largest entry."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


def kept_bytes(spec: str, num_layers: int = L) -> int:
    run = stack(block, policies.get(spec), num_layers=num_layers)
    return jremat.residuals(lambda p, x: run(p, x, SCALE), weights(num_layers), X).total_bytes


def reruns(run: Any, num_layers: int = L) -> int:
    """Matmuls run again."""
    step = jax.value_and_grad(lambda p, x: (run(p | {"key": weights(num_layers)["key"]}, x, SCALE) ** 2).sum(), (0, 1))
    p = weights(num_layers)
    return jremat.flops(step, {n: p[n] for n in ("in", "out")}, X).count.recompute
