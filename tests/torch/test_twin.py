"""The PyTorch twin against the Flax model: one loss, one gradient, one set of weights, one count of bytes."""

from dataclasses import replace

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")

from jremat.policy.names import VOCABULARY
from models.torch_twin import Transformer, shared_of
from models.torch_weights import from_flax, to_flax
from policies.torch_contexts import Call, calls_of
from scripts.compare.torch_kept import kept
from tests.models.families import FAMILIES, TARGETS, TOKENS, assert_same_gradients, value_and_grad
from tests.models.test_block_bytes import BIG, BIG_LLAMA, GPT_DOT, GPT_FUSED, B, H, S, U

CASES = [("gpt", "dot"), ("llama", "dot"), ("qwen", "blockwise")]


def tensor(array):
    return torch.tensor(np.asarray(array)).long()


@pytest.mark.parametrize("family, attention", CASES)
def test_loss_and_every_gradient_are_flaxs(family, attention, flax_params):
    config = replace(FAMILIES[family], attention=attention)
    params = flax_params(config)
    value, gradient = value_and_grad(config, params)
    twin = from_flax(config, params)
    loss = twin.mean_loss(tensor(TOKENS), tensor(TARGETS))
    loss.backward()
    assert abs(loss.item() - float(value)) <= 1e-5 * float(value)
    assert_same_gradients(to_flax(config, {name: p.grad for name, p in twin.named_parameters()}), gradient)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_go_there_and_back_exactly(family, dtype, flax_params):
    config = replace(FAMILIES[family], param_dtype=dtype)
    params = flax_params(config)
    twin = from_flax(config, params)
    assert {p.dtype for p in twin.parameters()} == {getattr(torch, dtype)}
    assert sum(p.numel() for p in twin.parameters()) == config.num_params()
    back = to_flax(config, dict(twin.named_parameters()))
    assert jax.tree.all(jax.tree.map(lambda b, p: b.shape == p.shape and (b == np.asarray(p)).all(), back, params))


def test_a_projection_is_not_its_transpose(flax_params):
    """With as many outputs as inputs a transposed kernel would fit too; the gradient test would then fail."""
    config = FAMILIES["gpt"]
    params = flax_params(config)
    kernel = np.asarray(params["blocks"]["query"]["kernel"])[1]  # [h, n, d]
    weight = from_flax(config, params).blocks[1].query.weight.detach().numpy()  # [n d, h]
    assert (weight[3, 5], weight[5, 3]) == (kernel[5, 1, 1], kernel[3, 2, 1])


def block_and_input(config):
    torch.manual_seed(0)
    twin = Transformer(config)
    return twin.layers(S), torch.randn(B, S, H, requires_grad=True)


@pytest.mark.parametrize("attention, values", [("dot", GPT_DOT), ("blockwise", GPT_FUSED)])
def test_a_gpt_stack_keeps_what_flaxs_does_to_the_byte(attention, values):
    layers, x = block_and_input(replace(BIG, attention=attention))

    def forward(tag):
        y = x + 0  # so that the stack's input is counted, as it is there
        for layer in layers:
            y = layer(y, tag=tag)
        return y

    assert sum(row.bytes for row in kept(forward)) == BIG.num_layers * 4 * values * U


def test_each_kept_tensor_bears_the_name_that_it_has_in_flax():
    layers, x = block_and_input(BIG)
    found = {row.name: row.bytes for row in kept(lambda tag: layers[0](x + 0, tag=tag))}
    unit = 4 * U
    assert found == {
        **dict.fromkeys(("block_in", "attn_norm", "query", "key", "value", "attn_out", "(add)", "mlp_norm"), unit),
        "attn_probs": 2 * unit,
        "mlp_up": 4 * unit,
        "mlp_act": 4 * unit,
        "norm_stats": 4 * B * S,
    }


@pytest.mark.parametrize("config", [BIG, BIG_LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("attention", ["dot", "blockwise"])
def test_every_tensor_of_the_vocabulary_has_its_call(config, attention):
    torch.manual_seed(0)
    config = replace(config, attention=attention, dropout=0.1, max_seq=8)
    x = torch.randn(1, 8, H, requires_grad=True)
    calls = calls_of(Transformer(config).layers(8)[0], x).makers
    absent = {"norm_stats", "router", "moe_act", "block_in"}
    absent |= set() if config.mlp == "swiglu" else {"mlp_gate"}
    absent |= {"attn_fused", "attn_lse"} if attention == "dot" else {"attn_scores", "attn_probs", "attn_dropped"}
    assert calls.keys() == VOCABULARY.keys() - absent
    matmul = "addmm" if config.bias else "mm"
    order = ["query", "key", "value", "attn_proj", *["mlp_gate"] * (config.mlp == "swiglu"), "mlp_up", "mlp_out"]
    assert [calls[name] for name in order] == [Call(matmul, i) for i in range(len(order))]
    if attention == "dot":
        assert (calls["attn_scores"], calls["attn_out"]) == (Call("bmm", 0), Call("bmm", 1))


def test_the_mask_and_the_angles_are_the_stacks_own():
    shared = shared_of(replace(BIG_LLAMA, attention="dot"), 4)
    assert shared.hidden_keys.tolist() == [[k > q for k in range(4)] for q in range(4)]
    assert shared.cos.shape == (4, 1, H // 4 // 2)
