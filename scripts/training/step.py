"""The train step: loss, gradient over micro-batches, update; and the evaluation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jremat.estimator.config import TransformerConfig
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

    def step(state: State, tokens: jax.Array) -> tuple[State, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step) if model.config.dropout else None
        loss, grads = accumulated(lambda params, micro, i: _loss(model, params, micro, key, i), state.params, tokens)
        updates, inner = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, inner, state.step + 1), Metrics(loss, optax.tree.norm(grads))

    return step


def accumulated(loss: Callable[..., jax.Array], params: Params, batches: jax.Array) -> tuple[jax.Array, Params]:
    """Mean loss and mean gradient over micro-batches, one after the other, summed in float32.

    As each loss is a mean over equally many tokens, the mean of the means is the large batch's.

    Args:
        loss: ``loss(params, batch, index) -> scalar``.
        params: a tree of arrays.
        batches: [accumulate, ...]; one alone runs without a loop and without a second gradient buffer.
    """
    count = batches.shape[0]
    if count == 1:
        return jax.value_and_grad(loss)(params, batches[0], 0)

    def one(total: tuple[jax.Array, Params], item: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        index, batch = item
        value, grads = jax.value_and_grad(loss)(params, batch, index)
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, (value, grads)), None

    zeros = jnp.float32(0), jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    (value, grads), _ = lax.scan(one, zeros, (jnp.arange(count), batches))
    return value / count, jax.tree.map(lambda g, p: (g / count).astype(p.dtype), grads, params)


def eval_loss(config: TransformerConfig) -> Callable[[Params, jax.Array], jax.Array]:
    """Mean loss without dropout over tokens int32 [batches, micro_batch, seq + 1], one micro-batch at a time.

    The model is the plain one: no gradient is taken, so there is nothing to keep, and a plan that was made for a step
    with dropout holds for no other.
    """
    model = Transformer(config)

    def evaluate(params: Params, tokens: jax.Array) -> jax.Array:
        return lax.map(lambda batch: _loss(model, params, batch), tokens).mean()

    return evaluate


def _loss(
    model: Transformer, params: Params, tokens: jax.Array, key: jax.Array | None = None, index: jax.Array | int = 0
) -> jax.Array:
    """Of one micro-batch; ``key`` is the step's dropout key, or None."""
    own = None if key is None else jax.random.fold_in(key, index)
    return mean_loss(model, params, tokens[:, :-1], tokens[:, 1:], own)
