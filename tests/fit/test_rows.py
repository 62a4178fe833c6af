"""Rows of segments: equal gradients, bytes and matmuls as JAX has them, and a frontier that never rises."""

import os
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jremat
from tests.fit.programs import choices_of, fitted, layers, layers_arguments, random_program

PROGRAMS = int(os.environ.get("JREMAT_RANDOM_PROGRAMS", 16))
"""Drawn at random; a hundred take four minutes of a core."""


@pytest.mark.parametrize("first", range(0, PROGRAMS, 8))
def test_random_programs_keep_their_values_and_gradients(first):
    programs, pairs = [random_program(seed) for seed in range(first, first + 8)], []
    for f, args in programs:
        reading, choices = choices_of(f, *args)
        least, most = choices.least(), choices.row(np.inf)
        limits = np.linspace(least.peak_bytes, most.peak_bytes, 4)
        rows = [choices.row(float(limit)) for limit in limits]
        assert all(a.seconds >= b.seconds for a, b in pairwise(rows)), "more memory is never slower"
        assert most.seconds == 0
        pairs.append((f, fitted(f, args, reading, choices, least)))

    both = jax.jit(lambda every: [[jax.value_and_grad(g)(*args) for g in pair] for pair, args in zip(pairs, every)])
    for plain, ours in both([args for _, args in programs]):
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(ours)):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * float(jnp.abs(a).max() + 1))


def test_bytes_and_matmuls_are_those_of_the_program_that_runs():
    args = layers_arguments()
    reading, choices = choices_of(layers, *args)
    plain = jremat.residuals(layers, *args).total_bytes
    least = choices.least()
    assert least.flops > 0
    for limit in (least.peak_bytes, (least.peak_bytes + choices.row(np.inf).peak_bytes) // 2):
        row = choices.row(limit)
        ours = fitted(layers, args, reading, choices, row)
        assert jremat.flops(jax.grad(ours), *args).recompute == row.flops
        assert jremat.residuals(ours, *args).total_bytes < plain


def test_equal_layers_are_solved_once():
    few, many = (choices_of(layers, *layers_arguments(n))[1] for n in (8, 16))
    assert len(many.bounds) > len(few.bounds)
    assert len(many.solved) <= 2 * len(few.solved)


def test_a_skip_is_held_once():
    def unet(ws, x):
        skips = []
        for w in ws[:4]:
            x = jnp.tanh(x @ w)
            skips.append(x)
        for w in ws[4:]:
            x = jnp.tanh((x + skips.pop()) @ w)
        return jnp.mean(x)

    args = [jnp.ones((32, 32)) / 32] * 8, jnp.ones((64, 32))
    reading, choices = choices_of(unet, *args)
    ours = fitted(unet, args, reading, choices, choices.least())
    rows = jremat.residuals(ours, *args)
    assert len({id(row) for row in rows.kept}) == len(rows.kept)
    held = sum(s.held_bytes for s in choices.least().segments[:-1])
    assert rows.total_bytes <= held + reading.stored.sum()
    grads = [jax.grad(g)(*args) for g in (unet, ours)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *grads)


def test_the_modelled_peak_counts_a_wide_head_that_is_left_alone():
    def loss(ws, x):
        for w in ws[:-1]:
            x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        return -jnp.mean(jax.nn.log_softmax(x @ ws[-1]["head"])[:, 0])

    ws, x = layers_arguments(8, 32, 512)
    args = [*ws, {"head": jnp.ones((32, 1024))}], x
    reading, choices = choices_of(loss, *args)
    weights = sum(w.nbytes for w in jax.tree.leaves(args[0]))
    for limit in (choices.least().peak_bytes, np.inf):
        row = choices.row(limit)
        step = jax.value_and_grad(fitted(loss, args, reading, choices, row))
        traced = jremat.predicted_memory(step, *args).peak_bytes - 2 * weights - x.nbytes
        assert traced <= 1.05 * row.peak_bytes <= 1.6 * traced
