"""Flax transformers to train, measure and explain policies on."""

import importlib
from typing import TYPE_CHECKING, Any

from models.config import get, sizes

if TYPE_CHECKING:
    from models.transformer import Block, Carry, Transformer, block_apply, init_params, mean_loss

__all__ = ["Block", "Carry", "Transformer", "block_apply", "get", "init_params", "mean_loss", "sizes"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # found when first asked for: a size by name shouldn't wait for JAX and Flax to load
        return getattr(importlib.import_module("models.transformer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
