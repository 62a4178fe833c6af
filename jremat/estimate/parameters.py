"""Where a transformer's parameters live: by layer, embedding or head, and whether tensor parallelism splits them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jremat.estimate.config import TransformerConfig
from jremat.estimate.parallel import Parallel


@dataclass(frozen=True)
class Parameters:
    """Some of the model's parameters.

    Args:
        place: ``block`` (of all layers together), ``embedding`` (the pipeline's first stage), ``head`` (its last) or
            ``tied``, the table that is both and stands on both.
        count: how many.
        split: whether tensor parallelism splits them: matrices along heads, MLP width or vocabulary are, norms and the
            biases of what writes to the residual stream are not.
    """

    place: Literal["block", "embedding", "head", "tied"]
    count: int
    split: bool


def parameters_of(config: TransformerConfig) -> tuple[Parameters, ...]:
    """Every parameter once.

    >>> config = TransformerConfig(vocab_size=8, num_layers=3, hidden=4, heads=2, kv_heads=2, head_dim=2, mlp_hidden=16,
    ...                            max_seq=4)
    >>> sum(part.count for part in parameters_of(config)) == config.num_params()
    True
    """
    c = config
    norm = c.hidden * (2 if c.norm == "layernorm" and c.bias else 1)
    whole = 2 * norm + 2 * c.hidden * c.bias  # norms, and the biases of attn_proj and mlp_out
    table = c.vocab_size * c.hidden
    return (
        Parameters("block", c.num_layers * (c.block_params() - whole), True),
        Parameters("block", c.num_layers * whole, False),
        Parameters("tied" if c.tied_embeddings else "embedding", table, True),
        Parameters("embedding", c.max_seq * c.hidden if c.positions == "learned" else 0, False),
        Parameters("head", norm, False),
        Parameters("head", 0 if c.tied_embeddings else table, True),
    )


def spread(parts: Iterable[Parameters], parallel: Parallel, *, first: bool, last: bool) -> int:
    """Parameters on one device of a stage, ZeRO left out."""
    total = 0
    for part in parts:
        held = -(-part.count // parallel.tensor) if part.split else part.count
        if part.place == "block":
            total += held // parallel.pipeline
        elif (first and part.place in ("embedding", "tied")) or (last and part.place in ("head", "tied")):
            total += held
    return total
