"""Architectures from a Hugging Face ``config.json`` of the GPT-2, Llama, Mistral and Qwen families.

Fields, their defaults and which of them may be null are those of ``transformers``' classes ``GPT2Config``,
``LlamaConfig``, ``MistralConfig``, ``Qwen2Config`` and ``Qwen3Config``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jremat.estimator.config import MAX_LAYERS, MAX_SIZE, TransformerConfig, is_real
from jremat.policy.files import read_json
from jremat.policy.messages import near, shown
from jremat.policy.whole_number import whole_number

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
"""The ``model_type``s that are read."""

# Fields that say nothing about memory: tokens, initialisation, storage, generation, versions.
_SILENT = frozenset({
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp", "task_specific_params",
    "summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "scale_attn_weights", "reorder_and_upcast_attn", "_name_or_path", "scale_attn_by_inverse_layer_idx",
    "id2label", "label2id", "attn_implementation",
})  # fmt: skip
_GPT2 = frozenset({
    "n_layer", "n_embd", "n_head", "n_inner", "n_positions", "n_ctx", "vocab_size", "activation_function",
    "resid_pdrop", "embd_pdrop", "attn_pdrop", "layer_norm_epsilon", "tie_word_embeddings",
})  # fmt: skip
_LLAMA = frozenset({
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "attention_dropout", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types", "rope_scaling", "rope_parameters",
})  # fmt: skip


def read(path: Path | str) -> tuple[TransformerConfig, tuple[str, ...]]:
    """The architecture in a ``config.json``, and what of the file has no place in it.

    Parameters are taken to train in float32 and activations in bfloat16, whatever dtype the weights are stored in.

    Args:
        path: of the file.

    Returns:
        The config, and one remark for each field that is unknown or that our block doesn't have.

    Raises:
        ValueError: no such file, no JSON object, a family that isn't read, a field that is missing, of another kind,
            out of range or at odds with another one. One line, which names the file and the field.
    """
    try:
        data = read_json(path)
    except ValueError as error:
        raise ValueError(f"config: {error}") from None
    try:
        return from_huggingface(data)
    except ValueError as error:
        raise ValueError(f"config: {path}: {str(error).removeprefix('config: ')}") from None


def from_huggingface(data: Mapping[str, Any]) -> tuple[TransformerConfig, tuple[str, ...]]:
    """The same from the file's content.

    Raises:
        ValueError: as of ``read``; the field is named.

    >>> config, remarks = from_huggingface({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12,
    ...                                     "n_positions": 1024, "vocab_size": 50257, "sparkle": 3})
    >>> config.num_params(), remarks
    (124439808, ("'sparkle' is unknown and left out",))
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"config: expected a JSON object, got {shown(data)}")
    family = data.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        hint = near(family, FAMILIES) if isinstance(family, str) else ""
        raise ValueError(f"config: model_type: expected {', '.join(FAMILIES)}, got {shown(family)}{hint}")
    known = _GPT2 if family == "gpt2" else _LLAMA
    remarks = [f"{shown(name)} is unknown and left out" for name in data if name not in known | _SILENT]
    fields = _Fields(data, "config: ")
    config = _gpt2(fields, remarks) if family == "gpt2" else _llama(fields, family, remarks)
    return config, tuple(remarks)


def _gpt2(fields: "_Fields", remarks: list[str]) -> TransformerConfig:
    hidden = fields.whole("n_embd", most=MAX_SIZE // 4)  # the MLP is four times as wide
    heads = fields.divisor("n_head", "n_embd", hidden)
    rates = {name: fields.rate(name, 0.1) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    if len(set(rates.values())) > 1:
        remarks.append(f"dropout: the rates differ ({', '.join(map(str, rates.values()))}); one is taken for all")
    activation = fields.text("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu", "gelu_pytorch_tanh"):
        remarks.append(f"activation_function: {shown(activation)} is counted as GELU")
    context = fields.whole("n_positions" if "n_positions" in fields.data else "n_ctx")
    if fields.whole("n_ctx", context) != context:
        remarks.append(f"n_ctx={fields.data['n_ctx']}: left out, since n_positions={context} is the table's size")
    return TransformerConfig(
        vocab_size=fields.whole("vocab_size"),
        num_layers=fields.whole("n_layer", most=MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        mlp_hidden=fields.whole_or_null("n_inner", 4 * hidden),
        max_seq=context,
        dropout=max(rates.values()),
        norm_eps=fields.positive("layer_norm_epsilon", 1e-5),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        compute_dtype="bfloat16",
    )


def _llama(fields: "_Fields", family: str, remarks: list[str]) -> TransformerConfig:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if fields.data.get("head_dim") is None:
        fields.divisor("num_attention_heads", "hidden_size", hidden)
    head_dim = fields.whole_or_null("head_dim", hidden // heads)
    if head_dim % 2:
        raise fields.wrong("head_dim", "an even number, since RoPE turns pairs", head_dim)
    kv_heads = fields.whole_or_null("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads={heads}", kv_heads)
    num_layers = fields.whole("num_hidden_layers", most=MAX_LAYERS)
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    if bias != mlp_bias and family != "qwen2":
        remarks.append(f"attention_bias={bias}, mlp_bias={mlp_bias}: biases are counted on query, key and value alone")
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        remarks.append(f"hidden_act: {shown(activation)} is counted as SiLU")
    if rate := fields.rate("attention_dropout", 0.0):
        remarks.append(f"attention_dropout={rate}: left out; dropout here is one rate everywhere")
    remarks += _windows(fields, num_layers)
    if family == "qwen3":
        remarks.append("qwen3 norms its queries and keys; these norms are left out")
    return TransformerConfig(
        vocab_size=fields.whole("vocab_size"),
        num_layers=num_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_hidden=fields.whole("intermediate_size"),
        max_seq=fields.whole("max_position_embeddings"),
        norm="rmsnorm",
        mlp="swiglu",
        positions="rope",
        rope_theta=_rope_theta(fields, remarks),
        bias=bias and mlp_bias,
        qkv_bias=family == "qwen2" or bias,
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        compute_dtype="bfloat16",
    )


def _windows(fields: "_Fields", num_layers: int) -> list[str]:
    """A remark where some layers attend to a window of the sequence only."""
    window = fields.whole_or_null("sliding_window", 0)
    used = fields.flag("use_sliding_window", True)
    fields.whole_or_null("max_window_layers", 0, least=0)
    layers = fields.data.get("layer_types")
    if layers is not None:
        if not isinstance(layers, list) or not all(isinstance(layer, str) for layer in layers):
            raise fields.wrong("layer_types", "a list of strings or null", layers)
        if len(layers) != num_layers:
            raise fields.wrong("layer_types", f"a list of num_hidden_layers={num_layers} strings", layers)
    return [f"sliding_window={window}: every score is counted, as in full attention"] if window and used else []


def _rope_theta(fields: "_Fields", remarks: list[str]) -> float:
    """RoPE's base, which stands among the parameters of RoPE since transformers 5."""
    found = {"rope_theta": fields.positive("rope_theta", 10_000.0)} if "rope_theta" in fields.data else {}
    for name in ("rope_parameters", "rope_scaling"):
        parameters = fields.data.get(name)
        if parameters is None:
            continue
        if not isinstance(parameters, Mapping):
            raise fields.wrong(name, "an object or null", parameters)
        inner = _Fields(parameters, f"config: {name}.")
        kind = inner.text("rope_type", inner.text("type", "default"))
        if kind != "default":
            remarks.append(f"{name}: the scaling {shown(kind)} is left out; RoPE's wavelengths are unscaled here")
        if "rope_theta" in parameters:
            found[f"{name}.rope_theta"] = inner.positive("rope_theta", 10_000.0)
    if len(set(found.values())) > 1:
        (one, mine), (other, theirs) = list(found.items())[:2]
        raise ValueError(f"config: {other}: expected {one}={mine:g} there too, got {theirs:g}")
    return next(iter(found.values()), 10_000.0)


@dataclass(frozen=True)
class _Fields:
    """The fields of a JSON object, each read as the kind that it must be; ``prefix`` stands before its name."""

    data: Mapping[str, Any]
    prefix: str

    def wrong(self, name: str, expected: str, got: Any) -> ValueError:
        return ValueError(f"{self.prefix}{name}: expected {expected}, got {shown(got)}")

    def whole(self, name: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        return whole_number(f"{self.prefix}{name}", self.data.get(name, default), least, most)

    def whole_or_null(self, name: str, default: int, least: int = 1) -> int:
        return default if self.data.get(name) is None else self.whole(name, least=least)

    def divisor(self, name: str, of: str, value: int) -> int:
        found = self.whole(name)
        if value % found:
            raise self.wrong(name, f"a divisor of {of}={value}", found)
        return found

    def positive(self, name: str, default: float) -> float:
        found = self.data.get(name, default)
        if not is_real(found) or found <= 0:
            raise self.wrong(name, "a positive number", found)
        return found

    def rate(self, name: str, default: float) -> float:
        """A dropout rate."""
        found = self.data.get(name, default)
        if not is_real(found) or not 0 <= found < 1:
            raise self.wrong(name, "a rate of at least 0 and below 1", found)
        return found

    def flag(self, name: str, default: bool) -> bool:
        found = self.data.get(name, default)
        if not isinstance(found, bool):
            raise self.wrong(name, "true or false", found)
        return found

    def text(self, name: str, default: str) -> str:
        found = self.data.get(name, default)
        if not isinstance(found, str):
            raise self.wrong(name, "a string", found)
        return found
