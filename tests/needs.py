"""What some tests need and a clean clone lacks: marks that skip them, each with the line that brings it."""

import importlib.util

import pytest


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package
        return False


CUDNN = pytest.mark.skipif(
    not _exists("nvidia.cudnn"), reason="JAX looks for cuDNN: pip install --no-deps nvidia-cudnn-cu12"
)
