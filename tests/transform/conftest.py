"""The remat that is to become JAX's default, for one test."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def remat3() -> Iterator[None]:
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", before)
