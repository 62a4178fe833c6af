"""Names of the tensors that a policy may speak of.

A name is put on a value by ``tag`` where the value is made. JAX sees the tag as its own ``checkpoint_name``, so every
policy by name works on a tagged model, ours or not.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax  # its import takes a second, which those who only read policies shouldn't wait for

VOCABULARY: Mapping[str, str] = MappingProxyType(
    {
        "block_in": "a block's input, the residual stream [b, s, h]",
        "attn_norm": "the norm before attention [b, s, h]",
        "query": "query projection as attention reads it, with bias and RoPE [b, s, heads, d], or heads by groups",
        "key": "key projection [b, s, kv_heads, d]",
        "value": "value projection [b, s, kv_heads, d]",
        "attn_scores": "scores before softmax, materialised attention only [b, kv_heads, group, s, s]",
        "attn_probs": "softmax of the scores, materialised attention only [b, kv_heads, group, s, s]",
        "attn_dropped": "the probabilities after dropout, materialised attention only [b, kv_heads, group, s, s]",
        "attn_out": "the attention's output before its projection, the context [b, s, heads, d]",
        "attn_fused": "the same value where a fused kernel made it; its backward reads it too",
        "attn_lse": "log-sum-exp of a fused attention's scores, f32 [b, heads, s]",
        "attn_proj": "output projection of attention [b, s, h]",
        "mlp_norm": "the norm before the MLP [b, s, h]",
        "mlp_gate": "gate projection of a gated MLP (w1) [b, s, f]",
        "mlp_up": "up projection of the MLP (w3 of a gated one, the first of a plain one) [b, s, f]",
        "mlp_act": "what the MLP's last matmul reads: the activation, times up where gated [b, s, f]",
        "mlp_out": "down projection of the MLP (w2) [b, s, h]",
        "norm_stats": "a norm's f32 row statistics: mean and reciprocal deviation [b, s, 1]",
        "router": "logits of a mixture's router [b, s, experts]",
        "moe_act": "an expert's activation",
    }
)
"""Every name that our models use, with its meaning; a user's own names may be any identifier."""

RERUN_SCOPE = "kernel_rerun"
"""The ``jax.named_scope`` under which a fused kernel's backward does part of its forward again (flash attention)."""


def tag(x: "jax.Array", name: str) -> "jax.Array":
    """Name a value, so that a policy can keep, offload or recompute it by that name.

    Nothing is kept by a tag alone; without a policy that speaks of ``name`` it is the identity.

    Args:
        x: an array of any shape and dtype. The *result* must be used in its place: a tag whose result is dropped
            does nothing.
        name: an identifier; ``VOCABULARY`` lists the ones that our models use.

    Returns:
        ``x``, named.

    Raises:
        ValueError: ``name`` is not an identifier, so no policy spec could spell it.

    >>> import jax.numpy as jnp
    >>> tag(jnp.ones(2), "mlp_up").shape
    (2,)
    """
    from jax.ad_checkpoint import checkpoint_name

    return checkpoint_name(x, identifier(name))


def identifier(name: str) -> str:
    """``name`` itself, if a policy spec can spell it.

    >>> identifier("attn_out")
    'attn_out'
    >>> identifier("two words")
    Traceback (most recent call last):
    ...
    ValueError: name: expected an identifier (letters, digits, _ . /), got 'two words'
    """
    if not isinstance(name, str) or not name or not set(name) <= _SPELLABLE:
        raise ValueError(f"name: expected an identifier (letters, digits, _ . /), got {name!r}")
    if name.startswith("jremat."):
        raise ValueError(f"name: 'jremat.' is the head of jremat's own marks, got {name!r}")
    return name


_SPELLABLE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./")
