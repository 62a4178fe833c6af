"""A replay of a policy that compresses measures its gradients, by parameter and by rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jremat
import policies
from jremat.policy import tag

KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (32, 64))
W1, W2 = (jax.random.normal(key, (64, 64)) / 8 for key in KEYS[1:])


def f(x, w1, w2):
    return jnp.sin(4 * tag(jnp.sin(tag(x @ w1, "low")) @ w2, "high")).sum()


def test_of_each_gradient_and_of_each_rule():
    found = jremat.replay(f, X, W1, W2, policy=policies.get("fp8:low;compress:high@int4"))
    policy = jremat.checkpoint(f, policies.get("fp8:low;compress:high@int4"))
    gradients, exact = (jax.grad(g, (0, 1, 2))(X, W1, W2) for g in (policy, f))
    assert found.equal
    assert found.bitwise  # traces, runs and results
    by_name = {error.name: error for error in found.gradient_errors}
    for k in range(3):
        one, other = (np.ravel(g[k]).astype(np.float64) for g in (gradients, exact))
        error = by_name[f"argument {k}"]
        np.testing.assert_allclose(error.relative_norm, np.linalg.norm(one - other) / np.linalg.norm(other), rtol=1e-3)
        cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        np.testing.assert_allclose(error.cosine, cosine, rtol=1e-5)
    assert by_name["compress:high@int4"].large
    assert not by_name["fp8:low"].large
    assert by_name["fp8:low"].relative_norm < by_name["all gradients"].relative_norm
    assert "compress:high@int4  large" in str(found)


@pytest.mark.parametrize("spec", ["save:low", "full"])
def test_an_exact_policy_has_none(spec):
    assert jremat.replay(f, X, W1, W2, policy=policies.get(spec)).gradient_errors == ()


def test_of_a_stack():
    block = lambda w, x: jnp.sin(tag(x @ w, "low"))
    found = jremat.replay(block, jnp.stack([W1, W2]), X, policy=policies.get("fp8:low"), num_layers=2)
    assert found.equal
    assert [0 < error.relative_norm < 0.05 for error in found.gradient_errors] == [True] * 3


def test_explain_says_how_a_value_is_kept():
    rows = jremat.explain(f, X, W1, W2, policy=policies.get("fp8:low")).of("kept")
    assert {(row.value, row.dtype, row.why) for row in rows} == {
        ("low", dtype, "named low, as fp8") for dtype in ("uint8", "bfloat16")
    }
