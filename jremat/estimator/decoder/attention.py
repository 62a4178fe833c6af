"""Causal attention, three ways: scores materialised, block by block in plain JAX, and cuDNN's fused kernel.

Shapes: b batch, s sequence, n query heads, m key and value heads, g = n / m query heads to each, d head width.
Query head i reads key and value head i // g, as in Llama. Scores are scaled by 1 / sqrt(d).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jremat.estimator.decoder.layers import causal_softmax, dropout
from jremat.estimator.decoder.loop import counted
from jremat.policy.names import RERUN_SCOPE, tag

Constrain = Callable[[jax.Array, tuple[str, ...]], jax.Array]
"""Lays an array out on a mesh by its logical axes."""


def unconstrained(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """x, wherever it is."""
    return x


def dot(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dropout_key: jax.Array | None,
    rate: float,
    constrain: Constrain = unconstrained,
) -> jax.Array:
    """Attention that materialises its scores.

    Keeps query, key, value, the probabilities and, with dropout, the dropped probabilities. Tags what it reads, and
    ``attn_scores``, ``attn_probs``, ``attn_dropped`` ([b, m, g, s, s]) and ``attn_out``.

    Args:
        query: [b, s, n, d].
        key, value: [b, s, m, d], m a divisor of n.
        dropout_key: a JAX random key, or None for no dropout.
        rate: dropout rate of the probabilities, in [0, 1).
        constrain: lays an array out on a mesh by its logical axes.

    Returns:
        [b, s, n, d], dtype of ``query``.

    Source: Vaswani et al. 2017, arXiv 1706.03762, equation 1; grouped as in Ainslie et al. 2023, arXiv 2305.13245.

    >>> x = jnp.ones((1, 3, 4, 8))
    >>> dot(x, x[:, :, :2], x[:, :, :2], None, 0.0).shape
    (1, 3, 4, 8)
    """
    q, k, v = _tagged(_grouped(query, key), key, value)
    scores = constrain(jnp.einsum("bsmgd,btmd->bmgst", q, k), ("batch", "kv_heads", "group", "length", "key_length"))
    scores = tag(scores, "attn_scores")
    probs = causal_softmax(scores, 1 / _root(query.shape[-1]))  # [b, m, g, s, s]
    if dropout_key is not None and rate > 0:
        probs = tag(dropout(probs, dropout_key, rate), "attn_dropped")
    out = jnp.einsum("bmgst,btmd->bsmgd", probs, v)
    return tag(out.reshape(query.shape), "attn_out")


def block_size(seq: int, block: int) -> int:
    """Keys that ``blockwise`` reads at a time: ``block``, or half the sequence if that is less.

    Half, so that no array is s × s even where the sequence is shorter than a block. The sequence is padded up to whole
    blocks.

    >>> block_size(1024, 128), block_size(100, 128), block_size(1, 128)
    (128, 50, 1)
    """
    return min(block, -(-seq // 2)) if isinstance(seq, int) else block


def blockwise(
    query: jax.Array, key: jax.Array, value: jax.Array, block: int, constrain: Constrain = unconstrained
) -> jax.Array:
    """Attention by an online softmax over blocks of keys, in plain JAX, so on every backend: never an s × s array.

    Keeps query, key, value (tagged), the output (tagged ``attn_out``, then ``attn_fused``) and the log-sum-exp
    (``attn_lse``, float32 [b, n, s]); the backward makes each block's scores again. A policy that keeps ``attn_fused``
    and ``attn_lse`` reruns no forward matmul of it, and no policy can keep what is inside. Alive at a time: a few
    float32 arrays of [b, n, s, block]. Masked blocks are computed too, so its FLOPs are those of ``dot``. No dropout.

    Args:
        query: [b, s, n, d].
        key, value: [b, s, m, d], m a divisor of n.
        block: keys at a time (see ``block_size``); it need not divide s.
        constrain: lays an array out on a mesh by its logical axes; keys and values are whole where they are read.

    Returns:
        [b, s, n, d], dtype of ``query``.

    Source: Dao et al. 2022, arXiv 2205.14135, algorithms 1 and 4; Rabe and Staats 2021, arXiv 2112.05682.

    >>> x = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
    >>> bool(jnp.allclose(blockwise(x, x, x, 2), dot(x, x, x, None, 0.0), atol=1e-6))
    True
    """
    return _blockwise(*_tagged(query, key, value), block, constrain)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _blockwise(query, key, value, block, constrain):
    return _blockwise_forward(query, key, value, block, constrain)[0]


def _blockwise_forward(query, key, value, block, constrain):
    size = block_size(query.shape[1], block)
    whole = lambda x: _padded(constrain(x, _WHOLE), size)
    q, keys, values = _grouped(query, key), whole(key), whole(value)
    b, s, m, g, d = q.shape

    def one(i, carry):
        total, top, weight = carry  # [b, m, g, s, d], [b, m, g, s], [b, m, g, s]
        scores = _scores(q, _block(keys, i, size), i * size)  # [b, m, g, s, size]
        new_top = jnp.maximum(top, scores.max(-1))  # finite from block 0 on, since every query sees key 0
        shrink = jnp.exp(top - new_top)
        p = jnp.exp(scores - new_top[..., None])
        found = jnp.einsum("bmgst,btmd->bmgsd", p.astype(value.dtype), _block(values, i, size), **_F32)
        return total * shrink[..., None] + found, new_top, weight * shrink + p.sum(-1)

    empty = jnp.zeros((b, m, g, s), jnp.float32)
    start = jnp.zeros((b, m, g, s, d), jnp.float32), jnp.full_like(empty, -jnp.inf), empty
    total, top, weight = counted(keys.shape[1] // size, one, start)
    out = jnp.moveaxis(total / weight[..., None], 3, 1).reshape(query.shape).astype(query.dtype)
    # attn_fused outside attn_out: whichever of the two a policy keeps, one copy of the value is kept
    out = tag(tag(out, "attn_out"), "attn_fused")
    lse = tag((top + jnp.log(weight)).reshape(b, m * g, s), "attn_lse")
    return out, (query, key, value, out, lse)


def _blockwise_backward(block, constrain, kept, dout):
    query, key, value, out, lse = kept
    size = block_size(query.shape[1], block)
    whole = lambda x: _padded(constrain(x, _WHOLE), size)
    q, do, keys, values = _grouped(query, key), _grouped(dout, key), whole(key), whole(value)
    b, s, m, g, d = q.shape
    lse = lse.reshape(b, m, g, s, 1)
    # the softmax's row sum of p·dp is that of out·dout: Dao et al. 2022, section 3.1 and appendix B.2
    delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)  # [b, s, n]
    delta = jnp.moveaxis(delta.reshape(b, s, m, g), 1, 3)[..., None]  # [b, m, g, s, 1]

    def one(i, carry):
        dq, dkeys, dvalues = carry
        k, v = _block(keys, i, size), _block(values, i, size)  # [b, size, m, d]
        with jax.named_scope(RERUN_SCOPE):
            scores = _scores(q, k, i * size)
        p = jnp.exp(scores - lse)  # [b, m, g, s, size]
        dp = jnp.einsum("bsmgd,btmd->bmgst", do, v, **_F32)
        dscores = (p * (dp - delta) / _root(d)).astype(query.dtype)
        dv = jnp.einsum("bmgst,bsmgd->btmd", p.astype(dout.dtype), do, **_F32)
        dk = jnp.einsum("bmgst,bsmgd->btmd", dscores, q, **_F32)
        dq += jnp.einsum("bmgst,btmd->bsmgd", dscores, k, **_F32)
        put = partial(lax.dynamic_update_slice_in_dim, start_index=i * size, axis=1)
        return dq, put(dkeys, dk.astype(key.dtype)), put(dvalues, dv.astype(value.dtype))

    start = jnp.zeros(q.shape, jnp.float32), jnp.zeros_like(keys), jnp.zeros_like(values)
    dq, dkeys, dvalues = counted(keys.shape[1] // size, one, start)
    return dq.reshape(query.shape).astype(query.dtype), dkeys[:, :s], dvalues[:, :s]


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def cudnn(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """cuDNN's fused attention, on NVIDIA GPUs (or compiled for one).

    Keeps what ``blockwise`` keeps, under the same tags, so a policy that keeps ``attn_fused`` and ``attn_lse`` runs the
    forward kernel once; so does one that keeps the primitive ``dot_product_attention_fwd_wrapper``. No dropout.

    Args:
        query: bfloat16 or float16 [b, s, n, d].
        key, value: [b, s, m, d], m a divisor of n.

    Returns:
        [b, s, n, d], dtype of ``query``.

    Raises:
        NotImplementedError: from JAX, for a dtype or a head width that cuDNN's kernel doesn't take.
    """
    return _cudnn(*_tagged(query, key, value))


@jax.custom_vjp
def _cudnn(query, key, value):
    return _cudnn_forward(query, key, value)[0]


def _cudnn_forward(query, key, value):
    kernel = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    out, backward = jax.vjp(kernel, query, key, value)
    tagged = tag(tag(out, "attn_out"), "attn_fused")
    kept, tree = jax.tree.flatten(backward)  # the kernel's own residuals, of which the log-sum-exp alone is float32
    named = [tagged if x is out else tag(x, "attn_lse") if x.dtype == jnp.float32 else x for x in kept]
    return tagged, jax.tree.unflatten(tree, named)


def _cudnn_backward(backward, dout):
    return backward(dout)


_cudnn.defvjp(_cudnn_forward, _cudnn_backward)


_WHOLE = ("batch", "key_length", "kv_heads", "head_dim")


def _root(width):
    """The square root of a head's width; 1 for a letter, which has no value: no array's size depends on it."""
    return math.sqrt(width) if isinstance(width, int) else 1.0


def _tagged(query, key, value):
    """Tagged in the shape in which they are read, so that the value kept is the value named."""
    return tag(query, "query"), tag(key, "key"), tag(value, "value")


_F32: dict[str, Any] = {"preferred_element_type": jnp.float32}


def _scores(q, k, first_key):
    """Scaled, masked scores of every query with one block of keys, float32 [b, m, g, s, block]."""
    scores = jnp.einsum("bsmgd,btmd->bmgst", q, k, **_F32) / _root(q.shape[-1])
    queries, keys = (lax.broadcasted_iota(jnp.int32, scores.shape[-2:], axis) for axis in (0, 1))
    return jnp.where(first_key + keys <= queries, scores, -jnp.inf)


def _grouped(x, key):
    """[b, s, n, d] as [b, s, m, g, d], for ``key`` [b, s, m, d]."""
    b, s, _, d = x.shape
    return x.reshape(b, s, key.shape[2], -1, d)


def _padded(x, size):
    return jnp.pad(x, ((0, 0), (0, -(x.shape[1] % size) % size), (0, 0), (0, 0)))  # 0 for letters that divide, too


def _block(x, i, size):
    return lax.dynamic_slice_in_dim(x, i * size, size, axis=1)
