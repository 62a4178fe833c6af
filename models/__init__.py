"""Flax transformers to train, measure and explain policies on."""

from models.config import get, sizes
from models.transformer import Block, Carry, Transformer, block_apply, init_params, mean_loss

__all__ = ["Block", "Carry", "Transformer", "block_apply", "get", "init_params", "mean_loss", "sizes"]
