"""The three attentions against a loop over heads in float64, what each keeps, and what a policy can see of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jremat.estimator.decoder import attention
from jremat.policy.names import tag
from tests import needs
from tests.models.counting import equations, gradient_matmuls, kept_bytes, kept_shapes, matmuls
from tests.models.families import compiled

POLICIES = jax.checkpoint_policies
NAMES = POLICIES.save_only_these_names


def draw(s, n, m, d=6, b=2):
    shapes = (b, s, n, d), (b, s, m, d), (b, s, m, d)
    return tuple(jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))


def by_hand(query, key, value):
    """One head and one query at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.zeros_like(q)
    for batch, i, head in np.ndindex(q.shape[:3]):
        shared = head // (q.shape[2] // k.shape[2])
        scores = k[batch, : i + 1, shared] @ q[batch, i, head] / np.sqrt(q.shape[3])
        weights = np.exp(scores - scores.max())
        out[batch, i, head] = weights / weights.sum() @ v[batch, : i + 1, shared]
    return out


def dot(query, key, value):
    return attention.dot(query, key, value, None, 0.0)


def blocks_of(size):
    return lambda query, key, value: attention.blockwise(query, key, value, size)


@pytest.mark.parametrize("m", [4, 2, 1])
@pytest.mark.parametrize("fn", [dot, blocks_of(3)])
def test_equals_a_loop_over_heads(fn, m):
    qkv = draw(7, 4, m)
    np.testing.assert_allclose(compiled(fn)(*qkv), by_hand(*qkv), rtol=1e-5, atol=1e-6)


@settings(max_examples=6, deadline=None)
@given(s=st.integers(1, 17), block=st.integers(1, 20), m=st.integers(1, 2), g=st.integers(1, 3))
def test_blockwise_equals_dot_with_gradients_for_any_sizes(s, block, m, g):
    qkv, weight = draw(s, m * g, m, b=1), jax.random.normal(jax.random.key(9), (1, s, m * g, 6))
    both = [
        compiled(jax.value_and_grad(lambda *qkv, fn=fn: (fn(*qkv) * weight).sum(), (0, 1, 2)))(*qkv)
        for fn in (dot, blocks_of(block))
    ]
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5), *both)


def test_blockwise_in_bfloat16_is_as_near_as_rounding_allows():
    qkv = draw(16, 4, 2)
    half = [x.astype(jnp.bfloat16) for x in qkv]
    gradient = lambda fn, qkv: compiled(jax.grad(lambda *a: (fn(*a).astype(jnp.float32) ** 2).sum(), (0, 1, 2)))(*qkv)
    for got, want in zip(gradient(blocks_of(5), half), gradient(dot, qkv), strict=True):
        assert got.dtype == jnp.bfloat16
        assert np.linalg.norm(got.astype(jnp.float32) - want) < 0.02 * np.linalg.norm(want)


def test_large_scores_do_not_overflow():
    q, k, v = draw(9, 2, 2)
    value, gradient = compiled(jax.value_and_grad(lambda q: blocks_of(2)(q, k, v).sum()))(300 * q)
    assert np.isfinite(value) and np.isfinite(gradient).all()


def fresh(fn):
    """Inputs made inside, so that what is kept of them counts."""
    return lambda *qkv: fn(*(2 * x for x in qkv))


S, N, M, D, BLOCK = 48, 4, 2, 6, 16
QUERY, KEY, LSE = ("float32", (2, S, N, D)), ("float32", (2, S, M, D)), ("float32", (2, N, S))
GROUPED, PROBS = ("float32", (2, S, M, N // M, D)), ("float32", (2, M, N // M, S, S))


def test_dot_keeps_its_inputs_and_the_probabilities():
    dropped = lambda q, k, v: attention.dot(q, k, v, jax.random.fold_in(jax.random.key(0), 1), 0.1)
    qkv = draw(S, N, M)
    assert kept_shapes(fresh(dot), *qkv) == sorted([GROUPED, KEY, KEY, PROBS])
    key = ("key<fry>", ())
    assert kept_shapes(fresh(dropped), *qkv) == sorted([GROUPED, KEY, KEY, PROBS, PROBS, key])


def test_attention_dropout_zeroes_probabilities_with_one_mask():
    q, k, _ = draw(S, N, M)
    ones = jnp.ones_like(k)
    # the sum of a row's dropped probabilities
    kept_share = compiled(lambda key: attention.dot(q, k, ones, jax.random.key(key), 0.5)[..., 0])
    assert float(jnp.abs(kept_share(0) - 1).max()) > 0.5
    np.testing.assert_array_equal(kept_share(0), kept_share(0))
    np.testing.assert_allclose(kept_share(0).mean(), 1, atol=0.1)


@pytest.mark.parametrize(
    "policy",
    [
        "no remat",
        None,
        POLICIES.everything_saveable,
        POLICIES.dots_saveable,
        POLICIES.dots_with_no_batch_dims_saveable,
        NAMES("query", "key", "value", "attn_out", "attn_fused", "attn_lse", "attn_scores", "attn_probs"),
    ],
)
def test_blockwise_shows_no_policy_its_scores(policy):
    wrap = lambda fn: fn if policy == "no remat" else jax.checkpoint(fn, policy=policy)
    layer = wrap(fresh(blocks_of(BLOCK)))
    shapes = kept_shapes(layer, *draw(S, N, M))
    assert all(shape.count(S) <= 1 and BLOCK not in shape for _, shape in shapes)
    # linear in the sequence: twice the positions, twice the bytes
    assert kept_bytes(layer, *draw(2 * S, N, M)) == 2 * kept_bytes(layer, *draw(S, N, M))
    # nor is any array s × s while it runs, forward or backward
    gradient = jax.grad(lambda *qkv: layer(*qkv).sum(), (0, 1, 2))
    for eqn, _ in equations(jax.make_jaxpr(gradient)(*draw(S, N, M)).jaxpr):
        assert all(getattr(var.aval, "shape", ()).count(S) <= 1 for var in eqn.outvars)


@pytest.mark.parametrize("s", [2, 5, 48])
def test_blockwise_makes_no_square_even_where_a_block_would_hold_the_sequence(s):
    n, m, d = 29, 29, 31  # no size alike
    gradient = jax.make_jaxpr(jax.grad(lambda *qkv: blocks_of(128)(*qkv).sum()))(*draw(s, n, m, d, b=1))
    for eqn, _ in equations(gradient.jaxpr):
        assert all(getattr(var.aval, "shape", ()).count(s) <= 1 for var in eqn.outvars)


# matmuls of the gradient, kept: forward 2, backward 5 of blockwise's own; a rerun of its forward adds 2
KERNEL = [
    ("none", 7, [QUERY, KEY, KEY, QUERY, LSE]),
    ("full", 9, []),
    ("fused and lse", 7, [QUERY, LSE]),
    ("both names and lse", 7, [QUERY, LSE]),
    ("attn_out alone", (8, 9), [QUERY]),  # for its log-sum-exp; JAX 0.12 drops the dead half of the loop, p times v
    ("dots", 9, []),
]
POLICY_OF = {
    "full": None,
    "fused and lse": NAMES("attn_fused", "attn_lse"),
    "both names and lse": NAMES("attn_out", "attn_fused", "attn_lse"),
    "attn_out alone": NAMES("attn_out"),
    "dots": POLICIES.dots_saveable,
}


def followed(fn, policy):
    """Something after the attention reads its output, as the projection does, so that its value is needed too."""
    body = fresh(lambda *qkv: tag(fn(*qkv) ** 3, "cube"))
    return body if policy == "none" else jax.checkpoint(body, policy=POLICY_OF[policy])


@pytest.mark.parametrize("policy, count, kept", KERNEL)
def test_blockwise_is_rerun_whole_or_not_at_all(policy, count, kept):
    layer = followed(blocks_of(BLOCK), policy)
    qkv = draw(S, N, M)
    assert gradient_matmuls(layer, *qkv)[0] in np.atleast_1d(count)
    # "none" also keeps the square and the cube's input, which JAX's own rule for ** asks for
    extra = [QUERY] if policy == "none" else []
    assert kept_shapes(layer, *qkv) == sorted(kept + extra)


def test_trip_counts_are_readable_and_give_the_flops_of_dot():
    qkv = draw(S, N, M)
    assert matmuls(blocks_of(BLOCK), *qkv)[1] == matmuls(dot, *qkv)[1] == 4 * 2 * S * S * N * D
    # 5 backward matmuls of the size of the forward's 2
    assert gradient_matmuls(blocks_of(BLOCK), *qkv)[1] == (2 + 5) * 2 * 2 * S * S * N * D


def cudnn_kernels(layer, *qkv):
    jaxpr = jax.make_jaxpr(jax.grad(lambda *qkv: layer(*qkv).astype(jnp.float32).sum(), (0, 1, 2)))(*qkv).jaxpr
    names = [eqn.primitive.name for eqn, _ in equations(jaxpr)]
    return names.count("dot_product_attention_fwd_wrapper"), names.count("dot_product_attention_bwd_wrapper")


BF16 = lambda shape: ("bfloat16", shape[1])
EMPTY = ("bfloat16", (0,))  # cuDNN's absent bias


@needs.CUDNN
@pytest.mark.parametrize(
    "policy, forwards, kept",
    [
        ("none", 1, [BF16(QUERY), BF16(KEY), BF16(KEY), BF16(QUERY), LSE, EMPTY]),
        ("full", 2, []),
        ("fused and lse", 1, [BF16(QUERY), LSE]),
        ("both names and lse", 1, [BF16(QUERY), LSE]),
        ("attn_out alone", 2, [BF16(QUERY)]),
        ("the primitive", 1, [BF16(QUERY), LSE]),
    ],
)
def test_cudnn_keeps_what_blockwise_keeps_under_the_same_names(policy, forwards, kept):
    by_primitive = lambda primitive, *_, **__: primitive.name == "dot_product_attention_fwd_wrapper"
    body = lambda *qkv: attention.cudnn(*(2 * x for x in qkv))
    chosen = by_primitive if policy == "the primitive" else POLICY_OF.get(policy)
    layer = body if policy == "none" else jax.checkpoint(body, policy=chosen)
    qkv = [x.astype(jnp.bfloat16) for x in draw(S, N, M, d=8)]
    wide = lambda shapes: sorted((t, tuple(8 if n == D else n for n in shape)) for t, shape in shapes)
    assert kept_shapes(layer, *qkv) == wide(kept)
    assert cudnn_kernels(layer, *qkv) == (forwards, 1)
