"""The closed form's kept bytes are the traced program's, to the byte: one block, then whole losses under any plan."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policies
from jremat.estimate.block import block_of, bytes_of, sizes_of
from jremat.estimate.config import TransformerConfig
from jremat.estimate.kept import kept_by
from jremat.estimate.transformer import estimate
from jremat.policy import OFFLOAD, Policy
from tests.estimate.traced import block_residuals, loss_residuals

GPT = TransformerConfig(
    vocab_size=64, num_layers=7, hidden=32, heads=4, kv_heads=4, head_dim=8, mlp_hidden=128, max_seq=16,
    attention_block=4, compute_dtype="bfloat16",
)  # fmt: skip
LLAMA = replace(
    GPT, kv_heads=2, head_dim=6, mlp_hidden=88, norm="rmsnorm", mlp="swiglu", positions="rope", bias=False,
    tied_embeddings=False, compute_dtype="float32",
)  # fmt: skip
# Every policy once: many specs are names of one policy.
ONE_BLOCK = tuple({p: s for s in policies.names() if isinstance(p := policies.get(s), Policy)}.values())
# Rules that no named policy has: a weak default that a family or a name is exempted from, statistics, keys, kernels.
RULES = (
    *("none;but_ops:pointwise", "none;but_ops:matmul", "none;but_ops:weight_matmul;offload:mlp_up", "but:norm_stats"),
    *("offload_all;save:query", "offload_all;but_ops:matmul", "but:attn_fused?,attn_lse?,mlp_act", "ops:random"),
    *("ops:norm_stats;save:attn_lse?", "but:block_in,attn_norm,query", "ops:pointwise", "save:block_in,attn_dropped?"),
    "ops:batched_matmul+attention;but:attn_out",
)


def closed_form(config: TransformerConfig, policy: Policy, batch: int, seq: int) -> tuple[int, int]:
    sizes = sizes_of(config, batch, seq)
    rows = [(bytes_of(t.axes, t.dtype, config, sizes), d) for t, d in kept_by(block_of(config), policy).tensors]
    return sum(size for size, _ in rows), sum(size for size, d in rows if d is OFFLOAD)


def or_refused(count, *args):
    """The count, or that the policy matches nothing there."""
    try:
        return count(*args)
    except ValueError as error:
        assert "which no value bears" in str(error) or "matches nothing" in str(error)
        return "refused"


@pytest.mark.parametrize("attention", ["dot", "blockwise"])
@pytest.mark.parametrize("family", [GPT, LLAMA], ids=["gpt", "llama"])
def test_every_policy_of_one_block_keeps_the_traced_bytes(family, attention):
    """Dropout on, so that masks' keys are there too; off in the property test below."""
    config = replace(family, attention=attention, dropout=0.1)
    mine = {spec: or_refused(closed_form, config, policies.get(spec), 2, 16) for spec in (*ONE_BLOCK, *RULES)}
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
        attention_block=draw(st.integers(1, 8)),
        param_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        compute_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )


@settings(max_examples=60, deadline=None)
@given(configs(), st.sampled_from((*ONE_BLOCK, *RULES)), st.integers(1, 3), st.integers(2, 9))
def test_any_block_keeps_the_traced_bytes(config, spec, batch, seq):
    policy = policies.get(spec)
    assert or_refused(closed_form, config, policy, batch, seq) == or_refused(
        block_residuals, config, policy, batch, seq
    )


PLANS = (
    *("every_k:3", "every_k:3,full", "every_k:10", "alternate:2", "torchtitan:3", "block:3", "revolve:2"),
    *("mix:2*save:attn_out,3*full,rest*none", "mix:4*every_k:2+offload:block_in,rest*full"),
    "mix:4*revolve:3,rest*dots_saveable",
)
UNIFORM = ("none", "full", "dots_saveable", "offload_dots", "offload_inputs", "but:attn_norm")
LOSSES = [
    *((spec, "chain", GPT, "dot", 0.1, None) for spec in (*PLANS, "full", "none")),
    *((spec, "chain", LLAMA, "blockwise", 0.0, 5) for spec in (*PLANS[::3], "offload_dots")),
    *((spec, "scan", replace(LLAMA, compute_dtype="bfloat16"), "blockwise", 0.1, None) for spec in UNIFORM),
    *((spec, "scan", GPT, "dot", 0.0, 5) for spec in UNIFORM[:4]),
]


@pytest.mark.parametrize(("spec", "stack", "family", "attention", "dropout", "chunk"), LOSSES)
def test_a_whole_loss_keeps_the_traced_bytes(spec, stack, family, attention, dropout, chunk):
    config, policy = replace(family, attention=attention, dropout=dropout), policies.get(spec)
    ledger = estimate(config, policy, batch=2, seq=16, chunk=chunk, stack=stack)
    on_host = sum(line.total_bytes for line in ledger.lines if line.on_host)
    assert (ledger.residual_bytes, on_host) == loss_residuals(config, policy, 2, 16, chunk, stack)


def test_a_block_by_hand():
    """In units of 2·b·s·h bytes: eight, the MLP's eight; scores, four statistics a token, bf16 copies of weights."""
    unit, weights = 2 * 2 * 16 * 32, 2 * 12 * 32 * 32
    by_hand = 8 * unit + 8 * unit + 2 * 2 * 4 * 16 * 16 + 4 * 4 * 2 * 16 + weights
    assert closed_form(GPT, policies.get("none"), 2, 16) == (by_hand, 0)
    assert closed_form(GPT, policies.get("full"), 2, 16) == (0, 0)
    assert closed_form(GPT, policies.get("offload_dots"), 2, 16)[1] == 9 * unit + 2 * 2 * 4 * 16 * 16


@pytest.mark.parametrize("spec", ["save:attn_outt", "megatron:moe_act", "axlearn:flash_attention"])
def test_a_policy_that_matches_nothing_is_refused(spec):
    with pytest.raises(ValueError, match=r"no value bears|matches nothing"):
        kept_by(block_of(GPT), policies.get(spec))


def test_a_planned_policy_is_sent_to_the_trace():
    planned = Policy(values=(("3", policies.get("none").default),), fingerprint="0" * 16)
    with pytest.raises(ValueError, match=r"planned values.*jremat\.residuals"):
        kept_by(block_of(GPT), planned)
