"""What plans over layers are said to cost is what their programs do."""

from dataclasses import replace

import jax
import pytest

import jremat
import policies
from jremat.plan.program import read_block
from jremat.plan.roofline import matmul_flops
from jremat.plan.stack import Stack
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
