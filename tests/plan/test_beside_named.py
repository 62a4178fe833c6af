"""The whole planner beside named policies and budgets, compiled: never over, never slower than a named one there."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jremat
import policies
from jremat.estimator.hardware import chip
from jremat.measure import compiled_memory
from jremat.planner.read_block import read_block
from jremat.planner.roofline import Roofline
from jremat.planner.stack import Stack
from jremat.transform.groups import gradient_step
from models.config import get
from models.transformer import Carry, block_apply, init_params

L = 6
NAMED = ("full", "save:attn_out,mlp_up", "maxtext:minimal_with_context", "none")
H200 = chip("h200")


@pytest.mark.long
@pytest.mark.parametrize("size, attention", [("gpt2", "dot"), ("llama-1b", "blockwise")])
def test_at_no_more_peak_no_named_policy_is_faster_and_no_budget_is_broken(size, attention):
    config = replace(get(size), num_layers=L, attention=attention, dropout=0.0, compute_dtype="bfloat16")
    stacked = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))["blocks"]
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)
    x = jnp.zeros((4, 1024, config.hidden), jnp.bfloat16)
    carry = jax.eval_shape(lambda: Carry(x, jnp.int32(0), None, jnp.arange(1024)))
    block = block_apply(config)
    stack = Stack(read_block(block, layer, carry, cost=Roofline(H200), fetched=1), L, x.nbytes)

    def compiled_bytes(plan):
        step = gradient_step(jremat.stack(block, plan, num_layers=L))
        return compiled_memory(step, stacked, carry, target="h200", num_buffers=0).peak_bytes

    named = {policies.get(spec): compiled_bytes(policies.get(spec)) for spec in NAMED}
    faster = 0
    for limit in named.values():
        more = jremat.PlanOptions(margin=0, also=named)
        found = jremat.plan(block, layer, carry, num_layers=L, hbm_bytes=limit, target="h200", compiles=6, options=more)
        assert found.peak_bytes <= limit
        best_named = min(stack.choice(plan).recompute_seconds for plan, peak in named.items() if peak <= limit)
        assert found.recompute_seconds <= best_named * (1 + 1e-9)
        faster += found.recompute_seconds < best_named * (1 - 1e-6)
    assert faster >= len(named) / 2
