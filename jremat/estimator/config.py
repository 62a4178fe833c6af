"""The architecture of a decoder-only transformer as frozen data: what an estimate and a model are built from."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args

from jremat.policy.messages import near, shown
from jremat.policy.whole_number import whole_number

Norm = Literal["layernorm", "rmsnorm"]
Mlp = Literal["gelu", "swiglu"]
Positions = Literal["learned", "rope"]
Attention = Literal["dot", "blockwise", "cudnn"]
Dtype = Literal["float32", "bfloat16"]

MAX_SIZE = 2**31 - 1
"""Of anything that a model counts: XLA's dimensions are int32."""
MAX_LAYERS = 10_000
"""Of a stack; a plan over layers is counted layer by layer."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A decoder-only transformer of the GPT or the Llama family, or a cross of the two.

    Args:
        vocab_size: tokens in the vocabulary.
        num_layers: equal blocks in the stack.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads; divides ``heads`` (fewer is grouped-query attention).
        head_dim: width of one head; even under RoPE. ``heads * head_dim`` need not be ``hidden``.
        mlp_hidden: width inside the MLP.
        max_seq: longest sequence; the rows of a learned position table.
        norm: ``layernorm`` (mean and deviation) or ``rmsnorm``.
        mlp: ``gelu`` (two matmuls, tanh GELU) or ``swiglu`` (three, gated by SiLU).
        positions: ``learned`` (a table added to the embedding) or ``rope`` (rotary, on queries and keys).
        rope_theta: base of RoPE's wavelengths; read under ``rope`` only.
        bias: a bias on every projection and LayerNorm (RMSNorm has none).
        qkv_bias: a bias on query, key and value even where ``bias`` is False, as in Qwen2.
        tied_embeddings: the head reads the token embedding.
        dropout: rate in [0, 1) on the embedding, on both residual branches and, under ``dot`` attention only, on the
            attention's probabilities: the fused attentions have no dropout of their own.
        attention: ``dot`` materialises the scores; ``blockwise`` is an online softmax in plain JAX; ``cudnn`` is
            cuDNN's fused kernel, which computes in bfloat16 only.
        attention_block: keys that ``blockwise`` reads at a time; read there only.
        norm_eps: added to the variance.
        param_dtype: of the parameters; they are cast to ``compute_dtype`` where they are used.
        compute_dtype: of activations and matmuls; statistics are float32 whatever it says.

    Raises:
        ValueError: a field out of its range, or two that don't fit each other.

    >>> config = TransformerConfig(vocab_size=256, num_layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16,
    ...                            mlp_hidden=256, max_seq=128)
    >>> config.num_params()
    124672
    >>> TransformerConfig.from_dict(config.to_dict()) == config
    True
    """

    vocab_size: int
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_hidden: int
    max_seq: int
    norm: Norm = "layernorm"
    mlp: Mlp = "gelu"
    positions: Positions = "learned"
    rope_theta: float = 10_000.0
    bias: bool = True
    qkv_bias: bool = False
    tied_embeddings: bool = True
    dropout: float = 0.0
    attention: Attention = "dot"
    attention_block: int = 128
    norm_eps: float = 1e-5
    param_dtype: Dtype = "float32"
    compute_dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        for name in _COUNTS:
            whole_number(name, getattr(self, name), most=MAX_LAYERS if name == "num_layers" else MAX_SIZE)
        for name, choices in _CHOICES.items():
            _choice(name, getattr(self, name), choices)
        for name in ("bias", "qkv_bias", "tied_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, got {shown(getattr(self, name))}")
        for name in ("rope_theta", "norm_eps"):
            _real(name, getattr(self, name), "a positive number", lambda x: x > 0)
        _real("dropout", self.dropout, "a rate of at least 0 and below 1", lambda x: 0 <= x < 1)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads={self.heads}, got {self.kv_heads}")
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, since RoPE turns pairs, got {self.head_dim}")
        if self.attention == "cudnn" and self.compute_dtype != "bfloat16":
            raise ValueError(f"compute_dtype: expected 'bfloat16' with attention='cudnn', got {self.compute_dtype!r}")

    @property
    def group(self) -> int:
        """Query heads that share one key and value head."""
        return self.heads // self.kv_heads

    def num_params(self) -> int:
        """Parameters in the whole model, counted once where they are tied.

        >>> from dataclasses import replace
        >>> config = TransformerConfig(vocab_size=8, num_layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2,
        ...                            mlp_hidden=8, max_seq=4, norm="rmsnorm", mlp="swiglu", positions="rope",
        ...                            bias=False)
        >>> config.num_params(), replace(config, tied_embeddings=False).num_params()
        (188, 220)
        """
        tables = 1 if self.tied_embeddings else 2
        positions = self.max_seq * self.hidden if self.positions == "learned" else 0
        norm = self.hidden * self._norm_rows()
        return tables * self.vocab_size * self.hidden + positions + norm + self.num_layers * self.block_params()

    def block_params(self) -> int:
        """Parameters in one block.

        >>> TransformerConfig(vocab_size=8, num_layers=1, hidden=4, heads=2, kv_heads=2, head_dim=2, mlp_hidden=16,
        ...                   max_seq=4).block_params()
        244
        """
        h, f, d = self.hidden, self.mlp_hidden, self.head_dim
        qkv = (self.heads + 2 * self.kv_heads) * d
        wide = 2 if self.mlp == "swiglu" else 1
        kernels = h * qkv + self.heads * d * h + (wide + 1) * h * f
        biases = qkv * (self.bias or self.qkv_bias) + (h + wide * f + h) * self.bias
        return kernels + biases + 2 * h * self._norm_rows()

    def _norm_rows(self) -> int:
        return 2 if self.norm == "layernorm" and self.bias else 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The config that ``to_dict`` wrote.

        Raises:
            ValueError: a field that doesn't exist (with near names), one that is missing, or a value out of range.

        >>> TransformerConfig.from_dict({"hiden": 4})
        Traceback (most recent call last):
        ...
        ValueError: hiden: no such field of TransformerConfig; did you mean 'hidden' or 'mlp_hidden'?
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"data: expected the fields of a {cls.__name__} by name, got {shown(data)}")
        names = [field.name for field in fields(cls)]
        for name in data:
            if name not in names:
                raise ValueError(f"{name}: no such field of {cls.__name__}{near(str(name), names, most=3)}")
        missing = [name for name in _SIZES if name not in data]
        if missing:
            raise ValueError(f"{missing[0]}: {cls.__name__} needs it, and it is not in the data")
        return cls(**data)


_SIZES = ("vocab_size", "num_layers", "hidden", "heads", "kv_heads", "head_dim", "mlp_hidden", "max_seq")
_COUNTS = (*_SIZES, "attention_block")
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "norm": get_args(Norm),
    "mlp": get_args(Mlp),
    "positions": get_args(Positions),
    "attention": get_args(Attention),
    "param_dtype": get_args(Dtype),
    "compute_dtype": get_args(Dtype),
}


def _choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        listed = " or ".join(map(repr, choices))
        raise ValueError(f"{name}: expected {listed}, got {shown(value)}{near(str(value), choices)}")


def _real(name: str, value: object, expected: str, fits: Any) -> None:
    if not is_real(value) or not fits(value):
        raise ValueError(f"{name}: expected {expected}, got {shown(value)}")


def is_real(value: object) -> bool:
    """Whether ``value`` is a finite number that a float can hold; truths are none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False
