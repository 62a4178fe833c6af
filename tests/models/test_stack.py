"""Whoever runs the layers, nn.scan or another executor, under whatever remat: one model, one set of masks."""

from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import models
from tests.models.counting import kept
from tests.models.families import FAMILIES, GPT, TARGETS, TOKENS, assert_same_gradients, compiled, value_and_grad

POLICIES = jax.checkpoint_policies


def unrolled(block, stacked, carry):
    for i in range(jax.tree.leaves(stacked)[0].shape[0]):
        assert carry.layer.shape == ()
        carry = block(jax.tree.map(lambda leaf, i=i: leaf[i], stacked), carry)
    return carry


def looped(block, stacked, carry):
    return lax.scan(lambda carry, params: (block(params, carry), None), carry, stacked)[0]


HOW = {
    "unrolled": {"stack": unrolled},
    "looped": {"stack": looped},
    "scan, full": {"remat": partial(nn.remat, prevent_cse=False)},
    "scan, dots": {"remat": partial(nn.remat, prevent_cse=False, policy=POLICIES.dots_saveable)},
    "looped, full": {"stack": looped, "remat": partial(nn.remat, prevent_cse=False)},
}


@pytest.fixture(scope="module")
def dropped(params):
    config = {name: replace(FAMILIES[name], dropout=0.3) for name in ("gpt", "llama")}
    return {name: (c, value_and_grad(c, params[name], jax.random.key(4))) for name, c in config.items()}


@pytest.mark.parametrize("family, how", [*(("gpt", how) for how in HOW), ("llama", "looped"), ("llama", "scan, dots")])
def test_the_same_losses_gradients_and_masks_however_the_stack_runs(params, dropped, family, how):
    config, (loss, grads) = dropped[family]
    got_loss, got = value_and_grad(config, params[family], jax.random.key(4), **HOW[how])
    np.testing.assert_allclose(got_loss, loss, rtol=1e-6)
    assert_same_gradients(got, grads)


def test_the_scan_under_full_remat_keeps_one_input_a_layer(params):
    loss = lambda p, **how: models.mean_loss(models.Transformer(GPT, **how), p, TOKENS, TARGETS)
    stacked = lambda **how: [a.shape for a in kept(partial(loss, **how), params["gpt"]) if a.shape[:1] == (3,)]
    assert stacked(**HOW["scan, full"]) == [(3, 2, 9, 8)]
    assert len(stacked()) > 10


def test_masks_differ_by_key_and_by_layer_and_vanish_without_one(params):
    config = replace(GPT, dropout=0.3)
    apply = compiled(models.Transformer(config).apply)
    of = lambda key: apply({"params": params["gpt"]}, TOKENS, key)
    np.testing.assert_array_equal(of(jax.random.key(1)), of(jax.random.key(1)))
    assert np.abs(of(jax.random.key(1)) - of(jax.random.key(2))).max() > 1e-3
    exact = compiled(models.Transformer(GPT).apply)({"params": params["gpt"]}, TOKENS, jax.random.key(1))
    np.testing.assert_array_equal(of(None), exact)


def test_the_same_parameters_in_another_layer_have_another_mask(params):
    apply = compiled(models.block_apply(replace(GPT, dropout=0.3)))
    first = jax.tree.map(lambda leaf: leaf[0], params["gpt"]["blocks"])
    carry = models.Carry(jnp.ones((1, 9, 8)), jnp.int32(0), jax.random.key(1), jnp.arange(9))
    once = apply(first, carry)
    assert int(once.layer) == 1
    again = apply(first, carry._replace(layer=once.layer))
    assert np.abs(once.x - again.x).max() > 1e-3
