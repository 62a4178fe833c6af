"""Requests made policies: a share of the bytes, a share of the FLOPs, the best group."""

import jax
import jax.numpy as jnp
import pytest

import jremat
import policies
from jremat.planner.read_block import read_block
from jremat.planner.roofline import matmul_flops
from jremat.policy import NONE, LayerPlan
from tests.plan.blocks import ROWS, WIDE, mlp, mlp_args, routed, routed_args

LAYERS = 8


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_budget_keeps_that_share_of_the_bytes(share):
    w, x = mlp_args()
    policy = policies.get(f"budget:{share}").resolve(mlp, w, x, num_layers=LAYERS, target="cpu")
    most = read_block(mlp, w, x, cost=matmul_flops, fetched=1).outcome(NONE).kept_bytes
    kept = jremat.residuals(mlp, w, x, policy=policy).total_bytes
    assert kept <= share * most
    assert kept == (0 if share == 0 else kept)
    if share == 1:
        assert read_block(mlp, w, x, cost=matmul_flops, fetched=1).outcome(policy).recompute_flops == 0


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_overhead_recomputes_at_most_that_share_of_the_forward(share):
    w, x = mlp_args()
    policy = policies.get(f"overhead:{share}").resolve(mlp, w, x, num_layers=LAYERS, target="cpu")
    loss = lambda w, x: jremat.checkpoint(mlp, policy)(w, x).sum()
    counted = jremat.flops(jax.value_and_grad(loss, (0, 1)), w, x)
    assert counted.recompute <= share * counted.model / 3
    kept = jremat.residuals(mlp, w, x, policy=policy).total_bytes
    # The one matmul that a recompute needs is half of the forward: below that its output is kept, from there on not.
    assert kept == (4 * ROWS * WIDE if share < 0.5 else 0)


def test_sqrt_is_a_group_size_of_the_stack():
    plan = policies.get("sqrt").resolve(mlp, *mlp_args(), num_layers=LAYERS, target="cpu")
    assert isinstance(plan, LayerPlan) and plan.segments[0].group in (1, 2, 3, 4, 8)


@pytest.mark.parametrize("spec", ["overhead:0", "overhead:0.5", "budget:0", "budget:0.5"])
@pytest.mark.parametrize("block", ["no matmul", "a router"])
def test_requests_hold_where_nothing_or_something_must_be_kept(spec, block):
    f, args = (routed, routed_args()) if block == "a router" else (lambda w, x: jnp.sin(jnp.tanh(x)), mlp_args())
    policy = policies.get(spec).resolve(f, *args, num_layers=4, target="cpu")
    counted = jremat.flops(jax.value_and_grad(lambda w, x: jremat.checkpoint(f, policy)(w, x).sum(), (0, 1)), *args)
    if spec.startswith("overhead"):
        assert counted.recompute <= float(spec.partition(":")[2]) * counted.model / 3


def test_a_requests_options_are_its_own():
    with pytest.raises(ValueError, match=r"margin: no option of 'budget:0.5'; it takes keep, names_only"):
        policies.get("budget:0.5").resolve(mlp, *mlp_args(), num_layers=4, target="cpu", margin=0.1)
    with pytest.raises(ValueError, match="num_layers: expected a whole number of at least 1, got 0"):
        policies.get("budget:0.5").resolve(mlp, *mlp_args(), num_layers=0, target="cpu")
