"""The transformer that the flags describe."""

from dataclasses import replace

from jremat.estimator.config import TransformerConfig
from models.config import get
from scripts.flags import dtype_on
from scripts.training.config import Model


def architecture(flags: Model, vocab_size: int | None, platform: str) -> TransformerConfig:
    """A named size with the flags' changes.

    A new width keeps the MLP's ratio to it; new heads divide the width among themselves.

    Args:
        flags: the size's name, and what is changed of it.
        vocab_size: in place of the size's own, or None.
        platform: that the step runs on, by which its dtype goes where no flag says it; nothing where none does.

    Raises:
        ValueError: an unknown size, or numbers that don't fit together.
    """
    base = get(flags.model)
    hidden, heads = flags.hidden or base.hidden, flags.heads or base.heads
    resized = (hidden, heads) != (base.hidden, base.heads)
    if resized and hidden % heads:
        raise ValueError(f"heads: expected a divisor of hidden={hidden}, got {heads}")
    return replace(
        base,
        vocab_size=vocab_size or base.vocab_size,
        num_layers=flags.layers or base.num_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=flags.kv_heads or (heads if base.kv_heads == base.heads else base.kv_heads),
        head_dim=hidden // heads if resized else base.head_dim,
        mlp_hidden=max(1, base.mlp_hidden * hidden // base.hidden),
        max_seq=flags.max_seq or base.max_seq,
        dropout=base.dropout if flags.dropout is None else flags.dropout,
        attention=flags.attention,
        compute_dtype=dtype_on(flags.compute_dtype, platform),
    )
