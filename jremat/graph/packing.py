"""Values packed into fewer bytes: rounded to 8 or 4 bits with a scale for each block, booleans to bits."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jremat.policy.decision import BITS, E5M2, FP8, INT4, INT8, Decision
from jremat.policy.ops import MATMUL, NORM_STATS

BLOCK = 128
"""Values with one scale, along the last axes: the 1x128 tiles in which DeepSeek-V3 keeps activations (arXiv 2412.19437,
section 3.3). OCP's MX formats (v1.0) have 32, as the shortest block here."""
_SHORTEST_BLOCK = 32
SCALE = jnp.bfloat16
"""Of a scale: the range of float32 in half of its bytes; packing divides by the rounded scale, so nothing is lost."""

_PLACES = np.arange(8, dtype=np.uint8)
_STATISTICS = frozenset({NORM_STATS.name, "attn_lse"})


def unpackable(shape: tuple[int, ...], dtype: str, labels: Collection[str], decision: Decision) -> str | None:
    """Why a value can't be kept under a decision that compresses; None where it can.

    Args:
        shape, dtype: of the value.
        labels: its tag and its op families.
        decision: of the policy.

    >>> unpackable((8, 128), "int32", (), FP8)
    'is int32, and integers are never rounded'
    >>> unpackable((8, 128), "bool", (), FP8)
    "is boolean, which 'bits:' packs exactly"
    """
    if decision is BITS:
        return None if dtype == "bool" else f"is {dtype}, and 'bits:' packs booleans"
    if dtype == "bool":
        return "is boolean, which 'bits:' packs exactly"
    if dtype not in ("float16", "bfloat16", "float32", "float64"):
        return f"is {dtype}, and {'integers are never' if 'int' in dtype else 'such values are not'} rounded"
    if _STATISTICS.intersection(labels) or not shape or (shape[-1] == 1 and MATMUL.name not in labels):
        return "is a statistic, which is never rounded"
    if decision is INT4 and shape[-1] % 2:
        return f"has rows of {shape[-1]}, which 4-bit pairs don't divide"
    return None


def block_of(row: int) -> int:
    """Values of a row that share a scale: its largest divisor up to 128 where that is 32 or more, else all.

    A letter for a size has no divisors, so one scale for the row is counted.

    >>> block_of(4096), block_of(96), block_of(200), block_of(254)
    (128, 96, 100, 127)
    """
    if not isinstance(row, int):
        return row
    largest = max(size for size in range(1, BLOCK + 1) if row % size == 0)
    return largest if largest >= _SHORTEST_BLOCK else row


@dataclass(frozen=True)
class _Format:
    """How a scaled value is rounded.

    Args:
        largest: absolute value that it holds.
        encode: float32 within +-``largest`` to what is kept.
        decode: back to float32.
    """

    largest: float
    encode: Callable[[jax.Array], jax.Array]
    decode: Callable[[jax.Array], jax.Array]


def _float8(dtype: Any) -> _Format:
    # Kept as plain bytes: jax.checkpoint puts a reduce_precision on a saved float, and that has no e4m3fn.
    encode = lambda x: lax.bitcast_convert_type(x.astype(dtype), jnp.uint8)
    return _Format(
        float(jnp.finfo(dtype).max), encode, lambda q: lax.bitcast_convert_type(q, dtype).astype(jnp.float32)
    )


def _to_int8(x: jax.Array) -> jax.Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int8)


def _to_int4(x: jax.Array) -> jax.Array:
    """Two to a byte: the first half of a row in the low bits, the second in the high ones."""
    low, high = jnp.split(lax.bitcast_convert_type(_to_int8(x), jnp.uint8), 2, axis=-1)
    return (low & 15) | (high << 4)


def _from_int4(packed: jax.Array) -> jax.Array:
    signed = lax.bitcast_convert_type(jnp.concatenate([packed << 4, packed], axis=-1), jnp.int8)
    return (signed >> 4).astype(jnp.float32)


_FORMATS = {
    INT8: _Format(127, _to_int8, lambda q: q.astype(jnp.float32)),
    INT4: _Format(7, _to_int4, _from_int4),
    FP8: _float8(jnp.float8_e4m3fn),
    E5M2: _float8(jnp.float8_e5m2),
}


def pack(x: jax.Array, decision: Decision) -> tuple[jax.Array, ...]:
    """``x`` in fewer bytes: for booleans the bytes alone, else the rounded values and their scales.

    The scale of a block maps its largest absolute value to the format's largest one.

    >>> [(part.shape, str(part.dtype)) for part in pack(jnp.ones((4, 256), jnp.bfloat16), FP8)]
    [((4, 256), 'uint8'), ((4, 2), 'bfloat16')]
    >>> [(part.shape, str(part.dtype)) for part in pack(jnp.ones((4, 20), bool), BITS)]
    [((10,), 'uint8')]
    """
    if decision is BITS:
        rows = x if x.shape and x.shape[-1] % 8 == 0 else jnp.pad(x.reshape(-1), (0, -x.size % 8))
        eights = rows.reshape(*rows.shape[:-1], rows.shape[-1] // 8, 8).astype(jnp.uint8)
        return (jnp.sum(eights << _PLACES, axis=-1, dtype=jnp.uint8),)
    own, blocks = _FORMATS[decision], _in_blocks(x)
    largest = jnp.max(jnp.abs(blocks.astype(jnp.float32)), axis=-1)
    scales = (largest / own.largest).astype(SCALE)
    divisor = jnp.where(scales == 0, 1, scales)[..., None].astype(jnp.float32)
    scaled = jnp.clip(blocks.astype(jnp.float32) / divisor, -own.largest, own.largest)
    return own.encode(scaled.reshape(x.shape)), scales


def unpack(parts: tuple[jax.Array, ...], shape: tuple[int, ...], dtype: Any, decision: Decision) -> jax.Array:
    """What ``pack`` was given, rounded; booleans exactly.

    >>> x = jnp.array([0.5, -3.0, 7.0, 0.0] * 8)
    >>> bool((unpack(pack(x, INT4), x.shape, x.dtype, INT4) == jnp.array([0.0, -3.0, 7.0, 0.0] * 8)).all())
    True
    """
    if decision is BITS:
        bits = ((parts[0][..., None] >> _PLACES) & 1).astype(bool)
        return (
            bits.reshape(-1)[: math.prod(shape)].reshape(shape)
            if bits.size != math.prod(shape)
            else bits.reshape(shape)
        )
    values, scales = parts
    blocks = _in_blocks(_FORMATS[decision].decode(values).reshape(shape))
    return (blocks * scales[..., None].astype(jnp.float32)).reshape(shape).astype(dtype)


def _in_blocks(x: jax.Array) -> jax.Array:
    """The last axes cut into blocks: as many axes as a row of at least 32 needs."""
    long = lambda row: not isinstance(row, int) or row >= _SHORTEST_BLOCK
    axes = next((k for k in range(1, x.ndim) if long(math.prod(x.shape[-k:]))), x.ndim)
    row = math.prod(x.shape[-axes:])
    return x.reshape(*x.shape[: x.ndim - axes], row // block_of(row), block_of(row))
