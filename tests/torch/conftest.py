import importlib.util

import pytest

if importlib.util.find_spec("torch"):
    import torch

    torch.set_num_threads(1)  # test processes share the cores


@pytest.fixture(scope="session")
def flax_params():
    """Random parameters of a config, as NumPy arrays: no bias is zero and no scale one."""
    import jax
    import numpy as np

    import models

    def filled(config):
        shapes = jax.eval_shape(lambda: models.init_params(config, jax.random.key(0)))
        random = np.random.default_rng(0)
        return jax.tree.map(lambda leaf: (0.3 * random.standard_normal(leaf.shape)).astype(leaf.dtype), shapes)

    return filled
