from functools import partial

import jax
import pytest

import models
from tests.models.families import FAMILIES, compiled


@pytest.fixture(scope="session")
def params():
    """Of every family, every leaf away from its start, so that no bias is zero and no scale one."""

    def shaken(config):
        leaves, tree = jax.tree.flatten(models.init_params(config, jax.random.key(0)))
        keys = jax.random.split(jax.random.key(1), len(leaves))
        return jax.tree.unflatten(
            tree, [x + 0.2 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
        )

    return {name: compiled(partial(shaken, config))() for name, config in FAMILIES.items()}
