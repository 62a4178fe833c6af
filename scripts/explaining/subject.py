"""A model under a policy, as shapes: its loss, and the training step around it."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

import policies
from jremat.command.output import ExplainedFunction
from jremat.estimator.config import TransformerConfig
from jremat.planner.request import Request
from jremat.policy import Policy
from models.remat import resolved
from models.transformer import init_params, mean_loss
from scripts.explaining.config import Explain
from scripts.flags import MOST_TOKENS
from scripts.training.architecture import architecture
from scripts.training.step import initial_state, train_step


def subject(flags: Explain, spec: str) -> ExplainedFunction:
    """The loss of the model that the flags describe, its layers under ``spec``.

    Raises:
        ValueError: an unknown model or policy, or numbers that don't fit together.
    """
    config = _config(flags)
    seq = flags.seq or min(config.max_seq, MOST_TOKENS)
    if seq > config.max_seq:
        raise ValueError(f"seq: expected at most the model's context, {config.max_seq}, got {seq}")
    if flags.loss_chunk and seq % flags.loss_chunk:
        raise ValueError(f"loss_chunk: expected a divisor of seq={seq}, got {flags.loss_chunk}")
    chosen = resolved(policies.get(spec), config, flags.batch, seq, flags.stack)
    model = chosen.model(config)
    chunk = flags.loss_chunk or None

    def loss(params: Any, tokens: Any, targets: Any, key: Any) -> Any:
        return mean_loss(model, params, tokens, targets, key, chunk)

    tokens = jax.ShapeDtypeStruct((flags.batch, seq), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    adamw = optax.adamw(1e-4)
    state = jax.eval_shape(lambda tree: initial_state(tree, adamw), params)
    batch = jax.ShapeDtypeStruct((1, flags.batch, seq + 1), jnp.int32)
    return ExplainedFunction(
        title=_title(flags.model.model, config, flags.batch, seq),
        forward=loss,
        args=(params, tokens, tokens, key if config.dropout else None),
        kwargs={},
        rules=chosen.policy,
        num_layers=config.num_layers,
        step=train_step(model, adamw, seed=0),
        step_args=(state, batch),
        donated=(0,),
    )


def _config(flags: Explain) -> TransformerConfig:
    """The model's; a saved plan is one for a step without dropout, unless the flags say another."""
    config = architecture(flags.model, None, "")
    planned = any(spec and _planned(spec) for spec in (flags.policy, flags.against))
    return replace(config, dropout=0.0) if planned and flags.model.dropout is None else config


def _planned(spec: str) -> bool:
    policy = policies.get(spec)
    if isinstance(policy, Request):
        return False
    every = [policy] if isinstance(policy, Policy) else [p for s in policy.segments for p in s.pattern]
    return any(p.planned_for for p in every)


def _title(name: str, config: TransformerConfig, batch: int, seq: int) -> str:
    return (
        f"{name}: {config.num_layers} layers, batch {batch}, {seq} tokens, {config.attention} attention, "
        f"{config.compute_dtype}, {f'dropout {config.dropout:g}' if config.dropout else 'no dropout'}"
    )
