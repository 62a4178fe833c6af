"""The remat that is to become JAX's default, for one test."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def remat3() -> Iterator[None]:
    yield from _switched(True)


@pytest.fixture(params=[False, True], ids=["remat2", "remat3"])
def either_remat(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Once under each remat of JAX."""
    for _ in _switched(request.param):
        yield request.param


def _switched(on: bool) -> Iterator[None]:
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", on)
    yield
    jax.config.update("jax_remat3", before)
