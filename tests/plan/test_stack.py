"""What plans over layers are said to cost is what their programs do."""

from dataclasses import replace

import jax
import pytest

import jremat
import policies
from jremat.planner.read_block import read_block
from jremat.planner.roofline import matmul_flops
from jremat.planner.stack import Stack
from jremat.transform.chain import stack
from jremat.transform.groups import gradient_step
from tests.plan.blocks import HIDDEN, ROWS, mlp, mlp_args

LAYERS = 8


def test_choices_are_the_costs_of_their_own_plans():
    """What a mix is said to cost when it is made is what the same plan costs when it is read."""
    block = read_block(mlp, *mlp_args(), cost=matmul_flops, fetched=1)
    whole = Stack(block, LAYERS, 4 * ROWS * HIDDEN)
    for choice in whole.choices():
        read = whole.choice(choice.plan)
        assert replace(read, recompute_seconds=choice.recompute_seconds) == choice
        assert read.recompute_seconds == pytest.approx(choice.recompute_seconds)


GROUPED = ("every_k:2", "every_k:3", "every_k:4,full", "revolve:2", "revolve:3", "block:3", "alternate:2", "full")


@pytest.mark.parametrize("spec", GROUPED)
def test_the_flops_of_groups_and_schedules_are_the_programs_own(spec):
    w, x = mlp_args()
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((LAYERS, *leaf.shape), leaf.dtype), w)
    plan = policies.get(spec)
    choice = Stack(read_block(mlp, w, x, cost=matmul_flops, fetched=1), LAYERS, 4 * ROWS * HIDDEN).choice(plan)
    counted = jremat.flops(gradient_step(stack(mlp, plan, num_layers=LAYERS)), stacked, x)
    assert choice.recompute_flops == counted.recompute


# 8-way FSDP runs 8 all-gathers a layer under every policy, under every_k:4,full 4 more for 12 of 16: chain.md.
# Two slots take 8 layers back in 3 * 8 - C(5, 3) = 14 steps, of which 7 are the sweep (Griewank and Walther 2000).
FETCHED = {"none": 0, "full": 0, "mix:2*full,6*none": 0, "every_k:4,full": 6, "every_k:3": 5, "revolve:2": 7}


@pytest.mark.parametrize("spec", FETCHED)
def test_replays_of_whole_layers_alone_wait_for_parameters(spec):
    block = read_block(mlp, *mlp_args(), cost=matmul_flops, fetched=1)
    alone, cut = (Stack(block, LAYERS, 4 * ROWS * HIDDEN, fetch) for fetch in (0.0, 1e9))
    plan = policies.get(spec)
    waited = cut.choice(plan).recompute_seconds - alone.choice(plan).recompute_seconds
    assert waited == pytest.approx(1e9 * FETCHED[spec])


def test_a_tail_recomputes_nothing_and_is_set_on_plans_of_single_layers():
    block = read_block(mlp, *mlp_args(), cost=matmul_flops, fetched=1)
    whole = Stack(block, LAYERS, 4 * ROWS * HIDDEN)
    assert whole.tailed() and Stack(block, 1, 0).tailed() == ()
    for choice in whole.tailed():
        assert block.outcome(choice.plan.policies(LAYERS)[-1]).recompute_flops == 0
        assert replace(whole.choice(choice.plan), recompute_seconds=0) == replace(choice, recompute_seconds=0)
    full = whole.choice(policies.get("full"))
    better = whole.with_tail(full)
    assert better.recompute_flops == full.recompute_flops * (LAYERS - 1) // LAYERS
    assert [p.spec for p in better.plan.policies(LAYERS)][:-1] == ["full"] * (LAYERS - 1)
    assert whole.with_tail(better) is None
    grouped = [whole.choice(policies.get(spec)) for spec in ("none", "every_k:2", "revolve:2", "alternate:2")]
    assert [whole.with_tail(choice) for choice in grouped] == [None] * 4
    half = whole.with_tail(whole.choice(policies.get("mix:7*none,1*full")))
    assert half.recompute_flops == 0 and half.plan.segments[0].repeats == 7
