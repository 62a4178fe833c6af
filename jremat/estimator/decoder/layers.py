"""Layers that own what they keep for the backward pass.

JAX's derivative rules keep what each primitive happens to need: about twice PyTorch's bytes for a transformer block,
and a different number in each release. Each function here says what it keeps instead, through ``jax.custom_vjp``, so
that a block without remat keeps the same few arrays on every version. Statistics and exponentials are float32 whatever
the dtype of the input, which the output shares. Parameters (scales, biases) may be float32 beside bfloat16 activations.

The primal function is always ``forward(...)[0]``: the same code, so the same tags, with and without differentiation.
Being custom_vjp functions they have no forward mode.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jremat.policy.names import tag


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    """``(x - mean) / sqrt(variance + eps) * scale + bias`` over the last axis.

    Keeps x, and the mean and reciprocal deviation of each row in float32 (tagged ``norm_stats``).

    Args:
        x: [..., h].
        scale, bias: [h]; ``bias`` may be None.
        eps: added to the variance.

    Returns:
        [..., h], dtype of ``x``.

    Source: Ba et al. 2016, arXiv 1607.06450, equation 4.

    >>> layer_norm(jnp.array([[1.0, 3.0]]), jnp.ones(2), None, 0.0).tolist()
    [[-1.0, 1.0]]
    """
    return _layer_norm_forward(x, scale, bias, eps)[0]


def _layer_norm_forward(x, scale, bias, eps):
    x32 = _f32(x)
    mean = tag(x32.mean(-1, keepdims=True), "norm_stats")  # [..., 1]
    centred = x32 - mean
    rstd = tag(lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps), "norm_stats")  # [..., 1]
    y = centred * rstd * _f32(scale)
    y = y if bias is None else y + _f32(bias)
    return y.astype(x.dtype), (x, scale, bias, mean, rstd)


def _layer_norm_backward(eps, kept, g):
    x, scale, bias, mean, rstd = kept
    g32, unit = _f32(g), (_f32(x) - mean) * rstd
    dunit = g32 * _f32(scale)
    dx = rstd * (dunit - dunit.mean(-1, keepdims=True) - unit * (dunit * unit).mean(-1, keepdims=True))
    dbias = None if bias is None else _rows_sum(g32).astype(bias.dtype)
    return dx.astype(x.dtype), _rows_sum(g32 * unit).astype(scale.dtype), dbias


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """``x / sqrt(mean(x²) + eps) * scale`` over the last axis.

    Keeps x, and the reciprocal root of each row in float32 (tagged ``norm_stats``).

    Args:
        x: [..., h].
        scale: [h].
        eps: added to the mean square.

    Returns:
        [..., h], dtype of ``x``.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467, equation 4.

    >>> rms_norm(jnp.array([[3.0, -3.0]]), jnp.ones(2), 0.0).round(6).tolist()
    [[1.0, -1.0]]
    """
    return _rms_norm_forward(x, scale, eps)[0]


def _rms_norm_forward(x, scale, eps):
    x32 = _f32(x)
    rstd = tag(lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + eps), "norm_stats")  # [..., 1]
    return (x32 * rstd * _f32(scale)).astype(x.dtype), (x, scale, rstd)


def _rms_norm_backward(eps, kept, g):
    x, scale, rstd = kept
    g32, unit = _f32(g), _f32(x) * rstd
    dunit = g32 * _f32(scale)
    dx = rstd * (dunit - unit * (dunit * unit).mean(-1, keepdims=True))
    return dx.astype(x.dtype), _rows_sum(g32 * unit).astype(scale.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """GELU in its tanh form, as GPT-2's; keeps x.

    Args:
        x: any shape.

    Returns:
        Shape and dtype of ``x``.

    Source: Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2.

    >>> bool(jnp.allclose(gelu(jnp.array([0.0, 1.0])), jnp.array([0.0, 0.841192])))
    True
    """
    return _gelu_forward(x)[0]


# sqrt(2/π) and the cubic's coefficient, arXiv 1606.08415, section 2
_ROOT, _CUBE = 0.7978845608028654, 0.044715


def _gelu_forward(x):
    x32 = _f32(x)
    return (0.5 * x32 * (1 + jnp.tanh(_ROOT * (x32 + _CUBE * x32**3)))).astype(x.dtype), x


def _gelu_backward(x, g):
    x32 = _f32(x)
    t = jnp.tanh(_ROOT * (x32 + _CUBE * x32**3))
    slope = 0.5 * (1 + t) + 0.5 * x32 * (1 - t * t) * _ROOT * (1 + 3 * _CUBE * x32 * x32)
    return ((_f32(g) * slope).astype(x.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)


@jax.custom_vjp
def silu(x: jax.Array) -> jax.Array:
    """``x * sigmoid(x)``; keeps x.

    Args:
        x: any shape.

    Returns:
        Shape and dtype of ``x``.

    Source: Elfwing et al. 2017, arXiv 1702.03118, equation 7.

    >>> bool(jnp.allclose(silu(jnp.array([0.0, 1.0])), jnp.array([0.0, 0.731059])))
    True
    """
    return _silu_forward(x)[0]


def _silu_forward(x):
    x32 = _f32(x)
    return (x32 * jax.nn.sigmoid(x32)).astype(x.dtype), x


def _silu_backward(x, g):
    return ((_f32(g) * _silu_slope(_f32(x))).astype(x.dtype),)


def _silu_slope(x32):
    sigmoid = jax.nn.sigmoid(x32)
    return sigmoid * (1 + x32 * (1 - sigmoid))


silu.defvjp(_silu_forward, _silu_backward)


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """``silu(gate) * up``; keeps gate and up, the SiLU is recomputed.

    Args:
        gate, up: one shape.

    Returns:
        That shape, dtype of ``up``.

    Source: Shazeer 2020, arXiv 2002.05202, equation 5.

    >>> bool(jnp.allclose(swiglu(jnp.array([1.0]), jnp.array([2.0])), 1.462117))
    True
    """
    return _swiglu_forward(gate, up)[0]


def _swiglu_forward(gate, up):
    gate32 = _f32(gate)
    return (gate32 * jax.nn.sigmoid(gate32) * _f32(up)).astype(up.dtype), (gate, up)


def _swiglu_backward(kept, g):
    gate, up = kept
    g32, gate32 = _f32(g), _f32(gate)
    dgate = g32 * _f32(up) * _silu_slope(gate32)
    return dgate.astype(gate.dtype), (g32 * gate32 * jax.nn.sigmoid(gate32)).astype(up.dtype)


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def causal_softmax(scores: jax.Array, scale: float) -> jax.Array:
    """``softmax(scale * scores)`` over the keys that are no later than the query.

    Keeps its output only (tagged ``attn_probs``): masked probabilities are zero, so the backward needs no mask.

    Args:
        scores: [..., queries, keys], as many keys as queries.
        scale: the scores' factor, 1 / sqrt(head_dim) in attention.

    Returns:
        [..., queries, keys], dtype of ``scores``; rows sum to 1.

    >>> causal_softmax(jnp.zeros((2, 2)), 1.0).tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    return _causal_softmax_forward(scores, scale)[0]


def _causal_softmax_forward(scores, scale):
    queries, keys = (lax.broadcasted_iota(jnp.int32, scores.shape[-2:], axis) for axis in (0, 1))
    masked = jnp.where(keys <= queries, _f32(scores) * scale, -jnp.inf)
    weights = jnp.exp(masked - masked.max(-1, keepdims=True))
    probs = tag((weights / weights.sum(-1, keepdims=True)).astype(scores.dtype), "attn_probs")
    return probs, probs


def _causal_softmax_backward(scale, probs, g):
    p32, g32 = _f32(probs), _f32(g)
    dscores = p32 * (g32 - (g32 * p32).sum(-1, keepdims=True)) * scale
    return (dscores.astype(probs.dtype),)


causal_softmax.defvjp(_causal_softmax_forward, _causal_softmax_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dropout(x: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    """Zeroes each value with probability ``rate`` and divides the others by ``1 - rate``.

    Keeps its key only: the backward pass draws the same mask from it, under any remat.

    Args:
        x: any shape.
        key: a JAX random key; one key, one mask.
        rate: in [0, 1).

    Returns:
        Shape and dtype of ``x``.

    Source: Srivastava et al. 2014, JMLR 15, section 4, with the factor moved to training time.

    >>> sorted(set(dropout(jnp.ones(1000), jax.random.key(0), 0.5).tolist()))
    [0.0, 2.0]
    """
    return _dropout_forward(x, key, rate)[0]


def _dropout_forward(x, key, rate):
    return _mask(x, key, rate), key


def _dropout_backward(rate, key, g):
    return _mask(g, key, rate), None


def _mask(x, key, rate):
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


dropout.defvjp(_dropout_forward, _dropout_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Turns pair i of each head by the angle ``position * theta ** (-2i / d)``.

    Keeps the positions only: the backward turns back by the same angles. A pair is (i, i + d/2), as in Hugging Face's
    Llama, not (2i, 2i + 1), as in Meta's; the two differ by a permutation of the projection's columns.

    Args:
        x: [..., s, heads, d], d even.
        positions: int [s], or [..., s].
        theta: base of the wavelengths.

    Returns:
        Shape and dtype of ``x``.

    Source: Su et al. 2021, arXiv 2104.09864, equation 34.

    >>> rope(jnp.array([[[1.0, 0.0]]]), jnp.array([0]), 10_000.0).tolist()
    [[[1.0, 0.0]]]
    """
    return _rope_forward(x, positions, theta)[0]


def _rope_forward(x, positions, theta):
    return _turn(x, positions, theta, 1.0), positions


def _rope_backward(theta, positions, g):
    return _turn(g, positions, theta, -1.0), None


def _turn(x, positions, theta, sign):
    half = x.shape[-1] // 2
    waves = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)  # [d/2]
    angles = _f32(positions)[..., None, None] * waves  # [..., s, 1, d/2]
    cos, sin = jnp.cos(angles), sign * jnp.sin(angles)
    first, second = _f32(x[..., :half]), _f32(x[..., half:])
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


rope.defvjp(_rope_forward, _rope_backward)


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _rows_sum(x: jax.Array) -> jax.Array:
    """Sum over every axis but the last: a row parameter's gradient."""
    return x.sum(tuple(range(x.ndim - 1)))
