"""Published config.json files, shortened to the fields that say something, and broken ones."""

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jremat.estimator.config import TransformerConfig
from jremat.estimator.huggingface import from_huggingface, read
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
        (LLAMA3 | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["the scaling 'llama3' is left out"]),
        (LLAMA3 | {"rope_scaling": {"type": "linear"}}, ["the scaling 'linear' is left out"]),
        (LLAMA3 | {"rope_scaling": None, "head_dim": None, "sliding_window": None}, []),
        (GPT2 | {"n_ctx": 512}, ["n_ctx=512: left out, since n_positions=1024"]),
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
        (
            LLAMA3 | {"num_key_value_heads": 5},
            "num_key_value_heads: expected a divisor of num_attention_heads=32, got 5",
        ),
        (LLAMA3 | {"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false, got 'yes'"),
    ],
)
def test_broken_ones_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        from_huggingface(data)


def test_a_context_of_one_name_and_ropes_base_in_either_place_are_read():
    assert from_huggingface({k: v for k, v in GPT2.items() if k != "n_positions"})[0].max_seq == 1024
    newer = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    newer |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    assert from_huggingface(newer) == from_huggingface(LLAMA3)


WRONG = (
    *([], [0.1], {}, {"a": 1}, "x", "", "12", "false", -1, -0.5, math.nan, math.inf, -math.inf, 1e999, 10**400, 0.5),
    *([[[[[[[[1]]]]]]]], "x" * 100_000, "two\nlines", "\ud800"),
)
"""Values that no count, rate, truth or name may have."""
NULLABLE = {"n_inner", "num_key_value_heads", "head_dim", "sliding_window", "max_window_layers", "layer_types",
            "rope_scaling", "rope_parameters"}  # fmt: skip
# Every field that is read, of both kinds of files, with the values of its own kind that WRONG has.
OWN_KIND = {
    **dict.fromkeys(("activation_function", "hidden_act"), (str,)),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"), (0.5,)),
    **dict.fromkeys(("rope_theta", "rms_norm_eps", "layer_norm_epsilon"), (0.5,)),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), (dict,)),
    **dict.fromkeys(("head_dim", "attention_bias", "mlp_bias", "use_sliding_window", "tie_word_embeddings"), ()),
    **dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"), ()),
    **dict.fromkeys(("intermediate_size", "vocab_size", "max_position_embeddings", "sliding_window"), ()),
    **dict.fromkeys(("max_window_layers", "layer_types"), ()),
    **dict.fromkeys(("n_layer", "n_embd", "n_head", "n_inner", "n_positions", "n_ctx"), ()),
}


def _of_own_kind(field: str, value: object) -> bool:
    return any(isinstance(value, kind) if isinstance(kind, type) else value == kind for kind in OWN_KIND[field])


@pytest.mark.parametrize("field", OWN_KIND)
def test_a_value_of_the_wrong_kind_is_one_line_that_names_the_file_and_the_field(field, tmp_path):
    good = GPT2 if field in GPT2 or field in ("n_inner", "n_ctx") else LLAMA3
    wrong = [value for value in (*WRONG, None) if not _of_own_kind(field, value)]
    for value in wrong:
        if value is None and field in NULLABLE:
            continue
        with pytest.raises(ValueError, match=f"^config: {field}: expected ") as found:
            from_huggingface(good | {field: value})
        assert "\n" not in str(found.value) and len(str(found.value)) < 300
        (tmp_path / "config.json").write_text(json.dumps(good | {field: value}))
        with pytest.raises(ValueError, match=r"^config: .*config\.json") as found:
            read(tmp_path / "config.json")
        assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (GPT2 | {"model_type": "gpt-2"}, "got 'gpt-2'; did you mean 'gpt2'"),
        (GPT2 | {"model_type": ["gpt2"]}, r"got \['gpt2'\]"),
        (GPT2 | {"n_layer": True}, "n_layer: expected a whole number of at least 1, got True"),
        (GPT2 | {"n_embd": 768.0}, "n_embd: expected a whole number of at least 1, got 768.0"),
        (GPT2 | {"n_layer": 10**9}, "n_layer: expected at most"),
        (GPT2 | {"vocab_size": 2**31}, "vocab_size: expected at most"),
        (GPT2 | {"resid_pdrop": 1}, "resid_pdrop: expected a rate"),
        (LLAMA3 | {"num_attention_heads": 30}, "num_attention_heads: expected a divisor of hidden_size=4096, got 30"),
        (LLAMA3 | {"head_dim": 127}, "head_dim: expected an even number"),
        (LLAMA3 | {"num_key_value_heads": 64}, "num_key_value_heads: expected a divisor"),
        (LLAMA3 | {"layer_types": ["full_attention"]}, "layer_types: expected a list of num_hidden_layers=32 strings"),
        (LLAMA3 | {"layer_types": [1] * 32}, "layer_types: expected a list of strings"),
        (LLAMA3 | {"rope_scaling": "linear"}, "rope_scaling: expected an object or null, got 'linear'"),
        (LLAMA3 | {"rope_scaling": {"rope_type": 3}}, "rope_scaling.rope_type: expected a string, got 3"),
        (LLAMA3 | {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.rope_theta: expected rope_theta=500000"),
        (LLAMA3 | {"rope_parameters": {"rope_theta": "x"}}, "rope_parameters.rope_theta: expected a positive number"),
    ],
)
def test_contradictions_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        from_huggingface(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(sorted({*GPT2, *LLAMA3, *OWN_KIND, "sparkle"}))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(good=st.sampled_from([GPT2, LLAMA3, QWEN3, {}]), changes=st.dictionaries(KEYS, JSON, max_size=4))
def test_any_object_is_a_config_or_a_value_error(good, changes):
    try:
        config, remarks = from_huggingface(good | changes)
    except ValueError as error:
        assert str(error).startswith("config: ") and "\n" not in str(error)
    else:
        assert isinstance(config, TransformerConfig) and config.num_params() > 0
        assert all("\n" not in remark for remark in remarks)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(seed=st.integers(0, 2**32), edits=st.integers(1, 6))
def test_a_file_with_some_bytes_changed_is_a_config_or_a_value_error(tmp_path_factory, seed, edits):
    raw, draw = bytearray(json.dumps(LLAMA3).encode()), random.Random(seed)
    for _ in range(edits):
        raw[draw.randrange(len(raw))] = draw.randrange(256)
    path = tmp_path_factory.getbasetemp() / "mutated.json"
    path.write_bytes(raw[: draw.choice([len(raw), draw.randrange(len(raw))])])
    try:
        assert isinstance(read(path)[0], TransformerConfig)
    except ValueError as error:
        assert str(path) in str(error) and "\n" not in str(error)


FILES = {
    "empty": (b"", "is not JSON"),
    "a brace": (b"{", "is not JSON"),
    "not UTF-8": (b"\xff\xfe", "is not JSON"),
    "UTF-16": (json.dumps(GPT2).encode("utf-16"), "is not JSON"),
    "zeros": (bytes(4096), "is not JSON"),
    "a list": (b"[]", "expected a JSON object"),
    "a string": (b'"gpt2"', "expected a JSON object"),
    "null": (b"null", "expected a JSON object"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "deep in a field": (b'{"model_type": ' + b'{"a":' * 50_000, "nested too deeply"),
    "a key twice": (b'{"model_type": "gpt2", "model_type": "llama"}', "got 'model_type' twice"),
    "NaN": (json.dumps(GPT2 | {"resid_pdrop": math.nan}).encode(), "expected a number, got NaN"),
    "many digits": (b'{"model_type": "gpt2", "n_layer": ' + b"9" * 10_000 + b"}", "is not JSON"),
}


@pytest.mark.parametrize("case", FILES)
def test_what_is_no_config_file_is_one_line(case, tmp_path):
    content, message = FILES[case]
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^config: .*config.json.*{message}") as found:
        read(path)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", [".", "none.json", "config.json/below", "a\0b", "x" * 5000])
def test_what_is_no_file_is_one_line(name, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^config: cannot read "):
        read(tmp_path / name)


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2), encoding="utf-8-sig")  # with a byte order mark
    assert read(path) == from_huggingface(GPT2)
    monkeypatch.setattr("jremat.policy.files.MAX_BYTES", 100)
    with pytest.raises(ValueError, match="expected at most"):
        read(path)
