"""Small blocks to plan, as pure functions of (layer parameters, carry)."""

import jax
import jax.numpy as jnp

from jremat.policy import tag

HIDDEN, WIDE, ROWS = 32, 128, 64


def mlp(w, x):
    """Two matmuls around a sine, with a residual stream: [rows, h] to [rows, h]; the sine's cosine can't be kept."""
    up = tag(x @ w["up"], "up")
    return x + tag(jnp.sin(up) @ w["down"], "down")


def mlp_args(rows: int = ROWS):
    """Shapes of one layer's parameters and of the carry."""
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    return {"up": shape(HIDDEN, WIDE), "down": shape(WIDE, HIDDEN)}, shape(rows, HIDDEN)


def bare(w, x):
    """The same without tags."""
    return x + jnp.sin(x @ w["up"]) @ w["down"]


def deep(w, x):
    """Three matmuls and two tags, the second value twice as large as the first."""
    first = tag(x @ w["first"], "first")
    second = tag(jnp.sin(first) @ w["second"], "second")
    return x + jnp.sin(second) @ w["third"]


def deep_args():
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    w = {"first": shape(HIDDEN, WIDE), "second": shape(WIDE, 2 * WIDE), "third": shape(2 * WIDE, HIDDEN)}
    return w, shape(ROWS, HIDDEN)


def routed(w, x):
    """A router that sends each row to one of two experts: a choice that must not be recomputed."""
    logits = tag(x @ w["router"], "router")
    weight, expert = jax.lax.top_k(jax.nn.softmax(logits), 1)
    up = jnp.einsum("rh,rhw->rw", x, w["experts"][expert[:, 0]])
    return x + weight * (jnp.tanh(up) @ w["down"])


def routed_args():
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    w = {"router": shape(HIDDEN, 2), "experts": shape(2, HIDDEN, WIDE), "down": shape(WIDE, HIDDEN)}
    return w, shape(8, HIDDEN)


def looped(w, x):
    """A loop of three turns with two matmuls each, and a matmul of what it stacks."""

    def turn(carry, _):
        carry += jnp.tanh(carry @ w["up"]) @ w["down"]
        return carry, jnp.sin(carry)

    carry, stacked = jax.lax.scan(turn, x, None, length=3)
    return carry + jnp.tanh(stacked.sum(0) @ w["up"]) @ w["down"]


def complex_carry(w, z):
    """Values that JAX's remat can't keep."""
    h = jnp.tanh(z @ w["c"])
    return z + h * jnp.conj(h) @ w["c"]


def complex_args():
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.complex64)
    return {"c": shape(HIDDEN, HIDDEN)}, shape(ROWS, HIDDEN)


def tanh_mlp(w, x):
    """An activation whose derivative is made from its own result."""
    return x + jnp.tanh(x @ w["up"]) @ w["down"]
