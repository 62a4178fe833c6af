"""Programs with operations that have no result, and what may be donated."""

import jax
import jax.numpy as jnp
import pytest

import jremat
from jremat.graph.peak import predicted_memory
from jremat.planner.planner import plan

X, W = jnp.ones((4, 8)), jnp.ones((8, 8))


def _bare(w, x):
    return jnp.tanh(x @ w)


def _prints(w, x):
    jax.debug.print("x {}", x)
    return jnp.tanh(x @ w)


def _prints_a_sum(w, x):
    jax.debug.print("sum {}", x.sum(), ordered=True)
    return jnp.tanh(x @ w)


def _writes(w, x):
    ref = jax.new_ref(x)
    ref[...] = jnp.tanh(ref[...] @ w)
    return ref[...]


@pytest.mark.parametrize("f", [_prints, _prints_a_sum])
def test_a_print_needs_no_memory(f):
    assert predicted_memory(f, W, X).peak_bytes == predicted_memory(_bare, W, X).peak_bytes
    step, bare = (jax.grad(lambda w, x, g=g: g(w, x).sum()) for g in (f, _bare))
    assert predicted_memory(step, W, X).peak_bytes == predicted_memory(bare, W, X).peak_bytes


def test_a_ref_that_is_written_to_can_be_read():
    found = predicted_memory(_writes, W, X)
    assert (found.argument_bytes, found.output_bytes) == ((4 * 8 + 8 * 8) * 4, 4 * 8 * 4)


def test_what_rests_on_the_peak_takes_a_print():
    plain, printing = (plan(f, W, X, num_layers=4, hbm_bytes=2**30) for f in (_bare, _prints))
    assert printing.policy == plain.policy and printing.predicted_peak_bytes == plain.predicted_peak_bytes
    rows = [[(row.bytes, row.fate) for row in jremat.explain(f, W, X).rows] for f in (_bare, _prints)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("donate", ["a", "0", -1, (2,), (0.0,), (True,), None, {"w": 0}])
def test_what_names_no_argument_can_not_be_donated(donate):
    with pytest.raises(ValueError, match=r"donate: expected positions of the 2 arguments, e\.g\. \(0,\), got"):
        predicted_memory(_bare, W, X, donate=donate)


def test_one_position_is_as_good_as_a_list():
    nbytes = 4 * 8 * 4
    assert [predicted_memory(_bare, W, X, donate=d).alias_bytes for d in (1, [1], range(1, 2))] == [nbytes] * 3
