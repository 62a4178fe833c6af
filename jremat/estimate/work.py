"""What the compiled step holds beside state and what is kept: one layer's own work, the head's, and copies.

The closed lists say what JAX keeps; here stand the few rules for what XLA makes of the rest, each with what it was read
from. Calibrated on H200 programs compiled by jax 0.10.2 and 0.12.0.1 (XLA's own remat pass off, AdamW, donated state);
``benchmarks/estimate_peak.py`` measures the error.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jremat.estimate.block import INPUT, Block, Tensor
from jremat.estimate.config import TransformerConfig
from jremat.estimate.ledger import Moment
from jremat.estimate.stack import Row

ASSUMPTIONS = (
    "the gradients of all layers are one buffer, zeroed before the loss is taken back",
    "the gradient of the logits takes the logits' place",
    "one layer is under work at a time; in the MLP's backward pass all that was made again is alive, in attention's "
    "the attention's half of it",
    "materialised scores that are kept are laid out anew once between forward and backward",
)


@dataclass(frozen=True)
class Compiler:
    """What differs between the compilers of two versions of JAX.

    Args:
        jax: the version that it was read from.
        score_gradients_anew: materialised probabilities' gradients are laid out anew before the softmax's backward pass
            reads them; where every query head has keys of its own, in float32.
        largest_first: what most bytes stand behind is made first: where logits are more than what layers keep, the
            layers' backward pass comes before the head's gradient, for which the logits' gradient then waits.
    """

    jax: str
    score_gradients_anew: bool
    largest_first: bool


COMPILERS = ((0, 12), Compiler("0.12.0.1", True, True)), ((0, 0), Compiler("0.10.2", False, False))
"""By the first version of JAX that each stands for, newest first."""

CALIBRATED_ON = "0.10.2"
"""The version that is taken where none is named."""


def compiler_for(jax_version: str) -> Compiler:
    """The compiler of a version of JAX, or of the nearest older one that was read.

    Raises:
        ValueError: what isn't a version.

    >>> compiler_for("0.12.3").jax, compiler_for("0.11.0").jax
    ('0.12.0.1', '0.10.2')
    """
    parts = jax_version.split(".")[:2] if isinstance(jax_version, str) else []
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"jax_version: expected a version such as '0.10.2', got {jax_version!r}")
    return next(compiler for first, compiler in COMPILERS if first <= tuple(map(int, parts)))


def assumptions(compiler: Compiler) -> tuple[str, ...]:
    """What the compiled part of the peak rests on."""
    said = (
        f"calibrated on programs compiled for an H200 by jax {compiler.jax}; fragmentation and collectives are left out"
    )
    order = ("logits that are more than what the layers keep wait, as their gradient, until the layers are done",)
    return (*ASSUMPTIONS, *(order if compiler.largest_first else ()), said)


_STREAM, _WIDE, _HEADS = ("b", "s", "h"), ("b", "s", "f"), ("b", "s", "n", "d")
_SCORES = ("b", "m", "g", "s", "s")
Work = Iterable[tuple[str, Row, tuple[Moment, ...]]]


def layer_work(config: TransformerConfig, block: Block, recomputed: Iterable[Tensor], compiler: Compiler) -> Work:
    """What one layer's backward pass holds: what it makes again and reads, and its own gradients.

    Args:
        config: kinds of attention and MLP.
        block: the layer's tensors.
        recomputed: those of them that are made again.
        compiler: whose program it is.
    """
    order = list(block.tensors)
    middle = order.index("middle")
    scores_again = False
    for tensor in recomputed:
        if tensor.id in block.reads and tensor.needs != (INPUT,):  # a tag of the input makes nothing
            attention = order.index(tensor.id) < middle
            alive: tuple[Moment, ...] = ("mlp", "attention") if attention else ("mlp",)
            yield f"made again: {tensor.label}", Row("", tensor.axes, tensor.dtype, 1), alive
            scores_again |= tensor.tag in ("attn_probs", "attn_dropped")
    # The activation's gradient and one more of the MLP's width; the stream's gradient, in and out.
    yield "gradients in the MLP", Row("", _WIDE, "compute", 2), ("mlp",)
    yield "gradients of the stream", Row("", _STREAM, "compute", 2), ("mlp",)
    # Of query, key, value, context and stream: five arrays of about the stream's size.
    yield "gradients in attention", Row("", _HEADS, "compute", 5), ("attention",)
    if config.attention == "dot":
        # In float32 the one takes the other's place.
        arrays = 1 if config.compute_dtype == "float32" else 2
        yield "gradients of scores and probabilities", Row("", _SCORES, "compute", arrays), ("attention",)
        if compiler.score_gradients_anew:
            wide = "float32" if config.group == 1 else "compute"
            yield "gradients of probabilities, laid out anew", Row("", _SCORES, wide, 1), ("attention",)
        if config.group > 1 and scores_again:
            # Grouped queries keep XLA from fusing the softmax: masked scores twice in float32 and the mask stand
            # beside the probabilities; with the two above, 11 bytes a score in bfloat16.
            yield "softmax that doesn't fuse", Row("", _SCORES, "float32", 1), ("attention",)
            yield "mask of a softmax that doesn't fuse", Row("", _SCORES, "bool", 1), ("attention",)
    else:
        yield "fused attention: gradient of query", Row("", _HEADS, "float32", 1), ("attention",)
    if config.attention == "blockwise":
        # Scores, probabilities and their gradients of one block of keys.
        yield "fused attention: one block", Row("", ("b", "n", "s", "k"), "float32", 4), ("attention",)


def relaid(config: TransformerConfig, rows: Iterable[Row]) -> Work:
    """Kept scores or probabilities once more, in the layout that the backward loop reads; of two kinds one."""
    square = [row for row in rows if row.axes == _SCORES]
    if square:
        largest = max(square, key=lambda row: row.copies)
        yield "kept scores laid out anew", Row("", _SCORES, "compute", largest.copies), ("turn",)
    yield "gradients of the stream", Row("", _STREAM, "compute", 3), ("turn",)


def head_work(config: TransformerConfig, chunk: int | None) -> Work:
    """What the loss's backward pass holds beside what was kept for it."""
    cast = config.param_dtype != config.compute_dtype
    if chunk is not None:
        yield "loss: logits of one chunk", Row("", ("b", "c", "v"), "float32", 1), ("loss",)
        if cast:
            yield "head: weights cast", Row("", ("v", "h"), "compute", 1), ("loss",)
        yield "head: gradient, summed", Row("", ("v", "h"), "float32", 1), ("loss",)
    elif cast:
        yield "gradients of the stream", Row("", _STREAM, "compute", 2), ("loss",)
    else:
        yield "head: gradient", Row("", ("v", "h"), "param", 1), ("loss",)
