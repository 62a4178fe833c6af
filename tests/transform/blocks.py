"""Small blocks of our own models, as functions, for tests of what a policy does to them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jremat.estimator.config import TransformerConfig
from models import config as sizes
from models.transformer import Block


@dataclass(frozen=True)
class Case:
    """A block at a small shape.

    Args:
        config: of the model.
        batch, seq: b and s.
    """

    config: TransformerConfig
    batch: int = 2
    seq: int = 32

    @property
    def unit_bytes(self) -> int:
        """s·b·h values, in bytes."""
        return self.batch * self.seq * self.config.hidden * jnp.dtype(self.config.compute_dtype).itemsize

    def function(self) -> Callable[..., Any]:
        """The block as a function of its parameters and its input; dropout on, where the config has any."""
        return _function(self)

    def args(self) -> tuple[Any, jax.Array]:
        """Parameters and input, as arrays."""
        return _args(self)


@functools.cache
def _function(case: Case) -> Callable[..., Any]:
    block, key = Block(case.config), jax.random.key(1) if case.config.dropout else None
    return lambda params, x: block.apply({"params": params}, x, key)


@functools.cache
def _args(case: Case) -> tuple[Any, jax.Array]:
    x = jax.random.normal(jax.random.key(2), (case.batch, case.seq, case.config.hidden), jnp.float32)
    x = x.astype(case.config.compute_dtype)
    return jax.jit(Block(case.config).init)(jax.random.key(0), x)["params"], x


def case(family: str, attention: str) -> Case:
    """GPT: h=64, 4 heads, f=4h, dropout 0.1 (materialised attention; blockwise has none). Llama: 2 kv heads, f=3h."""
    gpt = family == "gpt"
    config = replace(
        sizes.get("tiny" if gpt else "tiny-llama"),
        hidden=64,
        heads=4,
        kv_heads=4 if gpt else 2,
        head_dim=16,
        mlp_hidden=256 if gpt else 192,
        attention=attention,
        attention_block=16,
        dropout=0.1 if gpt else 0.0,
    )
    return Case(config)
