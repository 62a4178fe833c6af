"""Sizes of published models, and two that train on a laptop."""

from collections.abc import Mapping
from types import MappingProxyType

from jremat.estimator.config import TransformerConfig
from jremat.policy.messages import near


def _gpt(
    num_layers: int, hidden: int, heads: int, *, vocab_size: int = 50257, max_seq: int = 1024
) -> TransformerConfig:
    """GPT-2's shape: heads that split the width, an MLP of four widths, dropout 0.1 (its config.json, ``*_pdrop``)."""
    return TransformerConfig(
        vocab_size=vocab_size,
        num_layers=num_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        mlp_hidden=4 * hidden,
        max_seq=max_seq,
        dropout=0.1,
    )


def _llama(
    num_layers: int,
    hidden: int,
    heads: int,
    mlp_hidden: int,
    max_seq: int,
    *,
    kv_heads: int = 8,
    vocab_size: int = 128256,
    tied_embeddings: bool = False,
) -> TransformerConfig:
    """Llama 3's shape: grouped queries, RoPE of base 500000 (without 3.2's rescaling of long waves), no biases."""
    return TransformerConfig(
        vocab_size=vocab_size,
        num_layers=num_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        mlp_hidden=mlp_hidden,
        max_seq=max_seq,
        norm="rmsnorm",
        mlp="swiglu",
        positions="rope",
        rope_theta=500_000.0,
        bias=False,
        tied_embeddings=tied_embeddings,
    )


sizes: Mapping[str, TransformerConfig] = MappingProxyType(
    {
        # Ours: bytes as tokens, so that any text trains without a tokenizer; 1.3 and 1.1 M parameters.
        "tiny": _gpt(6, 128, 4, vocab_size=256, max_seq=256),
        "tiny-llama": _llama(6, 128, 4, 352, 256, kv_heads=2, vocab_size=256, tied_embeddings=True),
        # Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2; heads from the released
        # hparams.json of each (github.com/openai/gpt-2).
        "gpt2": _gpt(12, 768, 12),
        "gpt2-medium": _gpt(24, 1024, 16),
        "gpt2-large": _gpt(36, 1280, 20),
        "gpt2-xl": _gpt(48, 1600, 25),
        # Llama 3.2 1B, its config.json (huggingface.co/meta-llama/Llama-3.2-1B).
        "llama-1b": _llama(16, 2048, 32, 8192, 131072, tied_embeddings=True),
        # Dubey et al. 2024, "The Llama 3 Herd of Models", arXiv 2407.21783, table 3; context of the first release.
        "llama3-8b": _llama(32, 4096, 32, 14336, 8192),
        "llama3-70b": _llama(80, 8192, 64, 28672, 8192),
    }
)
"""Every size by name; ``dataclasses.replace`` changes one."""


def get(name: str) -> TransformerConfig:
    """The config of a named size.

    Raises:
        ValueError: there is no such size; near names are listed.

    >>> get("gpt2").num_params()
    124439808
    >>> get("gpt2-medum")
    Traceback (most recent call last):
    ...
    ValueError: model: no size 'gpt2-medum'; did you mean 'gpt2-medium' or 'gpt2-large'?
    """
    if name not in sizes:
        hint = near(name, sizes) or f"; there are {', '.join(sizes)}"
        raise ValueError(f"model: no size {name!r}{hint}")
    return sizes[name]
