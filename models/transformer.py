"""A decoder-only transformer in Flax Linen: one code path for the GPT and the Llama family, chosen by its config.

Shapes: b batch, s sequence, h hidden, n heads, m key and value heads, d head width, f MLP width, v vocabulary.
The stack has L layers.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jremat.estimator.config import TransformerConfig
from jremat.estimator.decoder import model as decoder
from models.sharding import Sharding

Params = Any

# Radford et al. 2018 and 2019: weights from N(0, 0.02²), those that write to the residual stream over sqrt(2L)
_INIT_STD = 0.02


class Norm(nn.Module):
    """LayerNorm or RMSNorm, as the config says: [b, s, h] to the same."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        params = {"scale": self.param("scale", nn.initializers.ones, (c.hidden,), c.param_dtype)}
        if c.norm == "layernorm" and c.bias:
            params["bias"] = self.param("bias", nn.initializers.zeros, (c.hidden,), c.param_dtype)
        return decoder.plain_norm(c, params, x)


class Projection(nn.Module):
    """A matmul over the last axes of x, as many as ``inputs`` has, to ``outputs``.

    Keeps x. The kernel [*inputs, *outputs] is cast to the dtype of x where it is used.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    use_bias: bool
    param_dtype: str
    std: float = _INIT_STD

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.normal(self.std), self.inputs + self.outputs, self.param_dtype)
        zeros = nn.initializers.zeros
        bias = self.param("bias", zeros, self.outputs, self.param_dtype) if self.use_bias else None
        return decoder.matmul(x, kernel, bias, len(self.inputs))


class Block(nn.Module):
    """One layer: attention, then the MLP, each behind a norm and added to the residual stream.

    Without remat a block of the GPT family keeps, with dropout off and in units of b·s·h values: its input, the norm,
    query, key, value, the probabilities (n·s/h), the context, the middle of the stream, its norm, the MLP's up and
    activation (f/h each), and two f32 statistics a row and norm. Every name of ``jremat.policy.names.VOCABULARY`` but
    a mixture's is tagged.
    """

    config: TransformerConfig
    sharding: Sharding | None = None

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None = None, positions: jax.Array | None = None) -> jax.Array:
        """
        Args:
            x: [b, s, h], the compute dtype.
            key: this layer's dropout key, or None for no dropout.
            positions: int [s] or [b, s] for RoPE; None is 0 to s - 1.

        Returns:
            [b, s, h], dtype of ``x``.
        """
        c = self.config
        layouts = decoder.projections(c)
        norm = lambda name, x: Norm(c, name=name)(x)
        project = lambda name, x: self._projection(name, *layouts[name])(x)
        return decoder.block(c, norm, project, x, key, positions, _constrain(self.sharding))

    def _projection(self, name, inputs, outputs, use_bias):
        c = self.config
        std = _INIT_STD / (2 * c.num_layers) ** 0.5 if name in ("attn_proj", "mlp_out") else _INIT_STD
        return Projection(inputs, outputs, use_bias, c.param_dtype, std, name=name)


class Carry(NamedTuple):
    """What a layer hands to the next where another executor runs the stack; only ``x`` has a gradient.

    ``x``: [b, s, h]. ``layer``: int32, the index of the layer that reads the carry. ``key``: the stack's dropout key or
    None. ``positions``: int [s].
    """

    x: jax.Array
    layer: jax.Array
    key: jax.Array | None
    positions: jax.Array


def _as_it_is(block: type[Block]) -> type[Block]:
    return block


def _constrain(sharding: Sharding | None) -> decoder.Constrain:
    return decoder.unconstrained if sharding is None else sharding.constrain


def block_apply(
    config: TransformerConfig,
    remat: Callable[[type[Block]], type[Block]] = _as_it_is,
    sharding: Sharding | None = None,
) -> Callable[[Params, Carry], Carry]:
    """One layer as a pure function ``(layer_parameters, carry) -> carry``, for an executor of one's own.

    With the parameters of layer i and a carry whose ``layer`` is i it computes what layer i of ``Transformer`` does,
    with the same dropout masks.

    Args:
        config: the model's.
        remat, sharding: as ``Transformer``'s.

    Returns:
        A function of one layer's slice of ``params["blocks"]`` and a ``Carry``.
    """
    block = remat(Block)(config, sharding, parent=None)  # a module of its own, also where one is being applied

    def apply(layer_parameters: Params, carry: Carry) -> Carry:
        key = layer_key(carry.key, carry.layer)
        x: Any = block.apply({"params": layer_parameters}, carry.x, key, carry.positions)
        return carry._replace(x=x, layer=carry.layer + 1)

    return apply


def layer_key(key: jax.Array | None, layer: jax.Array | int) -> jax.Array | None:
    """The dropout key of one layer: the same whoever runs the stack, so one seed gives one set of masks."""
    return None if key is None else jax.random.fold_in(key, layer)


class Transformer(nn.Module):
    """The model: embedding, L scanned blocks, norm, head.

    Parameters, float32 by default: ``token_embedding`` [v, h], ``position_embedding`` [max_seq, h] where positions are
    learned, ``blocks`` (those of one block, each with a leading axis L), ``final_norm``, ``head`` [v, h] unless tied.

    Args:
        config: sizes and kinds.
        remat: what is done to the block's class before it is scanned, such as
            ``lambda block: nn.remat(block, policy=policy, prevent_cse=False)``. The default is nothing, so everything
            that the backward reads is kept. Groups of layers are a stack executor's job: nested scans copy parameters.
        stack: runs the layers in place of ``nn.scan``: ``stack(block, stacked_parameters, carry) -> carry`` with
            ``block`` from ``block_apply`` and ``carry`` a ``Carry`` at layer 0. Initialisation doesn't use it, so
            parameters are the same.
        sharding: how the step is spread over a mesh; None: one device, or as XLA decides.

    >>> from dataclasses import replace
    >>> from models.config import get
    >>> model = Transformer(replace(get("tiny"), num_layers=2))
    >>> tokens = jnp.zeros((1, 8), jnp.int32)
    >>> params = model.init(jax.random.key(0), tokens)["params"]
    >>> model.apply({"params": params}, tokens).shape
    (1, 8, 256)
    """

    config: TransformerConfig
    remat: Callable[[type[Block]], type[Block]] = _as_it_is
    stack: Callable[[Callable[[Params, Carry], Carry], Params, Carry], Carry] | None = None
    sharding: Sharding | None = None

    def setup(self) -> None:
        """Declare the parameters and the block, which is scanned later."""
        c = self.config
        table = lambda name, rows: self.param(name, nn.initializers.normal(_INIT_STD), (rows, c.hidden), c.param_dtype)
        self.token_embedding = table("token_embedding", c.vocab_size)
        if c.positions == "learned":
            self.position_embedding = table("position_embedding", c.max_seq)
        self.blocks = self.remat(Block)(c, self.sharding)
        self.final_norm = Norm(c)
        if not c.tied_embeddings:
            self.head = table("head", c.vocab_size)

    def __call__(self, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Logits of every next token.

        Args:
            tokens: int [b, s], s at most ``max_seq``; one outside the vocabulary gives NaN.
            key: the step's dropout key, or None for no dropout (evaluation).

        Returns:
            [b, s, v], the compute dtype.

        Raises:
            ValueError: a sequence longer than ``max_seq``.
        """
        return decoder.logits(self.hidden(tokens, key), self._head())

    def losses(
        self, tokens: jax.Array, targets: jax.Array, key: jax.Array | None = None, chunk: int | None = None
    ) -> jax.Array:
        """Cross-entropy of each target, in nats, float32 [b, s].

        Args:
            tokens, targets: int [b, s].
            key: as in ``__call__``.
            chunk: positions whose logits are alive at a time (see ``linear_cross_entropy``); None keeps them all.
        """
        tables = {"token_embedding" if self.config.tied_embeddings else "head": self._head()}
        hidden = self.hidden(tokens, key)
        return decoder.head_losses(self.config, tables, hidden, targets, chunk, _constrain(self.sharding))

    def hidden(self, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """What the head reads: the stack's output, normed, [b, s, h].

        Raises:
            ValueError: more tokens than ``max_seq``.
        """
        c, (_, s) = self.config, tokens.shape
        if s > c.max_seq:
            raise ValueError(f"tokens: expected at most max_seq={c.max_seq} positions, got {s}")
        key = key if c.dropout else None  # a layer is the same function whether an idle key came along or not
        x = self._embed(tokens, layer_key(key, c.num_layers))  # the index after the last layer's
        positions = jnp.arange(s)
        if self.stack is None or self.is_initializing():
            x = self._scan(x, key, positions)
        else:
            carry = Carry(x, jnp.int32(0), key, positions)
            x = self.stack(block_apply(c, self.remat, self.sharding), self.variables["params"]["blocks"], carry).x
        return self.final_norm(x)

    def _embed(self, tokens, key):
        tables = {name: getattr(self, name, None) for name in ("token_embedding", "position_embedding")}
        return decoder.embed(self.config, tables, tokens, key, _constrain(self.sharding))

    def _scan(self, x, key, positions):
        layer = lambda block, x, i, key, positions: (block(x, layer_key(key, i), positions), None)
        scan = nn.scan(
            layer,
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            length=self.config.num_layers,
        )
        return scan(self.blocks, x, jnp.arange(self.config.num_layers), key, positions)[0]

    def _head(self):
        return self.token_embedding if self.config.tied_embeddings else self.head


def init_params(config: TransformerConfig, key: jax.Array) -> Params:
    """Fresh parameters: the same for every kind of attention, remat and stack, on a machine with a GPU or without.

    Args:
        config: sizes, norms, biases, positions and ``param_dtype``.
        key: a JAX random key.

    Returns:
        ``Transformer``'s tree of parameters, ``config.num_params()`` values in all.

    >>> from models.config import get
    >>> params = init_params(get("tiny"), jax.random.key(0))
    >>> params["blocks"]["query"]["kernel"].shape
    (6, 128, 4, 32)
    """
    model = Transformer(replace(config, attention="dot"))
    return jax.jit(model.init)(key, jnp.zeros((1, 1), jnp.int32))["params"]


def layer_shapes(config: TransformerConfig, batch: int, seq: int) -> tuple[Params, Carry]:
    """One layer's parameters and its carry, as shapes: the arguments of ``block_apply``'s function."""

    def make() -> tuple[Params, Carry]:
        params = init_params(config, jax.random.key(0))["blocks"]
        x = jnp.zeros((batch, seq, config.hidden), config.compute_dtype)
        key = jax.random.key(0) if config.dropout else None
        return jax.tree.map(lambda leaf: leaf[0], params), Carry(x, jnp.int32(0), key, jnp.arange(seq))

    return jax.eval_shape(make)


def mean_loss(
    model: Transformer,
    params: Params,
    tokens: jax.Array,
    targets: jax.Array,
    key: jax.Array | None = None,
    chunk: int | None = None,
) -> jax.Array:
    """The training loss: mean cross-entropy of the targets, float32 scalar, in nats.

    Args:
        model: a ``Transformer``.
        params: its parameters.
        tokens, targets: int [b, s]; ``targets[:, i]`` follows ``tokens[:, i]``.
        key: the step's dropout key; None in evaluation.
        chunk: positions whose logits are alive at a time; None keeps all logits.
    """
    losses: Any = model.apply({"params": params}, tokens, targets, key, chunk, method="losses")  # [b, s]
    return losses.mean()
