"""A transformer block as a closed list of tensors: what each is made from, and which of them the backward pass reads.

The list mirrors ``models.transformer.Block`` value for value, so that what a policy keeps of it can be counted without
a trace; tests hold the two together, to the byte.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jremat.estimate.config import TransformerConfig

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "int32": 4, "bool": 1, "key": 8}
"""Bytes of one value; a random key is two words of 32 bits (JAX's default generator, threefry)."""

INPUT = "x"
"""The block's input, the residual stream [b, s, h]."""
CARRIED: Mapping[str, tuple[tuple[str, ...], str]] = {
    INPUT: (("b", "s", "h"), "compute"),
    "layer_key": ((), "key"),
    "carry_key": ((), "key"),
    "carry_layer": ((), "int32"),
    "positions": (("s",), "int32"),
}
"""What a block is handed beside its parameters: axes and dtype. The chain hands on the layer's number and shares the
stack's key, a scan hands on the layer's own key."""
SHARED = frozenset({"positions", "carry_key"})
"""What all layers read where it stands, so that it is kept once, not once a layer."""
PARAMETERS = "parameters"
_WORDS: Mapping[str, str] = {
    "middle": "middle of the stream",
    "attn_dropout_key": "dropout keys",
    "attn_branch_key": "dropout keys",
    "mlp_branch_key": "dropout keys",
    INPUT: "block input",
    "layer_key": "dropout keys",
    "carry_key": "dropout keys",
    "carry_layer": "layer number",
}


def word(key: str) -> str:
    """What tables call a value that a block is handed."""
    return _WORDS.get(key, key)


@dataclass(frozen=True)
class Tensor:
    """One value of a block.

    Args:
        id: unique in the block.
        axes: symbols of its shape: b batch, s sequence, h hidden, n query heads, m key and value heads, g = n / m,
            d head width, f MLP width, "1" one.
        dtype: ``compute`` (the config's compute dtype), ``float32``, ``int32`` or ``key``.
        needs: ids of what it is made from.
        primitive: of JAX, that makes it; ``name`` for a tag.
        tag: the name that it bears, of a ``name`` alone.
        batched: whether a ``dot_general`` has batch axes.
        contracted: symbols of the axes that a matmul sums over.
        inside: inside a kernel with a derivative of its own, where a policy can keep tagged values only.
    """

    id: str
    axes: tuple[str, ...]
    dtype: str
    needs: tuple[str, ...]
    primitive: str
    tag: str | None = None
    batched: bool = False
    contracted: tuple[str, ...] = ()
    inside: bool = False

    @property
    def label(self) -> str:
        """What tables call it: its tag, or what makes it."""
        return self.tag or _WORDS.get(self.id) or self.id.replace(".", " ")

    @property
    def params(self) -> Mapping[str, Any]:
        """What of the primitive's parameters a family looks at."""
        batch = ((0,), (0,)) if self.batched else ((), ())
        return {"name": self.tag, "dimension_numbers": (((), ()), batch)}


@dataclass(frozen=True)
class Block:
    """A block's tensors in program order.

    Args:
        tensors: by id.
        reads: ids of what the backward pass of its operations reads.
        inner_families: op families that appear inside kernels only, where nothing but a tag can be kept.
    """

    tensors: Mapping[str, Tensor]
    reads: frozenset[str]
    inner_families: frozenset[str]

    @property
    def tags(self) -> frozenset[str]:
        """Every name that a value bears."""
        return frozenset(t.tag for t in self.tensors.values() if t.tag)


def block_of(config: TransformerConfig, *, chain: bool = False) -> Block:
    """The tensors of one block.

    Args:
        config: sizes don't matter here, kinds do; dropout is on where its rate isn't 0.
        chain: whether the stack's executor hands on its carry, or a scan runs the block.

    >>> from dataclasses import replace
    >>> config = TransformerConfig(vocab_size=8, num_layers=1, hidden=4, heads=2, kv_heads=2, head_dim=2, mlp_hidden=16,
    ...                            max_seq=4)
    >>> sorted(block_of(config).tags - block_of(replace(config, attention="blockwise")).tags)
    ['attn_probs', 'attn_scores']
    """
    return _Writer(config).block(chain)


class _Writer:
    """Writes the list down, in the order of the model's code."""

    def __init__(self, config: TransformerConfig):
        self.config = config
        self.tensors: dict[str, Tensor] = {}
        self.reads: set[str] = set()

    def block(self, chain: bool) -> Block:
        c = self.config
        stream = ("b", "s", "h")
        keys = self._keys(chain) if c.dropout else ()
        x = self._tag("block_in", INPUT, stream)
        out = self._attention(x, keys)
        self._matmul("attn_proj", out, ("n", "d"), ("h",), c.bias)
        branch = self._dropped("attn_branch", self._tag_made("attn_proj", stream), keys[1:2])
        middle = self._add("middle", stream, (x, branch), "add")
        normed = self._norm("mlp_norm", middle)
        act = self._mlp(normed)
        self._matmul("mlp_out", act, ("f",), ("h",), c.bias)
        branch = self._dropped("mlp_branch", self._tag_made("mlp_out", stream), keys[2:3])
        self._add("block_out", stream, (middle, branch), "add")
        inner = {"pointwise", "reduction", "norm_stats"} | ({"random"} if keys else set())
        inner |= set() if c.attention == "dot" else {"batched_matmul", "matmul"}
        return Block(self.tensors, frozenset(self.reads), frozenset(inner))

    def _attention(self, x: str, keys: tuple[str, ...]) -> str:
        c = self.config
        normed = self._norm("attn_norm", x)
        made = {}
        for name, heads in (("query", "n"), ("key", "m"), ("value", "m")):
            made[name] = self._matmul(name, normed, ("h",), (heads, "d"), c.bias or c.qkv_bias)
        if c.positions == "rope":
            for name, heads in (("query", "n"), ("key", "m")):
                needs = (made[name], "positions")
                made[name] = self._add(f"{name}.turned", ("b", "s", heads, "d"), needs, "custom_vjp_call")
                self.reads.add("positions")
        grouped, kv = ("b", "s", "m", "g", "d"), ("b", "s", "m", "d")
        if c.attention == "dot":
            made["query"] = self._add("query.grouped", grouped, (made["query"],), "reshape")
        query = self._tag("query", made["query"], grouped)
        key, value = (self._tag(name, made[name], kv) for name in ("key", "value"))
        return self._dot(query, key, value, keys) if c.attention == "dot" else self._fused(query, key, value)

    def _dot(self, query: str, key: str, value: str, keys: tuple[str, ...]) -> str:
        square, heads = ("b", "m", "g", "s", "s"), ("b", "s", "n", "d")
        self._add("scores.dot", square, (query, key), "dot_general", batched=True, contracted=("d",))
        turned = self._add("scores.turned", square, ("scores.dot",), "transpose")
        scores = self._tag("attn_scores", turned, square)
        probs = self._tag("attn_probs", scores, square, inside=True)
        self.reads |= {query, key, value, probs}
        if keys:
            probs = self._tag("attn_dropped", self._dropped("probs.dropped", probs, keys[:1], square), square)
            self.reads.add(probs)
        self._add("context.dot", heads, (value, probs), "dot_general", batched=True, contracted=("s",))
        turned = self._add("context.turned", heads, ("context.dot",), "transpose")
        return self._tag("attn_out", self._add("context.reshaped", heads, (turned,), "reshape"), heads)

    def _fused(self, query: str, key: str, value: str) -> str:
        heads = ("b", "s", "n", "d")
        kernel = self._add("attn_kernel", heads, (query, key, value), "while", inside=True)
        out = self._tag("attn_fused", self._tag("attn_out", kernel, heads, inside=True), heads, inside=True)
        lse = self._tag("attn_lse", kernel, ("b", "n", "s"), dtype="float32", inside=True)
        self.reads |= {query, key, value, out, lse}
        return out

    def _mlp(self, x: str) -> str:
        wide = ("b", "s", "f")
        names = ("mlp_gate", "mlp_up") if self.config.mlp == "swiglu" else ("mlp_up",)
        for name in names:
            self._matmul(name, x, ("h",), ("f",), self.config.bias)
            self._tag_made(name, wide)
        self.reads |= set(names)
        return self._tag("mlp_act", self._add("activation", wide, names, "custom_vjp_call"), wide)

    def _norm(self, name: str, x: str) -> str:
        row: tuple[str, ...] = ("b", "s", "1")
        stats: tuple[str, ...] = ()
        for stat in ("mean", "rstd") if self.config.norm == "layernorm" else ("rstd",):
            stat_id = f"{name}.{stat}"
            self._put(Tensor(stat_id, row, "float32", (x, *stats), "name", tag="norm_stats", inside=True))
            stats = (*stats, stat_id)
        self.reads |= {x, *stats}
        normed = self._add(f"{name}.normed", ("b", "s", "h"), (x, *stats, PARAMETERS), "custom_vjp_call")
        return self._tag(name, normed, ("b", "s", "h"))

    def _matmul(self, name: str, x: str, inputs: tuple[str, ...], outputs: tuple[str, ...], bias: bool) -> str:
        """A projection; returns the id of its result, which the caller tags."""
        c = self.config
        kernel = PARAMETERS
        if c.param_dtype != c.compute_dtype:
            kernel = self._add(f"{name}.kernel", (*inputs, *outputs), (PARAMETERS,), "convert_element_type")
        self.reads |= {x, kernel}
        shape = ("b", "s", *outputs)
        made = self._add(f"{name}.dot", shape, (x, kernel), "dot_general", contracted=inputs)
        if not bias:
            return made
        row = PARAMETERS
        if c.param_dtype != c.compute_dtype:
            row = self._add(f"{name}.bias", outputs, (PARAMETERS,), "convert_element_type")
        row = self._add(f"{name}.bias_row", ("1", "1", *outputs), (row,), "broadcast_in_dim")
        return self._add(f"{name}.sum", shape, (made, row), "add")

    def _tag_made(self, name: str, axes: tuple[str, ...]) -> str:
        made = f"{name}.sum" if f"{name}.sum" in self.tensors else f"{name}.dot"
        return self._tag(name, made, axes)

    def _dropped(self, name: str, x: str, keys: tuple[str, ...], axes: tuple[str, ...] = ("b", "s", "h")) -> str:
        if not keys:
            return x
        self.reads.add(keys[0])
        return self._add(name, axes, (x, keys[0]), "custom_vjp_call")

    def _keys(self, chain: bool) -> tuple[str, ...]:
        if chain:
            self._put(Tensor("layer_key", (), "key", ("carry_key", "carry_layer"), "random_fold_in"))
        ids = ("attn_dropout_key", "attn_branch_key", "mlp_branch_key")
        for key in ids:
            self._put(Tensor(key, (), "key", ("layer_key",), "random_fold_in"))
        return ids

    def _tag(self, name: str, x: str, axes: tuple[str, ...], dtype: str = "compute", *, inside: bool = False) -> str:
        return self._put(Tensor(name, axes, dtype, (x,), "name", tag=name, inside=inside))

    def _add(self, key: str, axes: tuple[str, ...], needs: tuple[str, ...], primitive: str, **facts: Any) -> str:
        return self._put(Tensor(key, axes, "compute", needs, primitive, **facts))

    def _put(self, tensor: Tensor) -> str:
        assert tensor.id not in self.tensors, tensor.id
        self.tensors[tensor.id] = tensor
        return tensor.id


def sizes_of(config: TransformerConfig, batch: int, seq: int) -> Mapping[str, int]:
    """The value of every symbol."""
    c = config
    return {
        "b": batch, "s": seq, "h": c.hidden, "n": c.heads, "m": c.kv_heads, "g": c.group, "d": c.head_dim,
        "f": c.mlp_hidden, "v": c.vocab_size, "1": 1,
    }  # fmt: skip


def bytes_of(axes: Iterable[str], dtype: str, config: TransformerConfig, sizes: Mapping[str, int]) -> int:
    """Bytes of one array.

    >>> config = TransformerConfig(vocab_size=8, num_layers=1, hidden=4, heads=2, kv_heads=2, head_dim=2, mlp_hidden=16,
    ...                            max_seq=4, compute_dtype="bfloat16")
    >>> bytes_of(("b", "s", "h"), "compute", config, sizes_of(config, 3, 4))
    96
    """
    return math.prod(sizes[axis] for axis in axes) * item_bytes(dtype, config)


def item_bytes(dtype: str, config: TransformerConfig) -> int:
    """Bytes of one value; ``compute`` and ``param`` are the config's dtypes."""
    real = {"compute": config.compute_dtype, "param": config.param_dtype}.get(dtype, dtype)
    return ITEM_BYTES[real]
