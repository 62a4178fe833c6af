"""Published config.json files, shortened to the fields that say something, and broken ones."""

import json

import pytest

from jremat.estimate.huggingface import from_huggingface, read
from models.config import get

GPT2 = {
    "model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "n_ctx": 1024,
    "vocab_size": 50257, "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05, "architectures": ["GPT2LMHeadModel"],
}  # fmt: skip
LLAMA3 = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "attention_bias": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
MISTRAL = LLAMA3 | {
    "model_type": "mistral", "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": 4096,
    "rope_theta": 10000.0,
}  # fmt: skip
QWEN2 = LLAMA3 | {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    "use_sliding_window": False, "sliding_window": 32768, "max_position_embeddings": 32768,
}  # fmt: skip
QWEN3 = LLAMA3 | {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128,
    "num_attention_heads": 16, "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip


@pytest.mark.parametrize(
    ("data", "params"),
    # The makers' own counts; Qwen3's without its norms of queries and keys, 2 x 128 a layer.
    [
        (GPT2, 124_439_808),
        (LLAMA3, 8_030_261_248),
        (MISTRAL, 7_241_732_096),
        (QWEN2, 494_032_768),
        (QWEN3, 596_049_920 - 28 * 2 * 128),
    ],
    ids=["gpt2", "llama", "mistral", "qwen2", "qwen3"],
)
def test_the_parameters_are_the_published_number(data, params):
    assert from_huggingface(data)[0].num_params() == params


def test_they_are_our_own_sizes():
    for data, name in ((GPT2, "gpt2"), (LLAMA3, "llama3-8b")):
        own = get(name).to_dict() | {"compute_dtype": "bfloat16"}
        assert from_huggingface(data)[0].to_dict() == own


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (GPT2, []),
        (LLAMA3, []),
        (QWEN2, []),
        (LLAMA3 | {"num_experts": 8}, ["'num_experts' is unknown and left out"]),
        (MISTRAL, ["sliding_window=4096: every score is counted"]),
        (QWEN3, ["qwen3 norms its queries and keys"]),
        (GPT2 | {"attn_pdrop": 0.0}, ["dropout: the rates differ"]),
        (GPT2 | {"activation_function": "relu"}, ["'relu' is counted as GELU"]),
        (LLAMA3 | {"attention_bias": True}, ["biases are counted on query, key and value alone"]),
    ],
)
def test_what_has_no_place_is_said(data, said):
    remarks = from_huggingface(data)[1]
    assert len(remarks) == len(said)
    assert all(part in remark for part, remark in zip(said, remarks, strict=True))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"model_type": "bert"}, "model_type: expected gpt2, llama, mistral, qwen2, qwen3, got 'bert'"),
        ({}, "model_type: expected .* got None"),
        (GPT2 | {"n_head": 0}, "n_head: expected a whole number of at least 1, got 0"),
        (GPT2 | {"n_head": 7}, "n_head: expected a divisor of n_embd=768, got 7"),
        ({k: v for k, v in LLAMA3.items() if k != "hidden_size"}, "hidden_size: expected .* got None"),
        (LLAMA3 | {"num_key_value_heads": 5}, "kv_heads: expected a divisor of heads=32, got 5"),
        (LLAMA3 | {"tie_word_embeddings": "yes"}, "tied_embeddings: expected True or False"),
    ],
)
def test_broken_ones_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        from_huggingface(data)


def test_files(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    assert read(path) == from_huggingface(GPT2)
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object"):
        read(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not JSON"):
        read(path)
    with pytest.raises(ValueError, match="cannot read"):
        read(tmp_path / "none.json")
