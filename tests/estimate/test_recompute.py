"""An estimate's recompute FLOPs are those of the model that trains: groups, schedules, and mixes of them."""

from dataclasses import replace

import pytest

import policies
from jremat.estimator.transformer import estimate
from tests.estimate.test_kept import GPT, LLAMA
from tests.estimate.traced import recompute_flops

GROUPS = (
    "every_k:2,save:attn_out",
    "every_k:3",
    "every_k:3,full",
    "every_k:3,dots_saveable",
    "every_k:7",
    "every_k:10",
)
SCHEDULES = ("revolve:1", "revolve:2", "revolve:3", "revolve:7", "revolve:20")
MIXES = (
    *("alternate:2", "mix:2*save:attn_out,3*full,rest*none", "mix:4*every_k:2+offload:block_in,rest*full"),
    *("mix:4*revolve:3,rest*dots_saveable", "full", "none"),
)
CASES = [
    *((spec, GPT, "dot", 0.0) for spec in (*GROUPS, *SCHEDULES, *MIXES)),
    # Not where attention's result is kept without its log-sum-exp: JAX 0.12 then drops half of the kernel's rerun.
    *((spec, LLAMA, "blockwise", 0.1) for spec in (*GROUPS[2:5], *SCHEDULES[1::2], *MIXES[2:4])),
]


def estimated(config, spec):
    return estimate(config, policies.get(spec), batch=2, seq=16, stack="chain").recompute_flops


@pytest.mark.parametrize(("spec", "family", "attention", "dropout"), CASES)
def test_a_plan_recomputes_what_the_program_does(spec, family, attention, dropout):
    config = replace(family, attention=attention, dropout=dropout)
    assert estimated(config, spec) == recompute_flops(config, policies.get(spec), 2, 16)


def test_a_group_and_a_schedule_by_hand():
    """Seven layers; a replay's last layer ends before its last matmul, whose result its backward pass doesn't read."""
    layer = 24 * 2 * 16 * GPT.hidden**2 + 4 * 2 * 16**2 * GPT.hidden
    cut_short = layer - 2 * 2 * 16 * GPT.hidden * GPT.mlp_hidden
    assert estimated(GPT, "every_k:7") == 6 * layer + cut_short
    assert estimated(GPT, "every_k:3") == 4 * layer + 3 * cut_short  # groups of 3, 3 and 1
    assert estimated(GPT, "revolve:7") == 7 * cut_short  # every layer's input is stored
