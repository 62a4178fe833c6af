"""What the figures were measured with."""

import importlib.metadata
import platform
from typing import Any


def versions() -> dict[str, Any]:
    """Of both frameworks and the machine."""
    names = ("jax", "jaxlib", "flax", "torch")
    return {
        "versions": {name: importlib.metadata.version(name) for name in names},
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
