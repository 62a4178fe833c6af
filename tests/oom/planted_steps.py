"""Train steps with one planted cause each, by which they need more memory than they should."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jremat.measure

LAYERS, WIDTH, TOKENS = 4, 256, 4096


class Planted(NamedTuple):
    """A step, the shapes of its arguments, and the cause that was planted."""

    cause: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    target: str = "h200"


def _sgd(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(params, *data):
        value, gradients = jax.value_and_grad(loss)(params, *data)
        return jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), params, gradients), value

    return step


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _mlp(params, x):
    def layer(x, w):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    return (jax.lax.scan(layer, x, params)[0].astype(jnp.float32) ** 2).mean()


_MLP = {"up": _array(LAYERS, WIDTH, 4 * WIDTH), "down": _array(LAYERS, 4 * WIDTH, WIDTH)}


def saved_residuals(target: str = "h200") -> Planted:
    return Planted("saved-residuals", jax.jit(_sgd(_mlp), donate_argnums=0), (_MLP, _array(TOKENS, WIDTH)), target)


def unrolled_residuals(target: str = "h200") -> Planted:
    """Layers written one after the other, so that nothing is stacked."""

    def loss(params, x):
        for layer in range(LAYERS):
            x = x + jax.nn.gelu(x @ params["up"][layer]) @ params["down"][layer]
        return (x.astype(jnp.float32) ** 2).mean()

    return Planted("saved-residuals", jax.jit(_sgd(loss), donate_argnums=0), (_MLP, _array(TOKENS, WIDTH)), target)


def not_donated(target: str = "h200") -> Planted:
    """Remat everywhere, few tokens, and the state twice."""
    adam = optax.adam(1e-3)

    def step(state, x):
        params, moments = state
        gradients = jax.grad(lambda p: jax.checkpoint(_mlp)(p, x))(params)
        updates, moments = adam.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    return Planted("not-donated", jax.jit(step), ((_MLP, jax.eval_shape(adam.init, _MLP)), _array(8, WIDTH)), target)


def training_state(target: str = "h200") -> Planted:
    planted = not_donated(target)
    step = planted.step.__wrapped__
    return Planted("training-state", jax.jit(step, donate_argnums=0), planted.args, target)


def logits(target: str = "h200") -> Planted:
    def loss(params, tokens):
        x = jax.checkpoint(lambda e, t: jnp.tanh(e[t]))(params["embedding"], tokens)
        scores = (x @ params["embedding"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(scores, tokens).mean()

    args = {"embedding": _array(32_000, 64)}, _array(2, 2048, dtype=jnp.int32)
    return Planted("logits", jax.jit(_sgd(loss), donate_argnums=0), args, target)


def attention_scores(target: str = "h200") -> Planted:
    def loss(params, x):
        q, k, v = (jnp.einsum("bsd,dnh->bsnh", x, w) for w in params["qkv"])
        p = jax.nn.softmax(jnp.einsum("bsnh,btnh->bnst", q, k), -1)
        return (jnp.einsum("bnst,btnh->bsnh", p, v).astype(jnp.float32) ** 2).mean()

    args = {"qkv": [_array(128, 4, 32)] * 3}, _array(2, 1024, 128)
    return Planted("attention-scores", jax.jit(_sgd(loss), donate_argnums=0), args, target)


def float32_residuals(target: str = "h200") -> Planted:
    """Layers in bfloat16 whose wide activation is computed and saved in float32."""

    def loss(params, x):
        def layer(x, w):
            wide = jnp.exp(jnp.sin((x @ w["up"]).astype(jnp.float32)))
            return x + wide.astype(jnp.bfloat16) @ w["down"], None

        return (jax.lax.scan(layer, x, params)[0].astype(jnp.float32) ** 2).mean()

    return Planted("float32-residuals", jax.jit(_sgd(loss), donate_argnums=0), (_MLP, _array(TOKENS, WIDTH)), target)


def gradient_buffers(target: str = "h200") -> Planted:
    """Micro-batches whose gradients are all there before they are added."""

    def step(params, x):
        each = jax.lax.map(lambda x: jax.grad(jax.checkpoint(_mlp))(params, x), x)
        return jax.tree.map(lambda p, g: p - 0.1 * g.sum(0), params, each)

    return Planted("gradient-buffers", jax.jit(step, donate_argnums=0), (_MLP, _array(8, 8, WIDTH)), target)


def gathered_parameters(target: str = "h200x8") -> Planted:
    """Every layer's parameters are gathered at the start and held."""
    mesh = jremat.measure.mesh("h200x8", fsdp=8)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "fsdp"))
    batch = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def loss(params, x):
        params = jax.lax.with_sharding_constraint(params, whole)
        return jax.checkpoint(_mlp)(params, x)

    params = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows) for name, a in _MLP.items()}
    x = jax.ShapeDtypeStruct((64, WIDTH), jnp.bfloat16, sharding=batch)
    return Planted("gathered-parameters", jax.jit(_sgd(loss), donate_argnums=0), (params, x), target)


# XLA for CPU computes bfloat16 in float32, so that float32 residuals are no surprise there; it has one device.
PLANTED = [
    *((name, "h200") for name in ("saved_residuals", "not_donated", "training_state", "logits", "attention_scores")),
    *((name, "h200") for name in ("float32_residuals", "gradient_buffers", "unrolled_residuals")),
    ("gathered_parameters", "h200x8"),
    *((name, "cpu") for name in ("saved_residuals", "not_donated", "training_state", "logits", "attention_scores")),
    *((name, "cpu") for name in ("gradient_buffers", "unrolled_residuals")),
]


def planted(name: str, target: str) -> Planted:
    """The step of a name for a target."""
    return globals()[name](target)
