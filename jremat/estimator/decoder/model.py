"""The decoder as pure functions of its parameters: embedding, block, loss, and the shapes that they read.

Shapes: b batch, s sequence, h hidden, n heads, m key and value heads, d head width, f MLP width, v vocabulary. Any of
them may be a letter (``jax.export.symbolic_shape``) in place of a number.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jremat.estimator.config import TransformerConfig
from jremat.estimator.decoder import attention, layers
from jremat.estimator.decoder.attention import Constrain, unconstrained
from jremat.estimator.decoder.loss import cross_entropy, linear_cross_entropy
from jremat.policy.names import tag

Params = Mapping[str, Any]
Norm = Callable[[str, jax.Array], jax.Array]
"""A norm by its name in the block."""
Project = Callable[[str, jax.Array], jax.Array]
"""A matmul over the last axes of an activation, by its name in the block."""
STREAM = ("batch", "stream_length", "embed")
"""Logical axes of the residual stream, [b, s, h]."""
_PROJECTED = {
    "query": ("batch", "length", "heads", "head_dim"),
    **dict.fromkeys(("key", "value"), ("batch", "length", "kv_heads", "head_dim")),
    **dict.fromkeys(("mlp_gate", "mlp_up"), ("batch", "length", "mlp")),
    **dict.fromkeys(("attn_proj", "mlp_out"), STREAM),
}


def projections(config: TransformerConfig) -> Mapping[str, tuple[tuple[int, ...], tuple[int, ...], bool]]:
    """Every matmul of a block, in program order: axes that it sums over, axes that it makes, whether it has a bias.

    >>> config = TransformerConfig(vocab_size=8, num_layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2, mlp_hidden=16,
    ...                            max_seq=4, mlp="swiglu", bias=False)
    >>> list(projections(config)), projections(config)["key"]
    (['query', 'key', 'value', 'attn_proj', 'mlp_gate', 'mlp_up', 'mlp_out'], ((4,), (1, 2), False))
    """
    c = config
    h, f, heads, kv = (c.hidden,), (c.mlp_hidden,), (c.heads, c.head_dim), (c.kv_heads, c.head_dim)
    wide = ("mlp_gate", "mlp_up") if c.mlp == "swiglu" else ("mlp_up",)
    return {
        "query": (h, heads, c.bias or c.qkv_bias),
        **dict.fromkeys(("key", "value"), (h, kv, c.bias or c.qkv_bias)),
        "attn_proj": (heads, h, c.bias),
        **dict.fromkeys(wide, (h, f, c.bias)),
        "mlp_out": (f, h, c.bias),
    }


def param_shapes(config: TransformerConfig) -> dict[str, Any]:
    """The parameters of the whole model, as ``models.transformer.init_params`` makes them, by shape.

    ``blocks`` has those of one block, each with a leading axis of layers.

    >>> config = TransformerConfig(vocab_size=8, num_layers=3, hidden=4, heads=2, kv_heads=2, head_dim=2, mlp_hidden=16,
    ...                            max_seq=4)
    >>> param_shapes(config)["blocks"]["query"]["kernel"].shape
    (3, 4, 2, 2)
    """
    c = config
    made = lambda *shape: jax.ShapeDtypeStruct(shape, c.param_dtype)
    norm = lambda *layers: (
        {"scale": made(*layers, c.hidden)}
        | ({"bias": made(*layers, c.hidden)} if c.norm == "layernorm" and c.bias else {})
    )
    block: dict[str, Any] = {name: norm(c.num_layers) for name in ("attn_norm", "mlp_norm")}
    for name, (inputs, outputs, bias) in projections(c).items():
        block[name] = {"kernel": made(c.num_layers, *inputs, *outputs)}
        block[name] |= {"bias": made(c.num_layers, *outputs)} if bias else {}
    tables = {"token_embedding": made(c.vocab_size, c.hidden)}
    tables |= {"position_embedding": made(c.max_seq, c.hidden)} if c.positions == "learned" else {}
    tables |= {} if c.tied_embeddings else {"head": made(c.vocab_size, c.hidden)}
    return {**tables, "blocks": block, "final_norm": norm()}


def embed(
    config: TransformerConfig,
    params: Params,
    tokens: jax.Array,
    key: jax.Array | None,
    constrain: Constrain = unconstrained,
) -> jax.Array:
    """The rows of the tokens and of their positions, [b, s, h] in the compute dtype; a token outside gives NaN."""
    table = params["token_embedding"]
    x = table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False).astype(config.compute_dtype)
    if config.positions == "learned":
        x += lax.slice_in_dim(params["position_embedding"], 0, tokens.shape[1]).astype(config.compute_dtype)
    return dropped(constrain(x, STREAM), key, config.dropout)


def block(
    config: TransformerConfig,
    norm: Norm,
    project: Project,
    x: jax.Array,
    key: jax.Array | None,
    positions: jax.Array | None,
    constrain: Constrain = unconstrained,
) -> jax.Array:
    """One layer: attention, then the MLP, each behind a norm and added to the residual stream.

    Args:
        config: kinds and rates; sizes are read from the arrays.
        norm, project: hold the parameters.
        x: [b, s, h].
        key: this layer's dropout key, or None for no dropout.
        positions: int [s] or [b, s] for RoPE; None is 0 to s - 1.
        constrain: lays an array out on a mesh by its logical axes.
    """
    keys = (None, None, None) if key is None else tuple(jax.random.fold_in(key, i) for i in range(3))
    placed = lambda name, x: constrain(project(name, x), _PROJECTED[name])
    x = tag(constrain(x, STREAM), "block_in")
    x += dropped(_attention(config, norm, placed, x, keys[0], positions, constrain), keys[1], config.dropout)
    with jax.named_scope("mlp"):
        return x + dropped(_mlp(config, norm, placed, x), keys[2], config.dropout)


def _mlp(config, norm, project, x):
    x = tag(norm("mlp_norm", x), "mlp_norm")
    wide = lambda name: tag(project(name, x), name)  # [b, s, f]
    gated = config.mlp == "swiglu"
    act = layers.swiglu(wide("mlp_gate"), wide("mlp_up")) if gated else layers.gelu(wide("mlp_up"))
    return tag(project("mlp_out", tag(act, "mlp_act")), "mlp_out")


def _attention(config, norm, project, x, dropout_key, positions, constrain):
    c = config
    x = tag(norm("attn_norm", x), "attn_norm")
    query, key, value = (project(name, x) for name in ("query", "key", "value"))  # attention tags them as it reads them
    if c.positions == "rope":
        positions = jnp.arange(x.shape[1]) if positions is None else positions
        query, key = (layers.rope(t, positions, c.rope_theta) for t in (query, key))
    match c.attention:
        case "dot":
            out = attention.dot(query, key, value, dropout_key, c.dropout, constrain)
        case "blockwise":
            out = attention.blockwise(query, key, value, c.attention_block, constrain)
        case "cudnn":
            out = attention.cudnn(query, key, value)
    return tag(project("attn_proj", out), "attn_proj")


@functools.lru_cache(maxsize=64)
def plain_block(config: TransformerConfig) -> Callable[..., jax.Array]:
    """``block`` as a function of one layer's parameters, x, key and positions."""

    axes = {name: len(inputs) for name, (inputs, _, _) in projections(config).items()}

    def apply(params: Params, x: jax.Array, key: jax.Array | None, positions: jax.Array | None) -> jax.Array:
        norm = lambda name, x: plain_norm(config, params[name], x)
        project = lambda name, x: matmul(x, params[name]["kernel"], params[name].get("bias"), axes[name])
        return block(config, norm, project, x, key, positions)

    return apply


def plain_norm(config: TransformerConfig, params: Params, x: jax.Array) -> jax.Array:
    """LayerNorm or RMSNorm, as the config says."""
    if config.norm == "rmsnorm":
        return layers.rms_norm(x, params["scale"], config.norm_eps)
    return layers.layer_norm(x, params["scale"], params.get("bias"), config.norm_eps)


def matmul(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, axes: int) -> jax.Array:
    """Sums over the last ``axes`` axes of x, without a reshape of x, so no second copy; the kernel is cast here."""
    contracted = tuple(range(x.ndim - axes, x.ndim)), tuple(range(axes))
    y = lax.dot_general(x, kernel.astype(x.dtype), (contracted, ((), ())))
    return y if bias is None else y + bias.astype(x.dtype)


def head_losses(
    config: TransformerConfig,
    params: Params,
    x: jax.Array,
    targets: jax.Array,
    chunk: int | None,
    constrain: Constrain = unconstrained,
) -> jax.Array:
    """Cross-entropy of each target from the normed output of the stack, float32 [b, s]."""
    head = params["token_embedding" if config.tied_embeddings else "head"]
    if chunk is None:
        x = constrain(x, ("batch", "length", "embed"))
        return cross_entropy(constrain(logits(x, head), ("batch", "length", "vocab")), targets)
    x = constrain(x, ("batch", "whole_length", "embed"))  # a chunk is positions of one device
    return linear_cross_entropy(x, head, targets, chunk)


def logits(x: jax.Array, head: jax.Array) -> jax.Array:
    """[b, s, h] and [v, h] to [b, s, v]."""
    return lax.dot_general(x, head.astype(x.dtype), (((2,), (1,)), ((), ())))


def dropped(x: jax.Array, key: jax.Array | None, rate: float) -> jax.Array:
    """Dropout where there is a key and a rate."""
    return x if key is None or rate == 0 else layers.dropout(x, key, rate)
