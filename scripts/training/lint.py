"""What the lint says of a run's loss, before it starts."""

import jax
import jax.numpy as jnp

import jremat
from models.transformer import Transformer, mean_loss
from scripts.training.step import Params


def findings(model: Transformer, params: Params, micro_batch: int, seq: int, seed: int) -> list[str]:
    """A line for each mistake in how the model is rematted; nothing is run.

    Args:
        model: the transformer, with its remat.
        params: its parameters' shapes.
        micro_batch, seq: shapes of what goes through it at a time.
        seed: of the dropout.
    """

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        key = jax.random.key(seed) if model.config.dropout else None
        return mean_loss(model, params, tokens[:, :-1], tokens[:, 1:], key)

    found = jremat.lint(loss, params, jax.ShapeDtypeStruct((micro_batch, seq + 1), jnp.int32))
    return [str(finding) for finding in found]
