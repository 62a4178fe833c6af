"""The same transformer in PyTorch: one config class, the same values; ``models/torch_weights.py`` carries the weights.

Written as PyTorch users write it (``F.linear``, ``F.layer_norm``, ``F.scaled_dot_product_attention``), so that what it
keeps for the backward pass is what PyTorch keeps. Shapes: b batch, s sequence, h hidden, n heads, m key and value
heads, g = n / m, d head width, f MLP width, v vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jremat.estimator.config import TransformerConfig

Tag = Callable[[str, Tensor], Tensor]
Region = Callable[..., Tensor]
Layer = Callable[..., Tensor]
"""One layer: ``layer(x, tag=…, region=…)``, x [b, s, h] to the same; see ``Block``."""


def untagged(name: str, x: Tensor) -> Tensor:
    """A tag that does nothing."""
    return x


def as_it_is(name: str, fn: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """A part of a block, run."""
    return fn(*args)


@dataclass(frozen=True)
class Shared:
    """What every layer reads and none differentiates.

    Args:
        hidden_keys: bool [s, s], True where a query must not see a key; None where the kernel masks.
        cos, sin: [s, 1, d / 2] of RoPE's angles, or None.
    """

    hidden_keys: Tensor | None
    cos: Tensor | None
    sin: Tensor | None


class Norm(nn.Module):
    """LayerNorm or RMSNorm, as the config says."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.scale = nn.Parameter(torch.ones(config.hidden, dtype=_dtype(config.param_dtype)))
        with_bias = config.bias and config.norm == "layernorm"
        self.bias = nn.Parameter(torch.zeros_like(self.scale)) if with_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to the same."""
        scale = self.scale.to(x.dtype)
        if self.config.norm == "rmsnorm":
            return F.rms_norm(x, scale.shape, scale, self.config.norm_eps)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, scale.shape, scale, bias, self.config.norm_eps)


class Projection(nn.Linear):
    """A linear layer whose parameters are cast to the dtype of x."""

    def forward(self, x: Tensor) -> Tensor:
        """[…, inputs] to […, outputs]."""
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Block(nn.Module):
    """One layer: attention, then the MLP, each behind a norm and added to the residual stream.

    Without checkpointing a block of the GPT family keeps, to the byte, what its Flax twin keeps.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        c = self.config = config
        heads, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        make = lambda inputs, outputs, bias: Projection(inputs, outputs, bias, dtype=_dtype(c.param_dtype))
        self.attn_norm = Norm(c)
        self.query = make(c.hidden, heads, c.bias or c.qkv_bias)
        self.key = make(c.hidden, kv, c.bias or c.qkv_bias)
        self.value = make(c.hidden, kv, c.bias or c.qkv_bias)
        self.attn_proj = make(heads, c.hidden, c.bias)
        self.mlp_norm = Norm(c)
        if c.mlp == "swiglu":
            self.mlp_gate = make(c.hidden, c.mlp_hidden, c.bias)
        self.mlp_up = make(c.hidden, c.mlp_hidden, c.bias)
        self.mlp_out = make(c.mlp_hidden, c.hidden, c.bias)

    def forward(self, x: Tensor, shared: Shared, *, tag: Tag = untagged, region: Region = as_it_is) -> Tensor:
        """One layer on the residual stream.

        Args:
            x: [b, s, h].
            shared: what every layer reads.
            tag: given each tensor of ``jremat.policy.names.VOCABULARY`` where its op makes it; returns it.
            region: runs a part, ``region(name, fn, *args)``: ``core_attn`` (query, key, value to the context) and
                ``mlp`` (the norm's output to the down projection's).

        Returns:
            [b, s, h].
        """
        x = tag("block_in", x)
        x = x + self._dropped(self._attention(x, shared, tag, region))
        y = tag("mlp_norm", self.mlp_norm(x))
        return x + self._dropped(region("mlp", partial(self._mlp, tag=tag), y))

    def _attention(self, x: Tensor, shared: Shared, tag: Tag, region: Region) -> Tensor:
        c = self.config
        x = tag("attn_norm", self.attn_norm(x))
        split = lambda t, heads: t.view(*t.shape[:2], heads, c.head_dim)
        query = split(tag("query", self.query(x)), c.heads)  # [b, s, n, d]
        key = split(tag("key", self.key(x)), c.kv_heads)  # [b, s, m, d]
        value = split(tag("value", self.value(x)), c.kv_heads)
        if shared.cos is not None:
            query = tag("query", _turned(query, shared))
            key = tag("key", _turned(key, shared))
        attend = self._dot if c.attention == "dot" else self._fused
        out = region("core_attn", partial(attend, hidden_keys=shared.hidden_keys, tag=tag), query, key, value)
        return tag("attn_proj", self.attn_proj(out.flatten(2)))

    def _dot(self, query: Tensor, key: Tensor, value: Tensor, hidden_keys: Tensor | None, tag: Tag) -> Tensor:
        """Attention that materialises its scores."""
        assert hidden_keys is not None
        (b, s, n, d), m = query.shape, key.shape[2]
        q = query.view(b, s, m, n // m, d).permute(0, 2, 3, 1, 4).reshape(b * m, -1, d)  # [b m, g s, d]
        k, v = (t.transpose(1, 2).reshape(b * m, s, d) for t in (key, value))
        scores = tag("attn_scores", torch.bmm(q, k.transpose(1, 2))).view(b, n, s, s)
        scores = (scores * (1 / math.sqrt(d))).masked_fill(hidden_keys, -math.inf)
        probs = tag("attn_probs", scores.softmax(-1))
        if self.config.dropout and self.training:
            probs = tag("attn_dropped", self._dropped(probs))
        out = tag("attn_out", torch.bmm(probs.view(b * m, -1, s), v))  # [b m, g s, d]
        return out.view(b, n, s, d).transpose(1, 2).reshape(b, s, n, d)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, hidden_keys: Tensor | None, tag: Tag) -> Tensor:
        """PyTorch's fused attention; which kernel it is depends on the device."""
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.config.group > 1)
        for name in ("attn_out", "attn_fused", "attn_lse"):  # one op makes the output and its log-sum-exp
            tag(name, out)
        return out.transpose(1, 2)

    def _mlp(self, x: Tensor, tag: Tag) -> Tensor:
        if self.config.mlp == "swiglu":
            act = F.silu(tag("mlp_gate", self.mlp_gate(x))) * tag("mlp_up", self.mlp_up(x))
        else:
            act = F.gelu(tag("mlp_up", self.mlp_up(x)), approximate="tanh")
        return tag("mlp_out", self.mlp_out(tag("mlp_act", act)))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x


def one_by_one(layers: Sequence[Layer], x: Tensor) -> Tensor:
    """The stack without checkpointing."""
    for layer in layers:
        x = layer(x)
    return x


Run = Callable[[Sequence[Layer], Tensor], Tensor]
"""How a stack is run: ``run(layers, x)``."""


class Transformer(nn.Module):
    """The model: embedding, L blocks, norm, head; parameters as in the Flax model, a module a layer.

    Args:
        config: sizes and kinds; ``attention``: ``dot`` is written out, any other is PyTorch's fused attention.

    >>> from dataclasses import replace
    >>> from models.config import get
    >>> model = Transformer(replace(get("tiny"), num_layers=2, dropout=0.0))
    >>> model(torch.zeros(1, 8, dtype=torch.long)).shape
    torch.Size([1, 8, 256])
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        c = self.config = config
        table = lambda rows: nn.Parameter(0.02 * torch.randn(rows, c.hidden).to(_dtype(c.param_dtype)))
        self.token_embedding = table(c.vocab_size)
        if c.positions == "learned":
            self.position_embedding = table(c.max_seq)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.final_norm = Norm(c)
        if not c.tied_embeddings:
            self.head = table(c.vocab_size)

    def forward(self, tokens: Tensor, run: Run = one_by_one) -> Tensor:
        """Logits [b, s, v] of int tokens [b, s]; ``run`` runs the stack, e.g. under a policy."""
        x = self.final_norm(run(self.layers(tokens.shape[1]), self.embed(tokens)))
        head = self.token_embedding if self.config.tied_embeddings else self.head
        return F.linear(x, head.to(x.dtype))

    def mean_loss(self, tokens: Tensor, targets: Tensor, run: Run = one_by_one) -> Tensor:
        """Mean cross-entropy of the targets, int [b, s], in nats."""
        return F.cross_entropy(self(tokens, run).flatten(0, 1).float(), targets.flatten())

    def layers(self, seq: int) -> list[Layer]:
        """The stack's layers for sequences of ``seq`` tokens."""
        shared = shared_of(self.config, seq, self.token_embedding.device)
        return [partial(block, shared=shared) for block in self.blocks]

    def embed(self, tokens: Tensor) -> Tensor:
        """What the first layer reads, [b, s, h]."""
        c, dtype = self.config, _dtype(self.config.compute_dtype)
        x = F.embedding(tokens, self.token_embedding).to(dtype)
        if c.positions == "learned":
            x = x + self.position_embedding[: tokens.shape[1]].to(dtype)
        return F.dropout(x, c.dropout, self.training) if c.dropout else x


def shared_of(config: TransformerConfig, seq: int, device: Any = "cpu") -> Shared:
    """The mask and RoPE's angles for ``seq`` positions."""
    mask = torch.ones(seq, seq, dtype=torch.bool, device=device).triu(1) if config.attention == "dot" else None
    if config.positions != "rope":
        return Shared(mask, None, None)
    half = config.head_dim // 2
    waves = config.rope_theta ** (-torch.arange(half, dtype=torch.float32, device=device) / half)  # [d / 2]
    angles = torch.arange(seq, dtype=torch.float32, device=device)[:, None, None] * waves  # [s, 1, d / 2]
    return Shared(mask, angles.cos(), angles.sin())


def _turned(x: Tensor, shared: Shared) -> Tensor:
    """RoPE on pairs (i, i + d/2), as Hugging Face's Llama; x [b, s, heads, d]."""
    assert shared.cos is not None and shared.sin is not None
    first, second = x.float().chunk(2, -1)
    turned = (first * shared.cos - second * shared.sin, second * shared.cos + first * shared.sin)
    return torch.cat(turned, -1).to(x.dtype)


def _dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
