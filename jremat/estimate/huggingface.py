"""Architectures from a Hugging Face ``config.json`` of the GPT-2, Llama, Mistral and Qwen families."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jremat.estimate.config import TransformerConfig
from jremat.policy.counts import whole_number

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
"""The ``model_type``s that are read."""

# Fields that say nothing about memory: tokens, initialisation, storage, generation, versions.
_SILENT = frozenset({
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp", "task_specific_params",
    "summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "scale_attn_weights", "reorder_and_upcast_attn", "_name_or_path", "scale_attn_by_inverse_layer_idx",
    "id2label", "label2id", "rope_scaling", "rope_parameters", "attn_implementation",
})  # fmt: skip
_GPT2 = frozenset({
    "n_layer", "n_embd", "n_head", "n_inner", "n_positions", "n_ctx", "vocab_size", "activation_function",
    "resid_pdrop", "embd_pdrop", "attn_pdrop", "layer_norm_epsilon", "tie_word_embeddings",
})  # fmt: skip
_LLAMA = frozenset({
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "attention_dropout", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types",
})  # fmt: skip


def read(path: Path | str) -> tuple[TransformerConfig, tuple[str, ...]]:
    """The architecture in a ``config.json``, and what of the file has no place in it.

    Parameters are taken to train in float32 and activations in bfloat16, whatever dtype the weights are stored in.

    Args:
        path: of the file.

    Returns:
        The config, and one remark for each field that is unknown or that our block doesn't have.

    Raises:
        ValueError: no such file, no JSON object, a family that isn't read, a field missing or out of range.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"config: {path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"config: expected a JSON object in {path}, got {type(data).__name__}")
    return from_huggingface(data)


def from_huggingface(data: Mapping[str, Any]) -> tuple[TransformerConfig, tuple[str, ...]]:
    """The same from the file's content.

    Raises:
        ValueError: a family or a size that can't be read; the key is named.

    >>> config, said = from_huggingface({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12,
    ...                                  "n_positions": 1024, "vocab_size": 50257, "sparkle": 3})
    >>> config.num_params(), said
    (124439808, ("'sparkle' is unknown and left out",))
    """
    family = data.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"config: model_type: expected {', '.join(FAMILIES)}, got {family!r}")
    known = _GPT2 if family == "gpt2" else _LLAMA
    remarks = [f"{name!r} is unknown and left out" for name in data if name not in known | _SILENT]
    config = _gpt2(data, remarks) if family == "gpt2" else _llama(data, family, remarks)
    return config, tuple(remarks)


def _gpt2(data: Mapping[str, Any], remarks: list[str]) -> TransformerConfig:
    hidden, heads = _whole(data, "n_embd"), _whole(data, "n_head")
    if hidden % heads:
        raise ValueError(f"config: n_head: expected a divisor of n_embd={hidden}, got {heads}")
    rates = {name: data.get(name, 0.1) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    if len(set(rates.values())) > 1:
        remarks.append(f"dropout: the rates differ ({', '.join(map(str, rates.values()))}); one is taken for all")
    activation = data.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu", "gelu_pytorch_tanh"):
        remarks.append(f"activation_function: {activation!r} is counted as GELU")
    return TransformerConfig(
        vocab_size=_whole(data, "vocab_size"),
        num_layers=_whole(data, "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        mlp_hidden=_whole(data, "n_inner") if data.get("n_inner") is not None else 4 * hidden,
        max_seq=_whole(data, "n_positions" if "n_positions" in data else "n_ctx"),
        dropout=max(rates.values()),
        norm_eps=data.get("layer_norm_epsilon", 1e-5),
        tied_embeddings=data.get("tie_word_embeddings", True),
        compute_dtype="bfloat16",
    )


def _llama(data: Mapping[str, Any], family: str, remarks: list[str]) -> TransformerConfig:
    hidden, heads = _whole(data, "hidden_size"), _whole(data, "num_attention_heads")
    if data.get("head_dim") is None and hidden % heads:
        raise ValueError(f"config: num_attention_heads: expected a divisor of hidden_size={hidden}, got {heads}")
    bias, mlp_bias = data.get("attention_bias", False), data.get("mlp_bias", False)
    if bias != mlp_bias and family != "qwen2":
        remarks.append(f"attention_bias={bias}, mlp_bias={mlp_bias}: biases are counted on query, key and value alone")
    if data.get("hidden_act", "silu") != "silu":
        remarks.append(f"hidden_act: {data['hidden_act']!r} is counted as SiLU")
    if data.get("attention_dropout"):
        remarks.append(f"attention_dropout={data['attention_dropout']}: left out; dropout here is one rate everywhere")
    if data.get("sliding_window") and data.get("use_sliding_window", True):
        remarks.append(f"sliding_window={data['sliding_window']}: every score is counted, as in full attention")
    if family == "qwen3":
        remarks.append("qwen3 norms its queries and keys; these norms are left out")
    return TransformerConfig(
        vocab_size=_whole(data, "vocab_size"),
        num_layers=_whole(data, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(data, "num_key_value_heads") if data.get("num_key_value_heads") is not None else heads,
        head_dim=_whole(data, "head_dim") if data.get("head_dim") is not None else hidden // heads,
        mlp_hidden=_whole(data, "intermediate_size"),
        max_seq=_whole(data, "max_position_embeddings"),
        norm="rmsnorm",
        mlp="swiglu",
        positions="rope",
        rope_theta=data.get("rope_theta", 10_000.0),
        bias=bool(bias and mlp_bias),
        qkv_bias=family == "qwen2" or bool(bias),
        norm_eps=data.get("rms_norm_eps", 1e-6),
        tied_embeddings=data.get("tie_word_embeddings", False),
        compute_dtype="bfloat16",
    )


def _whole(data: Mapping[str, Any], name: str) -> int:
    return whole_number(f"config: {name}", data.get(name))
