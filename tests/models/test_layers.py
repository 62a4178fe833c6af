"""Each layer against the plain formula under JAX's own derivative rules, and what it keeps, array by array."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jremat.estimator.decoder import layers
from jremat.policy.names import tag
from tests.models.counting import equations, kept_shapes
from tests.models.families import compiled

B, S, H = 2, 5, 7  # odd, and no two alike


def plain_layer_norm(x, scale, bias):
    y = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale
    return y if bias is None else y + bias


def plain_rms_norm(x, scale):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def plain_causal_softmax(scores):
    mask = np.tril(np.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(mask, scores * 0.3, -jnp.inf))


def plain_rope(x):
    """A rotation of complex numbers, pair (i, i + d/2)."""
    half = x.shape[-1] // 2
    angles = np.arange(S)[:, None] * 10_000.0 ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None, :]
    return jnp.concatenate([turned.real, turned.imag], -1)


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed + len(shape)), shape)


# name: (ours, plain, differentiable arguments, kept of a float dtype "x", kept besides)
X, ROW, STAT = (B, S, H), (H,), ("float32", (B, S, 1))
SCORES, HEADS = (B, 2, S, S), (B, S, 3, 4)
CASES = {
    "layer_norm": (
        lambda x, scale, bias: layers.layer_norm(x, scale, bias, 1e-5),
        plain_layer_norm,
        (draw(*X), draw(*ROW), draw(*ROW, seed=1)),
        [X],
        [STAT, STAT],
    ),
    "layer_norm without bias": (
        lambda x, scale: layers.layer_norm(x, scale, None, 1e-5),
        lambda x, scale: plain_layer_norm(x, scale, None),
        (draw(*X), draw(*ROW)),
        [X],
        [STAT, STAT],
    ),
    "rms_norm": (
        lambda x, scale: layers.rms_norm(x, scale, 1e-5),
        plain_rms_norm,
        (draw(*X), draw(*ROW)),
        [X],
        [STAT],
    ),
    "gelu": (layers.gelu, partial(jax.nn.gelu, approximate=True), (3 * draw(*X),), [X], []),
    "silu": (layers.silu, jax.nn.silu, (3 * draw(*X),), [X], []),
    "swiglu": (layers.swiglu, lambda g, u: jax.nn.silu(g) * u, (3 * draw(*X), draw(*X, seed=1)), [X, X], []),
    "causal_softmax": (
        lambda x: layers.causal_softmax(x, 0.3),
        plain_causal_softmax,
        (5 * draw(*SCORES),),
        [SCORES],
        [],
    ),
    "rope": (
        lambda x: layers.rope(x, jnp.arange(S), 10_000.0),
        plain_rope,
        (draw(*HEADS),),
        [],
        [("int32", (S,))],
    ),
}
every_layer = pytest.mark.parametrize("name", CASES)


def weighted(fn, *args):
    """A scalar whose gradient sees every output apart."""
    out = fn(*args)
    return (out.astype(jnp.float32) * draw(*out.shape, seed=9)).sum()


def run(fn, args):
    """Value and gradients."""
    gradients = jax.grad(partial(weighted, fn), tuple(range(len(args))))
    return compiled(lambda *args: (fn(*args), gradients(*args)))(*args)


@every_layer
def test_value_and_gradients_equal_the_plain_formula(name):
    ours, plain, args, _, _ = CASES[name]
    (out, grads), (want_out, want) = run(ours, args), run(plain, args)
    np.testing.assert_allclose(out, want_out, rtol=1e-5, atol=2e-6)
    for g, w in zip(grads, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5)


@every_layer
def test_gradients_equal_finite_differences(name):
    ours, _, args, _, _ = CASES[name]
    check_grads(ours, args, order=1, modes=["rev"], atol=0.01, rtol=0.01)


@every_layer
def test_gradient_of_the_gradient_equals_the_plain_formulas(name):
    ours, plain, args, _, _ = CASES[name]

    def twice(fn):
        first = jax.grad(partial(weighted, fn))
        return compiled(jax.grad(lambda x, *rest: (first(x, *rest) ** 2).sum()))(*args)

    np.testing.assert_allclose(twice(ours), twice(plain), rtol=1e-3, atol=1e-3)


@every_layer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keeps_exactly_what_it_says(name, dtype):
    ours, _, args, of_x, besides = CASES[name]
    # x * 1, so that what is kept of the inputs is no argument; row parameters stay arguments
    fresh = lambda *args: ours(*(tag(a, "fresh") if a.ndim > 1 else a for a in args))
    args = [a.astype(dtype) if a.ndim > 1 else a for a in args]
    assert kept_shapes(fresh, *args) == sorted([(dtype, shape) for shape in of_x] + besides)


@every_layer
def test_bfloat16_in_and_out_with_float32_inside(name):
    ours, plain, args, _, _ = CASES[name]
    args = [a.astype(jnp.bfloat16) if a.ndim > 1 else a for a in args]
    (out, grads), (want_out, want) = run(ours, args), run(plain, [a.astype(jnp.float32) for a in args])
    assert out.dtype == jnp.bfloat16 and [g.dtype for g in grads] == [a.dtype for a in args]
    eps = 2.0**-8  # bfloat16 rounds to 8 bits: one rounding of the output is all that is lost
    np.testing.assert_allclose(out.astype(jnp.float32), want_out, rtol=1.01 * eps, atol=1e-6)
    for g, w in zip(grads, want, strict=True):
        # a softmax's gradient also reads its rounded output
        np.testing.assert_allclose(g.astype(jnp.float32), w, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("name, reductions", [("layer_norm", 2), ("rms_norm", 1)])
def test_a_policy_that_keeps_norm_stats_reruns_no_reduction(name, reductions):
    ours, _, args, _, _ = CASES[name]

    def reruns(policy):
        block = jax.checkpoint(lambda *args: ours(tag(args[0], "x"), *args[1:]), policy=policy)
        jaxpr = jax.make_jaxpr(jax.grad(partial(weighted, block)))(*args).jaxpr
        return sum(eqn.primitive.name == "reduce_sum" for eqn, _ in equations(jaxpr)), kept_shapes(block, *args)

    full, nothing = reruns(jax.checkpoint_policies.nothing_saveable)
    stats, kept = reruns(jax.checkpoint_policies.save_only_these_names("norm_stats"))
    assert nothing == [] and kept == [STAT] * reductions
    assert full - stats == reductions


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_dropout_keeps_its_key_alone(make_key):
    dropped = lambda x, key: layers.dropout(x * 2, jax.random.fold_in(key, 1), 0.3)
    shapes = kept_shapes(lambda x: dropped(x, make_key(0)), jnp.ones((64, 64)))
    assert shapes in ([("key<fry>", ())], [("uint32", (2,))])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_frequencies_and_mean(rate):
    n = 200_000
    out = np.asarray(layers.dropout(jnp.ones(n), jax.random.key(3), rate))
    zeros, five_sigma = (out == 0).mean(), 5 * (rate * (1 - rate) / n) ** 0.5
    assert abs(zeros - rate) < five_sigma
    np.testing.assert_allclose(out[out != 0], 1 / (1 - rate), rtol=1e-6)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable])
def test_dropout_has_one_mask_in_forward_backward_and_under_remat(policy):
    x, key = draw(33, 17), jax.random.key(5)
    drop = lambda x: layers.dropout(x, key, 0.4)
    mask = drop(jnp.ones_like(x))
    assert 0 < int((mask == 0).sum()) < mask.size
    for fn in (drop, jax.checkpoint(drop, policy=policy)):
        out, gradient = compiled(lambda x, fn=fn: (fn(x), jax.grad(lambda x: fn(x).sum())(x)))(x)
        np.testing.assert_allclose(out, x * mask, rtol=1e-6)
        np.testing.assert_array_equal(gradient, mask)
    assert not np.array_equal(layers.dropout(jnp.ones_like(x), jax.random.key(6), 0.4), mask)


def test_softmax_of_a_masked_row_is_zero_after_its_diagonal():
    probs = layers.causal_softmax(draw(1, 1, 6, 6), 1.0)[0, 0]
    assert (np.triu(probs, 1) == 0).all()
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-6)


def test_rope_keeps_lengths_and_depends_on_distance_alone():
    q, k = draw(1, 1, 1, 8), draw(1, 1, 1, 8, seed=1)
    at = lambda x, position: layers.rope(x, jnp.array([position]), 100.0)
    np.testing.assert_allclose(jnp.linalg.norm(at(q, 7)), jnp.linalg.norm(q), rtol=1e-5)
    np.testing.assert_allclose((at(q, 9) * at(k, 4)).sum(), (at(q, 25) * at(k, 20)).sum(), rtol=1e-4)


def test_rope_takes_a_position_of_its_own_for_each_row():
    x = draw(2, 3, 1, 4)
    own = layers.rope(x, jnp.array([[0, 1, 2], [5, 6, 7]]), 10.0)
    np.testing.assert_allclose(own[1], layers.rope(x[1:], jnp.array([5, 6, 7]), 10.0)[0], rtol=1e-6)
