"""JAX's own count of what a function keeps: the independent reference for ours."""

import math
from collections.abc import Callable
from typing import Any

from jax._src.ad_checkpoint import saved_residuals


def jax_kept_bytes(f: Callable[..., Any], *args: Any) -> int:
    """Bytes that JAX lists as saved, its arguments and constants left out."""
    rows = [(aval, source) for aval, source in saved_residuals(f, *args) if not _is_input(source)]
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval, _ in rows)


def _is_input(source: str) -> bool:
    return source.startswith(("from the argument", "from a constant", "from a literal"))
