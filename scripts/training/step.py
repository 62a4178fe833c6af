"""The train step: loss, gradient over micro-batches, update; and the evaluation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jremat.estimator.config import TransformerConfig
from models.sharding import Sharding
from models.transformer import Transformer, mean_loss

Params = Any


class State(NamedTuple):
    """What a snapshot holds: parameters and optimizer state (float32), and the number of steps done (int32)."""

    params: Params
    optimizer: Any
    step: jax.Array


class Metrics(NamedTuple):
    """What a step tells: the loss before its update, in nats, and the gradient's global norm before clipping."""

    loss: jax.Array
    grad_norm: jax.Array


def initial_state(params: Params, optimizer: optax.GradientTransformation) -> State:
    """The state before the first step."""
    return State(params, optimizer.init(params), jnp.int32(0))


def train_step(
    model: Transformer, optimizer: optax.GradientTransformation, seed: int
) -> Callable[[State, jax.Array], tuple[State, Metrics]]:
    """One update as a pure function of the state and the step's tokens.

    Args:
        model: the transformer, with its remat.
        optimizer: what turns gradients into updates.
        seed: of the dropout; the masks are a function of the seed, the step and the micro-batch alone.

    Returns:
        ``step(state, tokens) -> (state, metrics)`` with tokens int32 [accumulate, micro_batch, seq + 1].
    """

    sharding = model.sharding
    laid_out: Callable[[Any, str], Any] = (lambda tree, role: tree) if sharding is None else sharding.constrain_tree

    def step(state: State, tokens: jax.Array) -> tuple[State, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step) if model.config.dropout else None
        loss = lambda params, micro, i: _loss(model, params, micro, key, i)
        value, grads = accumulated(loss, state.params, tokens, lambda grads: laid_out(grads, "gradients"))
        updates, inner = optimizer.update(grads, state.optimizer, state.params)
        params = laid_out(optax.apply_updates(state.params, updates), "weights")
        new = State(params, laid_out(inner, "optimizer state"), state.step + 1)
        return new, Metrics(value, optax.tree.norm(grads))

    return step


def placed(state: State, sharding: Sharding, mesh: Mesh) -> State:
    """The shapes of a state as ``sharding`` lays it out on a mesh with devices."""
    layouts: Any = State(
        sharding.tree(state.params, "weights", mesh),
        sharding.tree(state.optimizer, "optimizer state", mesh),
        NamedSharding(mesh, P()),  # type: ignore[arg-type]
    )
    laid = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.tree.map(laid, state, layouts)


def accumulated(
    loss: Callable[..., jax.Array],
    params: Params,
    batches: jax.Array,
    laid_out: Callable[[Params], Params] = lambda gradient: gradient,
) -> tuple[jax.Array, Params]:
    """Mean loss and mean gradient over micro-batches, one after the other, summed in float32.

    As each loss is a mean over equally many tokens, the mean of the means is the large batch's.

    Args:
        loss: ``loss(params, batch, index) -> scalar``.
        params: a tree of arrays.
        batches: [accumulate, ...]; one alone runs without a loop and without a second gradient buffer.
        laid_out: lays a gradient out on a mesh.
    """

    def gradient(batch: jax.Array, index: jax.Array | int) -> tuple[jax.Array, Params]:
        value, grads = jax.value_and_grad(loss)(params, batch, index)
        return value, laid_out(grads)

    count = batches.shape[0]
    if count == 1:
        return gradient(batches[0], 0)

    def one(total: tuple[jax.Array, Params], item: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        index, batch = item
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, gradient(batch, index)), None

    zeros = jnp.float32(0), laid_out(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))
    (value, grads), _ = lax.scan(one, zeros, (jnp.arange(count), batches))
    return value / count, jax.tree.map(lambda g, p: (g / count).astype(p.dtype), grads, params)


def eval_loss(config: TransformerConfig, sharding: Sharding | None = None) -> Callable[[Params, jax.Array], jax.Array]:
    """Mean loss without dropout over tokens int32 [batches, micro_batch, seq + 1], one micro-batch at a time.

    The model is the plain one: no gradient is taken, so there is nothing to keep, and a plan that was made for a step
    with dropout holds for no other.
    """
    model = Transformer(config, sharding=sharding)

    def evaluate(params: Params, tokens: jax.Array) -> jax.Array:
        return lax.map(lambda batch: _loss(model, params, batch), tokens).mean()

    return evaluate


def _loss(
    model: Transformer, params: Params, tokens: jax.Array, key: jax.Array | None = None, index: jax.Array | int = 0
) -> jax.Array:
    """Of one micro-batch; ``key`` is the step's dropout key, or None."""
    own = None if key is None else jax.random.fold_in(key, index)
    return mean_loss(model, params, tokens[:, :-1], tokens[:, 1:], own)
