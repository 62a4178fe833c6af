"""What a policy costs in one block of the decoder, in letters: bytes kept, on device and host, FLOPs recomputed."""

import functools
import warnings
from dataclasses import dataclass, replace
from fractions import Fraction

import jax
import jax.numpy as jnp

from jremat.estimator.config import TransformerConfig
from jremat.estimator.decoder import model
from jremat.estimator.decoder.stage import block_shapes, first_alike, lettered
from jremat.graph.flops import flops
from jremat.graph.letters import Polynomial
from jremat.graph.residuals import Residual
from jremat.policy.decision import OFFLOAD
from jremat.policy.policy import Policy
from jremat.transform.checkpoint import checkpoint, residuals

GPT = TransformerConfig(
    vocab_size=1, num_layers=1, hidden=1, heads=1, kv_heads=1, head_dim=2, mlp_hidden=1, max_seq=1,
    param_dtype="bfloat16", compute_dtype="bfloat16",
)  # fmt: skip
"""The kinds of the GPT family, in bfloat16; sizes are letters."""
LLAMA = replace(GPT, heads=2, norm="rmsnorm", mlp="swiglu", positions="rope", bias=False)
"""And of the Llama family, with grouped queries."""


@dataclass(frozen=True)
class BlockCost:
    """The cost of a policy in one block.

    Args:
        rows: what is kept, the block's input among it.
        recompute_flops: matmul FLOPs that the backward pass repeats, a fused attention's forward included, every score
            counted, masked ones too.
    """

    rows: tuple[Residual, ...]
    recompute_flops: Polynomial

    @property
    def kept_bytes(self) -> Polynomial:
        """On device and host."""
        return sum((Polynomial.of(row.bytes) for row in self.rows), Polynomial())

    @property
    def host_bytes(self) -> Polynomial:
        """In host memory."""
        return sum((Polynomial.of(row.bytes) for row in self.rows if row.decision is OFFLOAD), Polynomial())


def block_cost(config: TransformerConfig, policy: Policy) -> BlockCost:
    """The cost of ``policy`` in a block of these kinds.

    Raises:
        ValueError: the policy names what the block doesn't have.

    >>> from jremat.policy import FULL
    >>> cost = block_cost(GPT, FULL)
    >>> str(named(cost.kept_bytes, grouped=False)), str(named(cost.recompute_flops, grouped=False))
    ('2·b·h·s', '8·b·h²·s + 4·b·h·s² + 2·b·f·h·s')
    """
    keys = config.attention_block
    whole = (f"s >= {2 * keys}", f"mod(s,{keys}) == 0") if config.attention == "blockwise" else ()
    return _cost(config, whole, first_alike(config, whole, policy))


@functools.lru_cache(maxsize=256)
def _cost(config: TransformerConfig, whole: tuple[str, ...], policy: Policy) -> BlockCost:
    c, letters = lettered(replace(config, num_layers=1), whole)
    block, args = model.plain_block(c), block_shapes(c, letters["b"], letters["s"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*backend ignores", UserWarning)  # the CPU, not the device that is meant
        rows = residuals(block, *args, policy=policy)
        run = block if policy.keeps_everything else checkpoint(block, policy)
        loss = lambda params, x, key, positions: jnp.square(run(params, x, key, positions)).sum()
        again = flops(jax.value_and_grad(loss, (0, 1)), *args).recompute
    own = tuple(row for row in rows if row.kind == "kept" or row.source.startswith("argument 1"))
    keys = config.attention_block
    blocks = f"floordiv(s, {keys})", "s"  # a whole number of blocks of keys
    return BlockCost(own, Polynomial.of(again).replaced(blocks[:1], blocks[1], Fraction(1, keys)))


def named(letters: Polynomial, grouped: bool) -> Polynomial:
    """The same in n heads, h for their width together, and k for that of keys and values."""
    heads = letters.replaced(("g", "m") if grouped else ("m",), "n").replaced(("d", "n"), "h")
    return heads.replaced(("d", "m"), "k")
