"""Formulas with numbers in their letters' place are what JAX keeps of the model that trains, to the byte."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policies
from jremat.estimator.block_cost import block_cost
from jremat.estimator.config import TransformerConfig
from jremat.estimator.decoder.stage import numbers_of
from jremat.estimator.transformer import estimate
from jremat.graph.letters import Polynomial
from jremat.policy import OFFLOAD, Policy
from tests.estimate.traced import block_residuals, stack_residuals

GPT = TransformerConfig(
    vocab_size=64, num_layers=7, hidden=32, heads=4, kv_heads=4, head_dim=8, mlp_hidden=128, max_seq=16,
    attention_block=4, compute_dtype="bfloat16",
)  # fmt: skip
LLAMA = replace(
    GPT, kv_heads=2, head_dim=6, mlp_hidden=88, norm="rmsnorm", mlp="swiglu", positions="rope", bias=False,
    tied_embeddings=False, compute_dtype="float32",
)  # fmt: skip
# Every policy once: many specs are names of one policy. A formula has a scale for each row of what is compressed, where
# a small row shares one with others: tests/policies/test_costs.py holds those to it more loosely.
ONE_BLOCK = tuple(
    {p: s for s in policies.names() if isinstance(p := policies.get(s), Policy) and not p.compresses}.values()
)
# Rules that no named policy has: a weak default that a family or a name is exempted from, statistics, keys, kernels.
RULES = (
    *("none;but_ops:pointwise", "none;but_ops:matmul", "none;but_ops:weight_matmul;offload:mlp_up", "but:norm_stats"),
    *("offload_all;save:query", "offload_all;but_ops:matmul", "but:attn_fused?,attn_lse?,mlp_act", "ops:random"),
    *("ops:norm_stats;save:attn_lse?", "but:block_in,attn_norm,query", "ops:pointwise", "save:block_in,attn_dropped?"),
    "ops:batched_matmul+attention;but:attn_out",
)


def formula(config: TransformerConfig, policy: Policy, batch: int, seq: int) -> tuple[int, int]:
    rows = [row for row in block_cost(config, policy).rows if row.kind == "kept"]
    numbers = numbers_of(config, batch, seq)
    size = lambda row: Polynomial.of(row.bytes).at(numbers)
    return sum(map(size, rows)), sum(size(row) for row in rows if row.decision is OFFLOAD)


def or_refused(count, *args):
    """The count, or that the policy matches nothing there."""
    try:
        return count(*args)
    except ValueError as error:
        assert "which no value bears" in str(error) or "matches nothing" in str(error)
        return "refused"


@pytest.mark.parametrize("family, attention", [(GPT, "dot"), (LLAMA, "blockwise")], ids=["gpt-dot", "llama-blockwise"])
def test_every_policy_of_one_block_keeps_the_traced_bytes(family, attention):
    """Dropout on, so that masks' keys are there too; off in the property test below."""
    config = replace(family, attention=attention, dropout=0.1)
    mine = {spec: or_refused(formula, config, policies.get(spec), 2, 16) for spec in (*ONE_BLOCK, *RULES)}
    traced = {spec: or_refused(block_residuals, config, policies.get(spec), 2, 16) for spec in (*ONE_BLOCK, *RULES)}
    assert mine == traced
    assert len(set(mine.values())) > 12  # policies do differ


@st.composite
def configs(draw):
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    return TransformerConfig(
        vocab_size=16,
        num_layers=2,
        hidden=draw(st.sampled_from([8, 20])),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4, 6])),
        mlp_hidden=draw(st.integers(1, 40)),
        max_seq=16,
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        mlp=draw(st.sampled_from(["gelu", "swiglu"])),
        positions=draw(st.sampled_from(["learned", "rope"])),
        bias=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.2])),
        attention=draw(st.sampled_from(["dot", "blockwise"])),
        attention_block=draw(st.integers(1, 4)),
        param_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        compute_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )


@settings(max_examples=30, deadline=None)
@given(configs(), st.sampled_from((*ONE_BLOCK, *RULES)), st.integers(1, 3), st.sampled_from([8, 12, 16]))
def test_any_block_keeps_the_traced_bytes(config, spec, batch, seq):
    policy = policies.get(spec)
    assert or_refused(formula, config, policy, batch, seq) == or_refused(block_residuals, config, policy, batch, seq)


PLANS = (
    *("every_k:3", "every_k:3,full", "every_k:10", "alternate:2", "torchtitan:3", "block:3", "revolve:2"),
    *("mix:2*save:attn_out,3*full,rest*none", "mix:4*every_k:2+offload:block_in,rest*full"),
    "mix:4*revolve:3,rest*dots_saveable",
)
UNIFORM = ("none", "full", "dots_saveable", "offload_dots", "offload_inputs", "but:attn_norm")
STACKS = [
    *((spec, "chain", GPT, "dot", 0.1) for spec in (*PLANS, "full", "none")),
    *((spec, "chain", LLAMA, "blockwise", 0.0) for spec in (*PLANS[::3], "offload_dots")),
    *((spec, "scan", replace(LLAMA, compute_dtype="bfloat16"), "blockwise", 0.1) for spec in UNIFORM),
    *((spec, "scan", GPT, "dot", 0.0) for spec in UNIFORM[:4]),
]


@pytest.mark.parametrize(("spec", "stack", "family", "attention", "dropout"), STACKS)
def test_the_layers_keep_what_those_of_the_model_keep(spec, stack, family, attention, dropout):
    config, policy = replace(family, attention=attention, dropout=dropout), policies.get(spec)
    ledger = estimate(config, policy, batch=2, seq=16, stack=stack)
    kept, on_host = stack_residuals(config, policy, 2, 16, stack)
    assert (ledger.kept_bytes, ledger.host_bytes) == (kept, on_host)


def test_a_block_by_hand():
    """In units of 2·b·s·h bytes: eight, the MLP's eight; scores, four statistics a token, bf16 copies of weights."""
    unit, weights = 2 * 2 * 16 * 32, 2 * 12 * 32 * 32
    by_hand = 8 * unit + 8 * unit + 2 * 2 * 4 * 16 * 16 + 4 * 4 * 2 * 16 + weights
    assert formula(GPT, policies.get("none"), 2, 16) == (by_hand, 0)
    assert formula(GPT, policies.get("full"), 2, 16) == (0, 0)
    assert formula(GPT, policies.get("offload_dots"), 2, 16)[1] == 9 * unit + 2 * 2 * 4 * 16 * 16


@pytest.mark.parametrize("spec", ["save:attn_outt", "megatron:moe_act", "axlearn:flash_attention"])
def test_a_policy_that_matches_nothing_is_refused(spec):
    with pytest.raises(ValueError, match=r"no value bears|matches nothing"):
        estimate(GPT, policies.get(spec), batch=2, seq=16)
