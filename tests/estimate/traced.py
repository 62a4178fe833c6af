"""What JAX keeps of a block, counted by the engine on the traced program."""

import warnings
from functools import lru_cache, partial

import jax
import jax.numpy as jnp

import jremat
from jremat.estimator.config import TransformerConfig
from jremat.policy import LayerPlan, Policy
from jremat.transform import chain
from models.transformer import Block, Carry, Transformer, block_apply, init_params, mean_loss


@lru_cache(maxsize=32)
def _block(config: TransformerConfig, batch: int, seq: int):
    """A block, as a function of its parameters, its input, its dropout key and the positions, and their shapes."""
    block = Block(config)
    x = jax.ShapeDtypeStruct((batch, seq, config.hidden), config.compute_dtype)
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(block.init, key, x)
    positions = jax.ShapeDtypeStruct((seq,), jnp.int32)
    return block.apply, (params, x, key if config.dropout else None, positions)


def block_residuals(config: TransformerConfig, policy: Policy, batch: int, seq: int) -> tuple[int, int]:
    """Bytes that one block makes and keeps, and those of them in host memory."""
    apply, args = _block(config, batch, seq)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the cpu backend ignores offloads; the program has them
        rows = jremat.residuals(apply, *args, policy=policy)
    return rows.total_bytes, rows.host_bytes


def stack_residuals(
    config: TransformerConfig, policy: Policy | LayerPlan, batch: int, seq: int, stack: str
) -> tuple[int, int]:
    """Bytes that the model's own layers keep, of what they make and of the stream, and those of them on the host."""
    if stack == "chain":
        run = lambda blocks, x, key: chain.stack(block_apply(config), policy, num_layers=config.num_layers)(
            blocks, Carry(x, jnp.int32(0), key, jnp.arange(seq))
        )
    else:
        model = Transformer(config, remat=lambda block: jremat.remat(block, policy))
        rest = {name: tree for name, tree in _params(config).items() if name != "blocks"}
        run = lambda blocks, x, key: model.apply(
            {"params": rest | {"blocks": blocks}}, x, key, jnp.arange(seq), method="_scan"
        )
    x = jax.ShapeDtypeStruct((batch, seq, config.hidden), config.compute_dtype)
    key = jax.eval_shape(lambda: jax.random.key(0)) if config.dropout else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        rows = jremat.residuals(run, _params(config)["blocks"], x, key)
    read = sum(row.bytes for row in rows if row.source.startswith("argument 1"))
    return rows.total_bytes + read, rows.host_bytes


def _params(config: TransformerConfig):
    return jax.eval_shape(partial(init_params, config), jax.eval_shape(lambda: jax.random.key(0)))


def recompute_flops(
    config: TransformerConfig, policy: Policy | LayerPlan, batch: int, seq: int, stack: str = "chain"
) -> int:
    """FLOPs of the matmuls that the gradient of the whole loss does again."""
    loss, args = _loss(config, policy, batch, seq, None, stack)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return jremat.flops(jax.grad(loss), *args).matmul.recompute


def _loss(config: TransformerConfig, policy: Policy | LayerPlan, batch: int, seq: int, chunk: int | None, stack: str):
    """The loss of a model, and the shapes of its arguments."""
    if stack == "chain":
        run = lambda block, params, carry: chain.stack(block, policy, num_layers=config.num_layers)(params, carry)
        model = Transformer(config, stack=run)
    else:
        model = Transformer(config, remat=lambda block: jremat.remat(block, policy))
    key, params = jax.eval_shape(lambda: jax.random.key(0)), _params(config)
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    loss = lambda params, tokens, targets, key: mean_loss(model, params, tokens, targets, key, chunk)
    return loss, (params, tokens, tokens, key if config.dropout else None)
