"""Every policy on blocks of both families and both kinds of attention: bytes kept and matmuls rerun, as numbers.

The numbers are worked out by hand in units of s·b·h f32 values. h=64, s=32, b=2, 4 heads, so that one array of scores
[b, heads, s, s] is heads·s/h = 2 units, and a row's statistic [b, s] is 1/64. GPT: f=4h. Llama: 2 kv heads (key and
value half a unit each), f=3h.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

import jremat
import policies
from tests.transform.blocks import case
from tests.transform.jax_count import jax_kept_bytes

# spec: (kept units, matmuls rerun) for gpt/dot, gpt/blockwise, llama/dot, llama/blockwise.
#
# GPT's forward matmuls: q k v, scores, context, proj, up, down (8; down is dead in the backward).
# Llama's: q k v, scores, context, proj, gate, up, down (9). Blockwise runs scores and context once a block of 16 keys,
# so twice at s=32: a rerun of the kernel is 4 matmuls. Where its output is kept and only the log-sum-exp is wanted, the
# context's two are dead; JAX 0.12 finds that inside a while, 0.10 doesn't.
LSE_ALONE = 2 if jax.__version_info__ >= (0, 12) else 4
BY_HAND = {
    "full": [(0, 7), (0, 5 + 4), (0, 8), (0, 6 + 4)],
    # q k v proj up, and for dot scores and context; llama: gate and up, key and value halves
    "dots_saveable": [(3 + 1 + 4 + 2 + 1, 0), (3 + 1 + 4, 4), (2 + 1 + 6 + 2 + 1, 0), (2 + 1 + 6, 4)],
    "dots_with_no_batch_dims_saveable": [(3 + 1 + 4, 2), (3 + 1 + 4, 4), (2 + 1 + 6, 2), (2 + 1 + 6, 4)],
    # and the fused kernel's output and log-sum-exp [b, heads, s]: 4/64
    "save_only_matmuls": [(8, 2), (8 + 1 + 4 / 64, 0), (9, 2), (9 + 1 + 4 / 64, 0)],
    "save:attn_out": [(1, 6), (1, 5 + LSE_ALONE), (1, 7), (1, 6 + LSE_ALONE)],
    "save:query,key,value": [(3, 4), (3, 2 + 4), (2, 5), (2, 3 + 4)],
    "save:attn_fused?,attn_lse?,mlp_up": [(4, 6), (4 + 1 + 4 / 64, 4), (3, 7), (3 + 1 + 4 / 64, 5)],
    "offload:attn_out": [(1, 6), (1, 5 + LSE_ALONE), (1, 7), (1, 6 + LSE_ALONE)],
}
CASES = [("gpt", "dot"), ("gpt", "blockwise"), ("llama", "dot"), ("llama", "blockwise")]


def gradient(f, policy):
    rematted = jremat.checkpoint(f, policy)
    return jax.value_and_grad(lambda params, x: rematted(params, x).astype(jnp.float32).sum(), (0, 1))


@pytest.mark.parametrize("spec", BY_HAND)
@pytest.mark.parametrize("family, attention", CASES)
def test_bytes_kept_and_matmuls_rerun_are_those_worked_out_by_hand(spec, family, attention):
    block = case(family, attention)
    units, reruns = BY_HAND[spec][CASES.index((family, attention))]
    policy = policies.get(spec)
    kept = jremat.residuals(block.function(), *block.args(), policy=policy)
    assert kept.total_bytes / block.unit_bytes == units
    assert kept.host_bytes == (kept.total_bytes if spec.startswith("offload") else 0)
    assert jremat.flops(gradient(block.function(), policy), *block.args()).count.recompute == reruns


@functools.cache
def bare_gradients(family, attention):
    block = case(family, attention)
    return jax.jit(gradient(block.function(), jremat.NONE))(*block.args())


def one_block_specs():
    return [name for name in policies.names() if isinstance(policies.get(name), jremat.Policy)]


@pytest.mark.parametrize("spec", sorted({*one_block_specs(), *BY_HAND, "but:mlp_act", "but:attn_norm,mlp_norm"}))
@pytest.mark.parametrize("family, attention", CASES)
def test_bytes_kept_are_jaxs_own_count(spec, family, attention):
    block, policy = case(family, attention), policies.get(spec)
    f, args = block.function(), block.args()
    try:
        kept = jremat.residuals(f, *args, policy=policy)
    except ValueError as error:  # a policy that speaks of what this block hasn't got must say so
        assert "no value bears" in str(error) or "matches nothing" in str(error)
        return
    assert kept.total_bytes == jax_kept_bytes(jremat.checkpoint(f, policy), *args)
    if not policy.strict_only:  # strict and plain keep the same: no matmul of our kernels is seen by either
        assert kept.total_bytes == jax_kept_bytes(jax.checkpoint(f, policy=policy), *args)


@pytest.mark.parametrize("family, attention", CASES)
def test_what_a_policy_leaves_out_it_does_not_keep_in_another_place(family, attention):
    block = case(family, attention)
    f, args = block.function(), block.args()
    everything = jremat.residuals(f, *args).total_bytes / block.unit_bytes
    f_units = 4 if family == "gpt" else 3
    for names, units in (("mlp_act", f_units), ("attn_norm,mlp_norm", 2)):
        kept = jremat.residuals(f, *args, policy=policies.get(f"but:{names}")).total_bytes / block.unit_bytes
        assert everything - kept == units
    if attention == "dot":
        core = policies.get("but:attn_scores,attn_probs,attn_dropped?")
        kept = jremat.residuals(f, *args, policy=core).total_bytes / block.unit_bytes
        assert everything - kept == (
            4 if family == "gpt" else 2
        )  # the probabilities, and with dropout the dropped ones
        assert jremat.flops(gradient(f, core), *args).count.recompute == 1  # the scores


@pytest.mark.parametrize("spec", ["full", "dots_saveable", "save:attn_out", "but:mlp_act"])
@pytest.mark.parametrize("family, attention", CASES)
def test_gradients_are_the_bare_blocks_with_dropout_on(spec, family, attention):
    block = case(family, attention)
    f, args = block.function(), block.args()
    rematted = jax.jit(gradient(f, policies.get(spec)))(*args)
    chex.assert_trees_all_close(bare_gradients(family, attention), rematted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["dot", "blockwise"])
def test_no_policy_keeps_scores_of_a_kernel_that_materialises_none(attention):
    block = case("llama", attention)
    square = [
        row
        for spec in one_block_specs()
        if not policies.get(spec).strict_only
        for row in jremat.residuals(jax.checkpoint(block.function(), policy=policies.get(spec)), *block.args()).kept
        if row.shape[-2:] in {(32, 32), (32, 16), (16, 32)} and len(row.shape) > 3
    ]
    assert bool(square) == (attention == "dot")


def test_forward_flops_of_a_gpt_block_are_the_textbooks():
    block = case("gpt", "dot")
    b, s, h = block.batch, block.seq, block.config.hidden
    graph = jremat.trace(block.function(), *block.args())
    assert graph.matmul_flops == 24 * b * s * h**2 + 4 * b * s**2 * h
    counted = jremat.flops(gradient(block.function(), jremat.NONE), *block.args())
    assert counted.model == 3 * graph.matmul_flops
    assert counted.model_half == 3 * (24 * b * s * h**2 + 2 * b * s**2 * h)


def test_a_fused_kernels_own_rerun_is_told_apart():
    block = case("gpt", "blockwise")
    b, s, h = block.batch, block.seq, block.config.hidden
    counted = jremat.flops(gradient(block.function(), jremat.NONE), *block.args())
    assert counted.model == 3 * (24 * b * s * h**2 + 4 * b * s**2 * h)
    assert counted.matmul.rerun == 2 * b * s**2 * h  # the scores, once more
    assert counted.recompute == 0
