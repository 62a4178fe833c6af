"""Rows of the comparison: figures of both sides, what must hold of them, and each difference by tensor."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

GRADIENT_LIMIT = 1e-5
"""Relative, norm-wise for each leaf, in float32."""
GRADIENT_FLOOR = 1e-7
"""Of the largest leaf's norm: a gradient that is zero on paper (a key bias's without RoPE) is noise on both sides."""
NONE_MARGIN = 0.1
"""Without remat JAX may keep so much more or less than PyTorch: each op's own derivative rule decides."""


def check(holds: bool, hard: bool, **figures: Any) -> dict[str, Any]:
    """One thing that must hold, or, where it isn't hard, is reported."""
    return {"holds": bool(holds), "hard": hard, **figures}


def gradient_error(tree: Any, reference: Any) -> float:
    """The largest error of a leaf, relative to its norm or the floor, whichever is larger."""
    want = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), reference)
    got = jax.tree.map(lambda w, leaf: np.asarray(leaf, np.float64), want, tree)  # raises where the trees differ
    norms = [np.linalg.norm(leaf) for leaf in jax.tree.leaves(want)]
    floor = GRADIENT_FLOOR / GRADIENT_LIMIT * max(norms)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), norms, strict=True)
    return float(max(np.linalg.norm(g - w) / max(norm, floor) for g, w, norm in pairs))


def kept_check(spec: str, ours: int, theirs: int) -> dict[str, Any]:
    """JAX keeps no more than PyTorch; without remat within a margin."""
    limit = theirs * (1 + NONE_MARGIN) if spec in ("none", "everything_saveable") else theirs
    return check(ours <= limit, hard=True, jax=ours, pytorch=theirs, ratio=ours / theirs if theirs else None)


def differences(
    ours: Mapping[str, int], theirs: Mapping[str, int], read: Mapping[str, int], listed: bool
) -> list[dict[str, Any]]:
    """Each tensor of which the two sides keep another number of bytes, and why.

    Args:
        ours, theirs: bytes by tensor.
        read: what JAX keeps without remat: all that its backward reads.
        listed: whether PyTorch keeps what a list says, read or not.

    >>> differences({}, {"mlp_out": 4}, {}, listed=True)[0]["why"]
    'PyTorch keeps it as it is listed, though the backward never reads it'
    """
    rows = []
    for name in sorted({*ours, *theirs}, key=lambda name: -abs(ours.get(name, 0) - theirs.get(name, 0))):
        mine, other = ours.get(name, 0), theirs.get(name, 0)
        if mine != other:
            rows.append({"tensor": name, "jax": mine, "pytorch": other, "why": _why(name, mine, other, read, listed)})
    return rows


def _why(name: str, ours: int, theirs: int, read: Mapping[str, int], listed: bool) -> str:
    if ours > theirs:
        return "JAX keeps it; PyTorch recomputes it"
    if name in read:
        return "PyTorch keeps it; JAX recomputes it from what it keeps"
    if listed:
        return "PyTorch keeps it as it is listed, though the backward never reads it"
    return "PyTorch's derivative of the op reads it; the op here has its own, which doesn't"


def failed(rows: list[dict[str, Any]]) -> list[str]:
    """The hard rows that don't hold, one line each.

    >>> failed([{"policy": "full", "pytorch": "checkpoint", "checks": {"loss": check(False, True, limit=1)}}])
    ['full, checkpoint: loss']
    """
    return [
        f"{row['policy']}, {row['pytorch']}: {name}"
        for row in rows
        for name, found in row.get("checks", {}).items()
        if found["hard"] and not found["holds"]
    ]
