import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jremat.estimator.decoder.loss import cross_entropy, linear_cross_entropy
from jremat.policy.names import tag
from tests.models.counting import equations, kept_shapes
from tests.models.families import compiled

B, S, H, V = 2, 7, 5, 13


@pytest.fixture(scope="module")
def problem():
    keys = jax.random.split(jax.random.key(0), 4)
    x, head = jax.random.normal(keys[0], (B, S, H)), jax.random.normal(keys[1], (V, H))
    return x, head, jax.random.randint(keys[2], (B, S), 0, V), jax.random.normal(keys[3], (B, S))


def plain(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def test_cross_entropy_equals_optax(problem):
    x, head, labels, weights = problem
    logits = 4 * x @ head.T
    np.testing.assert_allclose(cross_entropy(logits, labels), plain(logits, labels), rtol=1e-5, atol=1e-6)
    gradient = lambda fn: compiled(jax.grad(lambda logits: (fn(logits, labels) * weights).sum()))(logits)
    np.testing.assert_allclose(gradient(cross_entropy), gradient(plain), rtol=1e-5, atol=1e-6)
    check_grads(lambda logits: cross_entropy(logits, labels), (logits,), order=1, modes=["rev"], atol=0.01, rtol=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cross_entropy_keeps_logits_in_their_dtype_and_a_number_a_row(problem, dtype):
    x, head, labels, _ = problem
    logits = (x @ head.T).astype(dtype)
    shapes = kept_shapes(lambda logits: cross_entropy(tag(logits, "logits"), labels + 0), logits)
    assert shapes == sorted([(dtype, (B, S, V)), ("float32", (B, S)), ("int32", (B, S))])
    assert cross_entropy(logits, labels).dtype == jnp.float32
    assert jax.grad(lambda logits: cross_entropy(logits, labels).sum())(logits).dtype == dtype


@settings(max_examples=5, deadline=None)
@given(chunk=st.integers(1, S + 3))
def test_chunked_equals_whole_for_every_chunk(problem, chunk):
    x, head, labels, weights = problem
    whole = lambda x, head: (cross_entropy(x @ head.T, labels) * weights).sum()
    chunked = lambda x, head: (linear_cross_entropy(x, head, labels, chunk) * weights).sum()
    want, got = (compiled(jax.value_and_grad(fn, (0, 1)))(x, head) for fn in (whole, chunked))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), got, want)


def test_chunked_never_makes_all_logits_and_keeps_none(problem):
    x, head, labels, _ = problem
    loss = lambda x, head: linear_cross_entropy(tag(x, "x"), head, labels, 2).mean()
    largest = max(
        var.aval.size
        for eqn, _ in equations(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, head).jaxpr)
        for var in eqn.outvars
        if V in var.aval.shape and B in var.aval.shape
    )
    assert largest == B * 2 * V
    assert kept_shapes(loss, x, head) == sorted([("float32", (B, S)), ("float32", (B, S, H)), ("int32", (B, S))])
    # nor does a policy that keeps every matmul find one to keep
    dots = jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable)
    assert all(V not in shape for _, shape in kept_shapes(dots, x, head))


def test_chunked_in_mixed_precision_sums_the_heads_gradient_in_float32(problem):
    x, head, labels, weights = problem
    loss = lambda x, head: (linear_cross_entropy(x.astype(jnp.bfloat16), head, labels, 3) * weights).sum()
    whole = lambda x, head: (cross_entropy(x @ head.T, labels) * weights).sum()
    got, want = (compiled(jax.grad(fn, 1))(x, head) for fn in (loss, whole))
    assert got.dtype == jnp.float32
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


@pytest.mark.parametrize("label", [-1, V, -100])
def test_a_label_outside_the_vocabulary_is_nan_not_another_token(problem, label):
    x, head, labels, _ = problem
    labels = labels.at[1, 3].set(label)
    for losses in (cross_entropy(x @ head.T, labels), linear_cross_entropy(x, head, labels, 3)):
        assert np.isnan(losses[1, 3]) and np.isnan(losses).sum() == 1
