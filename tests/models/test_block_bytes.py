"""What a block keeps and reruns, against a count on paper, in values of [b, s, h] each."""

from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import models
from jremat.policy.names import VOCABULARY
from tests.models.counting import equations, gradient_matmuls, kept, kept_bytes, matmuls
from tests.models.families import GPT

POLICIES = jax.checkpoint_policies
B, S, H, N = 2, 128, 256, 4
U = B * S * H  # values
BIG = replace(
    GPT, hidden=H, heads=N, kv_heads=N, head_dim=H // N, mlp_hidden=4 * H, max_seq=S, attention_block=32, num_layers=4
)
BIG_LLAMA = replace(BIG, kv_heads=2, norm="rmsnorm", mlp="swiglu", positions="rope", bias=False)
NORM_STATS = 2 * 2 / H  # mean and reciprocal deviation, two norms
PROBS = N * S / H
# input, norm, query, key, value, probabilities, context, middle, norm, up and activation (4 each)
GPT_DOT = 1 + 1 + 3 + PROBS + 1 + 1 + 1 + 4 + 4 + NORM_STATS
GPT_FUSED = GPT_DOT - PROBS + N / H  # its log-sum-exp for the probabilities
# key and value of half the heads; gate, up and product; a reciprocal deviation alone; positions, int32 [s]
LLAMA_DOT = 1 + 1 + (1 + 0.5 + 0.5) + PROBS + 1 + 1 + 1 + 3 * 4 + 2 / H + S / U
LLAMA_FUSED = LLAMA_DOT - PROBS + N / H
COUNTS = {
    "gpt dot": (BIG, GPT_DOT),
    "gpt blockwise": (replace(BIG, attention="blockwise"), GPT_FUSED),
    "llama dot": (BIG_LLAMA, LLAMA_DOT),
    "llama blockwise": (replace(BIG_LLAMA, attention="blockwise"), LLAMA_FUSED),
}
by_count = pytest.mark.parametrize("case", COUNTS)


def block_of(config, remat=lambda block: block, key=None):
    block = remat(models.Block)(config)
    shapes = jax.eval_shape(models.Block(config).init, jax.random.key(0), jnp.zeros((1, 1, config.hidden)))["params"]
    x = jax.ShapeDtypeStruct((B, S, config.hidden), config.compute_dtype)
    return lambda params, x: block.apply({"params": params}, x, key), shapes, x


@by_count
def test_a_block_without_remat_keeps_what_the_count_says(case):
    config, values = COUNTS[case]
    assert kept_bytes(*block_of(config)) == 4 * values * U


@pytest.mark.parametrize("case, torch_values", [("gpt dot", 17.765625), ("gpt blockwise", 15.78125)])
def test_a_gpt_stack_keeps_what_pytorch_keeps(case, torch_values):
    """PyTorch 2.13.0, eager, explicit attention and SDPA, by storages: values a layer, the stack's input left out."""
    config, values = COUNTS[case]
    assert values - 1 / config.num_layers == torch_values


def test_dropout_adds_the_dropped_probabilities_and_three_keys():
    config = replace(BIG, dropout=0.1)
    assert kept_bytes(*block_of(config, key=jax.random.key(0))) == 4 * (GPT_DOT + PROBS) * U + 3 * 8
    fused = replace(config, attention="blockwise")
    assert kept_bytes(*block_of(fused, key=jax.random.key(0))) == 4 * GPT_FUSED * U + 2 * 8


def test_bfloat16_halves_all_but_the_statistics():
    apply, shapes, x = block_of(replace(BIG, compute_dtype="bfloat16"))
    weights = 2 * (12 * H * H)  # bfloat16 copies of the kernels; biases are not read again
    assert kept_bytes(apply, shapes, x) == 2 * (GPT_DOT - NORM_STATS) * U + 4 * NORM_STATS * U + weights


@by_count
def test_the_scanned_stack_keeps_a_blocks_bytes_a_layer_and_no_parameters(case):
    config, values = COUNTS[case]
    shapes = jax.eval_shape(partial(models.init_params, config), jax.random.key(0))
    tokens = jnp.zeros((B, S), jnp.int32)
    loss = lambda params: models.mean_loss(models.Transformer(config), params, tokens, tokens)
    stacked = [aval for aval in kept(loss, shapes) if aval.shape[:1] == (config.num_layers,)]
    once = S if config.positions == "rope" else 0  # positions are the stack's, not a layer's
    assert sum(aval.size * 4 for aval in stacked) == config.num_layers * 4 * (values * U - once)


@pytest.mark.parametrize("case", ["gpt dot", "gpt blockwise"])
def test_a_gpt_blocks_matmul_flops(case):
    apply, shapes, x = block_of(COUNTS[case][0])
    count, flops = matmuls(apply, shapes, x)
    assert (count, flops) == (8, 24 * B * S * H**2 + 4 * B * S**2 * H)


# matmuls of the gradient (forward, backward and what is rerun), and values kept, under JAX's own policies.
# GPT: 8 forward, 16 backward, one more in blockwise's backward; full reruns all but mlp_out, which nothing reads.
NAMES = POLICIES.save_only_these_names
TABLE = {
    ("gpt dot", "none"): (24, GPT_DOT),
    ("gpt dot", "full"): (24 + 7, 0),
    ("gpt dot", "dots"): (24, 3 + PROBS + 1 + 1 + 4),
    ("gpt dot", "no batch dims"): (24 + 2, 3 + 1 + 4),
    ("gpt dot", "block_in"): (24 + 7, 1),
    ("gpt blockwise", "none"): (25, GPT_FUSED),
    ("gpt blockwise", "full"): (25 + 7, 0),
    ("gpt blockwise", "dots"): (25 + 2, 3 + 1 + 4),
    ("gpt blockwise", "fused"): (25 + 5, 1 + N / H),
    ("llama dot", "none"): (27, LLAMA_DOT),
    ("llama dot", "full"): (27 + 8, 0),
    ("llama dot", "dots"): (27, 2 + PROBS + 1 + 1 + 8),
    ("llama dot", "no batch dims"): (27 + 2, 2 + 1 + 8),
    ("llama blockwise", "fused"): (28 + 6, 1 + N / H),
}
REMATS = {
    "none": lambda block: block,
    "full": nn.remat,
    "dots": partial(nn.remat, policy=POLICIES.dots_saveable),
    "no batch dims": partial(nn.remat, policy=POLICIES.dots_with_no_batch_dims_saveable),
    "block_in": partial(nn.remat, policy=NAMES("block_in")),
    "fused": partial(nn.remat, policy=NAMES("attn_fused", "attn_lse")),
}


@pytest.mark.parametrize("case, policy", TABLE)
def test_policies_of_jax_keep_and_rerun_what_the_table_says(case, policy):
    apply, shapes, x = block_of(COUNTS[case][0], REMATS[policy])
    count, values = TABLE[case, policy]
    assert gradient_matmuls(apply, shapes, x)[0] == count
    assert kept_bytes(apply, shapes, x) == 4 * values * U


def test_every_tensor_of_the_vocabulary_is_tagged():
    found = set()
    for config in (BIG, BIG_LLAMA):
        for attention in ("dot", "blockwise"):
            apply, shapes, x = block_of(replace(config, attention=attention, dropout=0.1), key=jax.random.key(0))
            gradient = jax.grad(lambda *args, apply=apply: apply(*args).sum())
            jaxpr = jax.make_jaxpr(gradient)(shapes, x).jaxpr
            found |= {eqn.params["name"] for eqn, _ in equations(jaxpr) if eqn.primitive.name == "name"}
    assert found == set(VOCABULARY) - {"router", "moe_act"}
