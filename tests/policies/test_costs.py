"""Every policy of the zoo against what JAX counts on the block of the model that trains: bytes kept, bytes in host
memory, matmul FLOPs run again.

A new policy is tested by being registered. The formulas that the table derives for it are evaluated at the sizes below
and compared, to the byte and the FLOP, with the block's own jaxprs.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Literal, jaxprs_in_params

import jremat
import policies
from jremat.estimator.block_cost import GPT, LLAMA, block_cost
from jremat.estimator.config import TransformerConfig
from jremat.estimator.decoder.stage import numbers_of
from jremat.policy import Policy
from models.transformer import Block
from policies.costs import cost as shown

BATCH, SEQ, HIDDEN, HEADS, HEAD_DIM, KEYS_AT_A_TIME = 2, 16, 32, 4, 8, 4
FAMILIES = {
    "gpt": {"kv_heads": 4, "mlp_hidden": 4 * HIDDEN},
    "llama": {
        "kv_heads": 2,
        "mlp_hidden": 88,
        "bias": False,
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "positions": "rope",
    },
}
CASES = [(family, attention) for family in FAMILIES for attention in ("dot", "blockwise")]
# Policies that name tensors which our models don't have.
ABSENT = {*(f"megatron:{module}" for module in ("moe", "moe_act", "shared_experts")), "praxis:save_unet_conv"}
ABSENT |= {"praxis:save_unet_all_conv", *(entry.spec for entry in policies.table() if entry.spec.startswith("bits:"))}
EXACT = [e for e in policies.table() if isinstance(e.policy, Policy) and e.spec not in ABSENT]
# Policies that speak of tensors that such an attention doesn't have.
REFUSED = {
    ("selective", "blockwise"): "which no value bears",
    ("megatron:core_attn", "blockwise"): "which no value bears",
    ("axlearn:flash_attention", "dot"): "matches nothing in this function",
}


@dataclass(frozen=True)
class Count:
    kept_bytes: int
    recomputed_flops: int
    host_bytes: int


@lru_cache
def config(family: str, attention: str) -> TransformerConfig:
    sizes = {"vocab_size": 64, "num_layers": 2, "hidden": HIDDEN, "heads": HEADS, "head_dim": HEAD_DIM, "max_seq": SEQ}
    return TransformerConfig(**sizes, **FAMILIES[family], attention=attention, attention_block=KEYS_AT_A_TIME)


@lru_cache
def counted(family: str, attention: str, policy: Policy | None, strict: bool) -> tuple[int, int, int]:
    """Bytes kept for the backward pass, bytes of them on the host, and matmul FLOPs of value and gradient."""
    block = Block(config(family, attention))
    x = jax.ShapeDtypeStruct((BATCH, SEQ, HIDDEN), jnp.float32)
    positions = jax.ShapeDtypeStruct((SEQ,), jnp.int32)
    params = jax.eval_shape(block.init, jax.random.key(0), x)

    def apply(params, x, positions):
        return block.apply(params, x, None, positions)

    if policy is not None:
        apply = jremat.checkpoint(apply, policy) if strict else jax.checkpoint(apply, policy=policy)

    def residuals(params, x, positions):
        return jax.tree.leaves(jax.vjp(lambda p, x: apply(p, x, positions), params, x)[1])

    def gradient(params, x, positions):
        return jax.grad(lambda p, x: jnp.square(apply(p, x, positions)).sum(), (0, 1))(params, x)

    jaxpr = jax.make_jaxpr(residuals)(params, x, positions).jaxpr
    parameters, handed_in = jaxpr.invars[: len(jax.tree.leaves(params))], jaxpr.invars[-1]
    kept = {v for v in jaxpr.outvars if not isinstance(v, Literal)} - {*parameters, handed_in}
    sizes = {v: v.aval.size * v.aval.dtype.itemsize for v in kept}
    on_host = sum(size for v, size in sizes.items() if "host" in str(v.aval.memory_space).lower())
    return sum(sizes.values()), on_host, matmul_flops(jax.make_jaxpr(gradient)(params, x, positions).jaxpr)


def matmul_flops(jaxpr) -> int:
    """Multiply-adds of every dot_general times two, a loop's body as often as it runs."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            lhs = eqn.invars[0].aval.shape
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[axis] for axis in contracted)
        else:
            total += turns(eqn) * sum(matmul_flops(inner) for inner in jaxprs_in_params(eqn.params))
    return total


def turns(eqn) -> int:
    if eqn.primitive.name == "scan":
        return eqn.params["length"]
    if eqn.primitive.name == "while":  # the blockwise attention's, over blocks of keys
        return SEQ // KEYS_AT_A_TIME
    return 1


def count(family: str, attention: str, policy: Policy, strict: bool = False) -> Count:
    kept, host, flops = counted(family, attention, policy, strict)
    return Count(kept, flops - counted(family, attention, None, False)[2], host)


@lru_cache
def promised(entry, family: str, attention: str) -> Count:
    kinds = replace({"gpt": GPT, "llama": LLAMA}[family], attention=attention, attention_block=KEYS_AT_A_TIME)
    cost = block_cost(replace(kinds, param_dtype="float32", compute_dtype="float32"), entry.policy)
    numbers = numbers_of(config(family, attention), BATCH, SEQ)
    return Count(*(x.at(numbers) for x in (cost.kept_bytes, cost.recompute_flops, cost.host_bytes)))


def cases_of(entry) -> list[tuple[str, str]]:
    return [case for case in CASES if (entry.spec, case[1]) not in REFUSED]


@pytest.mark.parametrize("entry", EXACT, ids=lambda entry: entry.spec)
def test_it_costs_what_its_row_says(entry):
    """As a plain JAX policy on some blocks, through jremat on the others; swapped for none it would not."""
    wanted = {case: promised(entry, *case) for case in cases_of(entry)}
    plain = () if entry.policy.strict_only else CASES[::3]
    found = {case: count(*case, entry.policy, strict=case not in plain) for case in wanted}
    if entry.policy.compresses:  # in letters a scale is counted for each row; heads of 8 share one with others
        assert all(abs(found[case].kept_bytes / wanted[case].kept_bytes - 1) < 0.2 for case in wanted)
        found = {case: replace(found[case], kept_bytes=wanted[case].kept_bytes) for case in wanted}
    assert found == wanted
    assert EXACT[0].spec == "none"
    assert (wanted == {case: promised(EXACT[0], *case) for case in wanted}) == entry.policy.keeps_everything


def test_what_the_table_prints_is_in_heads_and_widths():
    none, full = (next(entry for entry in EXACT if entry.spec == spec) for spec in ("none", "full"))
    assert shown(none, "gpt") == ("16·b·h·s + 16·b·s + 2·b·n·s² + 4·b·f·s", "0", "0")
    assert shown(full, "llama", "blockwise")[0] == "2·b·h·s"
    assert shown(next(e for e in policies.table() if e.spec == "megatron:moe"), "gpt") == ("–", "–", "–")
    assert shown(next(e for e in policies.table() if e.spec == "sqrt"), "gpt")[0].startswith("about")


@pytest.mark.parametrize(("spec", "attention"), REFUSED)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_without_effect_says_so(spec, attention, family):
    with pytest.raises(ValueError, match=REFUSED[spec, attention]):
        counted(family, attention, policies.get(spec), True)


@pytest.mark.parametrize("spec", ["megatron:moe", "megatron:moe_act", "megatron:shared_experts"])
def test_a_mixtures_policy_is_refused_by_a_block_without_experts(spec):
    with pytest.raises(ValueError, match=r"names .*'(moe_act|shared_up)'.*which no value bears"):
        counted("gpt", "dot", policies.get(spec), True)


@pytest.mark.parametrize("entry", [e for e in EXACT if e.policy.strict_only], ids=lambda entry: entry.spec)
def test_value_by_value_policies_refuse_the_plain_form(entry):
    with pytest.raises(
        ValueError, match=r"(decides value by value|compresses values).*jremat\.checkpoint\(f, policy\)"
    ):
        counted("gpt", "dot", entry.policy, False)


JAX = jax.checkpoint_policies


@pytest.mark.parametrize(
    ("spec", "theirs"),
    [
        ("none", JAX.everything_saveable),
        ("full", JAX.nothing_saveable),
        ("dots_saveable", JAX.dots_saveable),
        ("dots_with_no_batch_dims_saveable", JAX.dots_with_no_batch_dims_saveable),
        ("offload_dots_with_no_batch_dims", JAX.offload_dot_with_no_batch_dims("device", "pinned_host")),
        ("save:query,attn_out", JAX.save_only_these_names("query", "attn_out")),
    ],
)
def test_it_costs_what_jaxs_own_policy_of_that_name_does(spec, theirs):
    for case in CASES[::3]:
        assert count(*case, policies.get(spec)) == count(*case, theirs)


# Worked out by hand, in bytes: units of 4·b·s·h = 4096; scores 4·b·n·s² = 8192; statistics 16 or 8 a row of 32; the
# log-sum-exp 512.
BY_HAND = {
    "full": {("gpt", "dot"): 4096, ("llama", "dot"): 4096, ("gpt", "blockwise"): 4096},
    "none": {
        ("gpt", "dot"): 16 * 4096 + 8192 + 512,
        ("gpt", "blockwise"): 16 * 4096 + 512 + 512,
        ("llama", "dot"): 7 * 4096 + 3 * 11264 + 8192 + 256,  # k = h/2, so key and value are one unit; f = 88
    },
    "dots_saveable": {("gpt", "dot"): 10 * 4096 + 8192, ("llama", "dot"): 5 * 4096 + 2 * 11264 + 8192},
    "save_only_matmuls": {("gpt", "blockwise"): 10 * 4096 + 512},
    "torchtitan_selective_op": {("gpt", "dot"): 4 * 4096 + 8192, ("llama", "dot"): 3.5 * 4096 + 11264 + 8192},
    "torchtitan_selective_op_gpt": {("gpt", "dot"): 8 * 4096 + 8192},
    "megatron:layernorm,mlp": {("gpt", "dot"): 6 * 4096 + 8192 + 512},
    "maxtext:minimal": {("gpt", "dot"): 9 * 4096, ("llama", "dot"): 4 * 4096 + 2 * 11264},
}


@pytest.mark.parametrize("spec", BY_HAND)
def test_the_formulas_give_what_hand_and_jax_give(spec):
    policy = policies.get(spec)
    for case, expected in BY_HAND[spec].items():
        assert count(*case, policy, strict=True).kept_bytes == expected


def test_full_remat_of_a_llama_block_reruns_eight_of_nine_matmuls():
    everything = counted("llama", "dot", None, False)[2] // 3  # a gradient is twice the forward
    last = 2 * BATCH * SEQ * HIDDEN * 88
    assert count("llama", "dot", policies.get("full")).recomputed_flops == everything - last
