"""Cross-entropy that keeps no float32 copy of the logits, and one that keeps no logits at all."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jremat.estimator.decoder.loop import counted


@jax.custom_vjp
def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """``logsumexp(logits) - logits[label]`` of each row, in float32.

    Keeps the logits in their own dtype and the log-sum-exp of each row; the softmax is recomputed.

    Args:
        logits: [..., v].
        labels: int [...], in [0, v); one out of range gives NaN.

    Returns:
        float32 [...], in nats.

    >>> bool(jnp.allclose(cross_entropy(jnp.zeros((1, 4)), jnp.array([2])), jnp.log(4.0)))
    True
    """
    return _cross_entropy_forward(logits, labels)[0]


def _cross_entropy_forward(logits, labels):
    lse = _logsumexp(logits)
    return lse - _picked(logits, labels), (logits, labels, lse)


def _cross_entropy_backward(kept, g):
    logits, labels, lse = kept
    return _dlogits(logits, labels, lse, g).astype(logits.dtype), None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def linear_cross_entropy(x: jax.Array, head: jax.Array, labels: jax.Array, chunk: int) -> jax.Array:
    """``cross_entropy(x @ head.T, labels)`` a chunk of positions at a time: no array is [b, s, v].

    Keeps x, the head and the log-sum-exp; the backward makes each chunk's logits again, one more head matmul.

    Args:
        x: [b, s, h].
        head: [v, h]; cast to the dtype of ``x`` where it is used, its gradient summed in float32.
        labels: int [b, s], in [0, v); one out of range gives NaN.
        chunk: positions of the sequence at a time, at least 1; it need not divide s.

    Returns:
        float32 [b, s], in nats.

    >>> x, head, labels = jnp.ones((1, 3, 2)), jnp.ones((4, 2)), jnp.array([[0, 1, 2]])
    >>> bool(jnp.allclose(linear_cross_entropy(x, head, labels, 2), jnp.log(4.0)))
    True
    """
    return _linear_forward(x, head, labels, chunk)[0]


def _linear_forward(x, head, labels, chunk):
    xs, ys = _chunks(x, chunk), _chunks(labels, chunk)  # [n, b, chunk, h], [n, b, chunk]
    cast = head.astype(x.dtype)

    def one(i, carry):
        losses, lses = carry
        logits = _logits(xs[i], cast)  # [b, chunk, v]
        lse = _logsumexp(logits)
        return losses.at[i].set(lse - _picked(logits, ys[i])), lses.at[i].set(lse)

    rows = jnp.zeros(ys.shape, jnp.float32)
    losses, lses = counted(xs.shape[0], one, (rows, rows))
    seq = x.shape[1]
    return _whole(losses, seq), (x, head, labels, _whole(lses, seq))


def _linear_backward(chunk, kept, g):
    x, head, labels, lse = kept
    xs, ys, lses, gs = (_chunks(t, chunk) for t in (x, labels, lse, g))  # the padding's g is zero
    cast = head.astype(x.dtype)

    def one(i, carry):
        dxs, dhead = carry
        dlogits = _dlogits(_logits(xs[i], cast), ys[i], lses[i], gs[i]).astype(x.dtype)  # [b, chunk, v]
        dx = jnp.einsum("bcv,vh->bch", dlogits, cast)
        dhead += jnp.einsum("bcv,bch->vh", dlogits, xs[i], preferred_element_type=jnp.float32)
        return dxs.at[i].set(dx), dhead

    dxs, dhead = counted(xs.shape[0], one, (jnp.zeros_like(xs), jnp.zeros(head.shape, jnp.float32)))
    return _whole(dxs, x.shape[1]), dhead.astype(head.dtype), None


linear_cross_entropy.defvjp(_linear_forward, _linear_backward)


def _logits(x, head):
    return lax.dot_general(x, head, (((x.ndim - 1,), (1,)), ((), ())))  # [..., h], [v, h] -> [..., v]


def _logsumexp(logits):
    x = logits.astype(jnp.float32)
    top = x.max(-1, keepdims=True)
    return (top + jnp.log(jnp.exp(x - top).sum(-1, keepdims=True))).squeeze(-1)


def _picked(logits, labels):
    inside = (labels >= 0) & (labels < logits.shape[-1])  # a negative index would count from the end
    picked = jnp.take_along_axis(logits, jnp.where(inside, labels, 0)[..., None], -1).squeeze(-1)
    return jnp.where(inside, picked.astype(jnp.float32), jnp.nan)


def _dlogits(logits, labels, lse, g):
    probs = jnp.exp(logits.astype(jnp.float32) - lse[..., None])
    at_label = lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
    return (probs - at_label) * g[..., None]


def _chunks(x, chunk):
    """[b, s, ...] as [n, b, chunk, ...], the last one padded with zeros."""
    b, s, *rest = x.shape
    n = -(-s // chunk)
    padded = jnp.pad(x, [(0, 0), (0, n * chunk - s), *[(0, 0)] * len(rest)])
    return jnp.moveaxis(padded.reshape(b, n, chunk, *rest), 1, 0)


def _whole(chunks, seq):
    """The inverse of ``_chunks``."""
    n, b, chunk, *rest = chunks.shape
    return jnp.moveaxis(chunks, 0, 1).reshape(b, n * chunk, *rest)[:, :seq]
