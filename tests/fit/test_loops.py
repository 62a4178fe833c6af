"""Loops and branches planned in place: equal gradients, and bytes and matmuls as JAX has them."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jremat
from jremat.fitting.choose import Inside
from jremat.fitting.planner import DoesNotFit
from tests.fit.loops import PROGRAMS, random_program
from tests.fit.programs import choices_of, fitted

RANDOM = int(os.environ.get("JREMAT_RANDOM_PROGRAMS", 16)) // 4
"""Drawn at random; each takes ten seconds of a core."""


def planned(row) -> list[Inside]:
    return [own for segment in row.segments for own in segment.inside]


def close(plain, ours):
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(ours), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * (1 + float(np.abs(a).max())))


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_of_a_program_with_loops(name):
    f, args = PROGRAMS[name]
    reading, choices = choices_of(f, *args)
    least, most = choices.least(), choices.row(np.inf)
    assert choices.inside and least.peak_bytes < most.peak_bytes / 2 and most.seconds == 0
    rows = [choices.row(least.peak_bytes + share * (most.peak_bytes - least.peak_bytes)) for share in (0, 0.3, 0.7)]
    ours = [fitted(f, args, reading, choices, row) for row in rows]
    assert any(planned(row) for row in rows)
    plain, *others = jax.jit(lambda *args: [jax.value_and_grad(g)(*args) for g in (f, *ours)])(*args)
    for other in others:
        close(plain, other)
    again = lambda g: jremat.flops(jax.grad(g), *args).recompute
    for row, own in zip(rows, ours):
        held, kept = sum(segment.held_bytes for segment in row.segments), jremat.residuals(own, *args).total_bytes
        # What leaves a loop counts as held, though nothing may read it; JAX lists the reshaped weights of groups, which
        # are no copies.
        assert any(own.group > 1 for own in planned(row)) or kept - 4096 <= held <= 1.2 * kept + 4096
        if name not in ("branches", "stochastic_depth"):  # of a cond the branch that takes longest counts
            assert again(own) == row.flops
        assert again(own) <= row.flops


def test_a_choice_by_value_is_made_once_in_a_loop():
    f, args = PROGRAMS["experts"]
    reading, choices = choices_of(f, *args)
    own = fitted(f, args, reading, choices, choices.least())
    count = lambda g: str(jax.make_jaxpr(jax.grad(g))(*args)).count("top_k[")
    assert planned(choices.least()) and count(own) == count(f) == 1


@pytest.mark.parametrize("first", range(0, RANDOM, 2))
def test_random_loops_keep_their_values_and_gradients(first):
    pairs, every = [], []
    for seed in range(first, first + 2):
        f, args = random_program(seed)
        reading, choices = choices_of(f, *args)
        least, most = choices.least(), choices.row(np.inf)
        middle = choices.row((least.peak_bytes + most.peak_bytes) / 2)
        assert most.seconds == 0 and least.seconds >= middle.seconds
        pairs.append((f, fitted(f, args, reading, choices, (least, middle)[seed % 2])))
        every.append(args)
    both = jax.jit(lambda every: [[jax.value_and_grad(g)(*args) for g in some] for some, args in zip(pairs, every)])
    for plain, *others in both(every):
        for ours in others:
            for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(ours), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6, atol=2e-6 * float(jnp.abs(a).max() + 1))


def test_what_cannot_be_cut_is_named():
    def loss(p, x):
        wide = lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] * 2), (0, jnp.concatenate([x] * 64, 1)))[1]
        return jnp.mean(jnp.sin(wide @ jnp.concatenate([p] * 64)) ** 2)

    args = jnp.ones((8, 8)), jnp.ones((64, 8))
    peak = jremat.predicted_memory(jax.value_and_grad(loss), *args)
    limit = peak.peak_bytes - peak.temp_bytes // 2
    with pytest.raises(DoesNotFit, match=r"the largest value alive then is \w+ float32\[64, 512\], 128.0 KiB"):
        jremat.fit(loss, *args, hbm_bytes=limit, target="cpu", compiles=0, margin=0.0)
    with pytest.raises(DoesNotFit, match="arguments and results alone are"):
        jremat.fit(loss, *args, hbm_bytes=1000, target="cpu", compiles=0, margin=0.0)
