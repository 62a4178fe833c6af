"""A pipeline stage of the decoder under a policy, as one function of its parameters; on one device the stage is all."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax

from jremat.estimator.config import TransformerConfig
from jremat.estimator.decoder import model
from jremat.graph.arguments import take_apart
from jremat.graph.effects import rerunnable
from jremat.graph.trace import capture
from jremat.policy.layers import LayerPlan
from jremat.policy.policy import Policy
from jremat.transform.chain import stack as chained
from jremat.transform.checkpoint import checkpoint, decisions_for


@functools.lru_cache(maxsize=64)
def lettered(config: TransformerConfig, constraints: tuple[str, ...] = ()) -> tuple[TransformerConfig, dict[str, Any]]:
    """The config with letters for its sizes, and every letter: b s h m d f v, t rows of positions, g = n / m.

    The layers stay a number, since a loop's length is one.

    Args:
        config: kinds, dtypes and the number of layers; g stays where it is 1.
        constraints: on the letters, as ``jax.export.symbolic_shape`` takes them.
    """
    names = ["b", "s", "h", "m", "d", "f", "v", "t"] + ["g"] * (config.group > 1)
    rope = ("mod(d,2) == 0",) if config.positions == "rope" else ()
    letters = dict(zip(names, export.symbolic_shape(", ".join(names), constraints=("s <= t", *rope, *constraints))))
    sizes = {
        "hidden": letters["h"],
        "heads": letters["m"] * letters.get("g", 1),
        "kv_heads": letters["m"],
        "head_dim": letters["d"],
        "mlp_hidden": letters["f"],
        "vocab_size": letters["v"],
        "max_seq": letters["t"],
    }
    made = object.__new__(TransformerConfig)  # its own checks are of numbers
    for name, value in (vars(config) | sizes).items():
        object.__setattr__(made, name, value)
    return made, letters


def numbers_of(config: TransformerConfig, batch: int, seq: int) -> Mapping[str, int]:
    """The value of every letter.

    >>> config = TransformerConfig(vocab_size=8, num_layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2, mlp_hidden=16,
    ...                            max_seq=4)
    >>> "".join(numbers_of(config, 3, 4)), numbers_of(config, 3, 4)["g"]
    ('bshmdfvtg', 2)
    """
    c = config
    return {
        "b": batch, "s": seq, "h": c.hidden, "m": c.kv_heads, "d": c.head_dim, "f": c.mlp_hidden, "v": c.vocab_size,
        "t": c.max_seq, "g": c.group,
    }  # fmt: skip


def block_shapes(config: TransformerConfig, batch: Any, seq: Any) -> tuple[Any, ...]:
    """Shapes of what ``model.plain_block`` takes: one layer's parameters, the stream, a dropout key, positions."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), model.param_shapes(config)["blocks"])
    stream = jax.ShapeDtypeStruct((batch, seq, config.hidden), config.compute_dtype)
    return one, stream, dropout_key(config), jax.ShapeDtypeStruct((seq,), jnp.int32)


def dropout_key(config: TransformerConfig) -> Any:
    """Its shape, where there is dropout."""
    return jax.eval_shape(lambda: jax.random.key(0)) if config.dropout else None


def first_alike(config: TransformerConfig, constraints: tuple[str, ...], policy: Policy) -> Policy:
    """The first policy asked about that decides on the block's values as this one does: they share one trace.

    Raises:
        ValueError: the policy names what the block doesn't have.
    """
    c, letters = lettered(replace(config, num_layers=1), constraints)
    shapes = block_shapes(c, letters["b"], letters["s"])
    program = rerunnable(capture(take_apart(model.plain_block(c), shapes, {})))
    decisions = decisions_for(program, policy, strict=True)
    kept = policy.keeps_everything, decisions.saved, decisions.offloaded
    return _first(c, constraints, kept, _Unequal(policy)).policy


@dataclass(frozen=True)
class _Unequal:
    """A policy that a cache doesn't look at."""

    policy: Policy = field(compare=False)


@functools.lru_cache(maxsize=1024)
def _first(config: TransformerConfig, constraints: tuple[str, ...], kept: object, policy: _Unequal) -> _Unequal:
    return policy


@dataclass(frozen=True)
class Stage:
    """Consecutive layers, with the embedding before the first and the loss after the last.

    Args:
        config: ``num_layers`` are those of the stage.
        policy: of every layer, or a plan over them.
        chain: run by the stack's executor, not by a scan.
        chunk: positions whose logits are alive at a time.
        first, last: whether the embedding, and the final norm, head and loss, are on it.
    """

    config: TransformerConfig
    policy: Policy | LayerPlan
    chain: bool = False
    chunk: int | None = None
    first: bool = True
    last: bool = True

    def params(self, config: TransformerConfig) -> dict[str, Any]:
        """Their shapes."""
        tied = config.tied_embeddings
        places = {"token_embedding": self.first or (self.last and tied), "position_embedding": self.first}
        places |= {"head": self.last, "final_norm": self.last}
        return {name: tree for name, tree in model.param_shapes(config).items() if places.get(name, True)}

    def batch(self, config: TransformerConfig, batch: Any, seq: Any) -> tuple[Any, ...]:
        """Shapes of what else is handed in: tokens or the stream, targets, the dropout key."""
        tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
        stream = jax.ShapeDtypeStruct((batch, seq, config.hidden), config.compute_dtype)
        return tokens if self.first else stream, tokens if self.last else None, dropout_key(config)

    def apply(self, config: TransformerConfig) -> Callable[..., jax.Array]:
        """``f(params, tokens or stream, targets, key)`` to the mean loss, or to the stream."""

        def f(params: Any, x: jax.Array, targets: jax.Array | None, key: jax.Array | None) -> jax.Array:
            if self.first:
                x = model.embed(config, params, x, _folded(key, config.num_layers))
            x = self.layers(config)(params["blocks"], x, key)
            if not self.last:
                return x
            assert targets is not None, "the last stage has the loss"
            x = model.plain_norm(config, params["final_norm"], x)
            return model.head_losses(config, params, x, targets, self.chunk).mean()

        return f

    def layers(self, config: TransformerConfig) -> Callable[..., jax.Array]:
        """``f(stacked parameters, stream, key)`` to the stream."""
        block, policy = model.plain_block(config), self.policy

        def scanned(params: Any, x: jax.Array, key: jax.Array | None) -> jax.Array:
            assert isinstance(policy, Policy)
            positions = jnp.arange(x.shape[1])
            body = block if policy.keeps_everything else checkpoint(block, policy)
            turn = lambda x, own: (body(own[0], x, _folded(key, own[1]), positions), None)
            return lax.scan(turn, x, (params, jnp.arange(config.num_layers)))[0]

        def chain(params: Any, x: jax.Array, key: jax.Array | None) -> jax.Array:
            def one(params: Any, carry: Any, key: jax.Array | None, positions: jax.Array) -> Any:
                x, layer = carry
                return block(params, x, _folded(key, layer), positions), layer + 1

            run = chained(one, policy, num_layers=config.num_layers)
            return run(params, (x, jnp.int32(0)), key, jnp.arange(x.shape[1]))[0]

        return chain if self.chain else scanned


def _folded(key: jax.Array | None, layer: jax.Array | int) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, layer)
