"""FLOPs by number: each primitive against its formula, and what remat does again, scan lengths multiplied."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jremat
from jremat.policy import Policy, tag

B, S, H, F = 2, 6, 8, 16
X, W = jnp.ones((B, S, H)), jnp.ones((H, F))
PRIMITIVES = {
    "weight matmul": (lambda x, w: x @ w, (X, W), 2 * B * S * H * F),
    "batched matmul": (lambda x: jnp.einsum("bsh,bth->bst", x, x), (X,), 2 * B * S * S * H),
    "outer product": (lambda x: jnp.outer(x, x), (jnp.ones(5),), 0),  # a pointwise product, no matmul
    "dot": (jnp.dot, (jnp.ones(7), jnp.ones(7)), 2 * 7),
    "conv": (
        lambda x, k: lax.conv_general_dilated(x, k, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")),
        (X, jnp.ones((3, H, F))),
        2 * B * (S - 2) * F * 3 * H,
    ),
    "grouped conv": (
        lambda x, k: lax.conv_general_dilated(
            x, k, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=H
        ),
        (X, jnp.ones((3, 1, H))),
        2 * B * (S - 2) * H * 3,
    ),
    "ragged": (lax.ragged_dot, (jnp.ones((10, H)), jnp.ones((3, H, F)), jnp.array([4, 5, 1])), 2 * 10 * H * F),
}


@pytest.mark.parametrize("name", PRIMITIVES)
def test_a_primitives_matmul_flops(name):
    f, args, expected = PRIMITIVES[name]
    assert jremat.flops(f, *args).model == jremat.trace(f, *args).matmul_flops == expected


def test_a_convolutions_gradient_costs_twice_its_forward():
    f, args, forward = PRIMITIVES["conv"]
    value_and_grad = jax.value_and_grad(lambda *args: f(*args).sum(), (0, 1))
    counted = jremat.flops(value_and_grad, *args)
    assert counted.count.total == 3 and counted.model >= 2 * forward


def loss(block, layers):
    def total(x, w1, w2):
        body = lambda x, ws: (block(x, *ws), None)
        return lax.scan(body, x, (jnp.stack([w1] * layers), jnp.stack([w2] * layers)))[0].sum()

    return jax.value_and_grad(total, (0, 1, 2))


def mlp(x, w1, w2):
    return jnp.sin(tag(x @ w1, "up")) @ w2


@pytest.mark.parametrize("layers", [1, 7])
def test_what_remat_does_again_is_multiplied_by_the_scans_length(layers):
    args = (X, W, jnp.ones((F, H)))
    one = 2 * B * S * H * F
    bare = jremat.flops(loss(mlp, layers), *args)
    full = jremat.flops(loss(jremat.checkpoint(mlp, jremat.FULL, prevent_cse=False), layers), *args)
    saved = jremat.flops(loss(jremat.checkpoint(mlp, Policy.save("up"), prevent_cse=False), layers), *args)
    assert (bare.model, bare.recompute) == (layers * 6 * one, 0)
    assert (full.model, full.recompute, full.count.recompute) == (layers * 6 * one, layers * one, layers)
    assert (saved.model, saved.recompute) == (layers * 6 * one, 0)
    assert full.other.recompute == saved.other.recompute == layers * 2 * B * S * F  # sin and cos again


def test_a_remat_inside_a_remat_runs_its_inside_once_more():
    args = (X, W, jnp.ones((F, H)))
    one = jax.checkpoint(lambda *args: jnp.sin(mlp(*args)))
    two = jax.checkpoint(lambda *args: jnp.sin(jax.checkpoint(mlp)(*args)))
    # sin needs both matmuls again; the inner remat then runs its first once more
    assert [jremat.flops(loss(f, 1), *args).count.recompute for f in (one, two)] == [2, 3]


def test_dead_code_is_not_counted():
    def f(x, w):
        _ = x @ w @ w.T
        return (x @ w).sum()

    assert jremat.flops(f, X, W).count.total == 1


def test_square_attention_is_told_from_other_batched_matmuls():
    attend = lambda x: jnp.einsum("bst,bth->bsh", jnp.einsum("bsh,bth->bst", x, x), x)
    counted = jremat.flops(attend, X)
    assert counted.square.model == counted.model == 4 * B * S * S * H
    assert counted.model_half == counted.model // 2
    experts = lambda x, w: jnp.einsum("esh,ehf->esf", x, w)
    assert jremat.flops(experts, jnp.ones((3, 5, H)), jnp.ones((3, H, F))).square.model == 0
