"""Small configs of each family, and the batch that the models' tests share."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models
from jremat.estimator.config import TransformerConfig

GPT = TransformerConfig(
    vocab_size=13, num_layers=3, hidden=8, heads=4, kv_heads=4, head_dim=2, mlp_hidden=20, max_seq=9, attention_block=3
)
LLAMA = replace(GPT, kv_heads=2, norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied_embeddings=False)
QWEN = replace(LLAMA, qkv_bias=True, head_dim=6)  # and heads that don't split the width
FAMILIES = {"gpt": GPT, "llama": LLAMA, "qwen": QWEN}
TOKENS = jax.random.randint(jax.random.key(7), (2, 9), 0, 13)
TARGETS = jnp.roll(TOKENS, -1, 1)


def compiled(fn: Callable) -> Callable:
    """Jitted with few of LLVM's passes: these programs run once, so their compilation is what a test waits for."""
    return jax.jit(
        fn, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    )


def value_and_grad(
    config: TransformerConfig, params: Any, key: jax.Array | None = None, **how: Any
) -> tuple[jax.Array, Any]:
    """The mean loss and its gradient on the shared batch; ``how`` is the model's remat or stack."""
    model = models.Transformer(config, **how)
    return compiled(jax.value_and_grad(lambda p: models.mean_loss(model, p, TOKENS, TARGETS, key)))(params)


def assert_same_gradients(got: Any, want: Any) -> None:
    """Each leaf to 1e-5 of its norm, with a floor of 1e-7 of the largest: a key bias without RoPE has noise alone."""
    norms = [np.linalg.norm(w) for w in jax.tree.leaves(want)]
    for g, w, norm in zip(jax.tree.leaves(got), jax.tree.leaves(want), norms, strict=True):
        assert np.linalg.norm(g - w) <= 1e-5 * norm + 1e-7 * max(norms)
