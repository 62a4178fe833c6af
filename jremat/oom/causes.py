"""What is alive at the peak by kind, and which of it should not be there.

A kind is read from JAX's path of the operation: ``jvp`` scopes are the forward pass of a gradient, ``transpose`` scopes
its backward pass, ``rematted_computation`` a recompute in it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from jremat.jax_internals import JVP_SCOPE, REMAT_SCOPE, TRANSPOSE_SCOPE
from jremat.measure.buffers import Buffer
from jremat.oom.dump import Dump
from jremat.policy.shown import filled, human

_OPTIMIZER = re.compile(r"\b(opt_state|opt|mu|nu|m|v|momentum|moments?|trace|optimizer\w*)\b")
_COLLECTIVE = re.compile(
    r"\b(all[-_]gather|all[-_]reduce|psum|reduce[-_]scatter|all[-_]to[-_]all|collective[-_]permute)"
)
LEAST_VOCABULARY = 16_000
"""A dimension from which on it is taken for a vocabulary's, if it is an argument's too or the operation says so."""
LEAST_SEQUENCE = 512
"""Two equal last dimensions from which on they are taken for queries by keys."""


@dataclass(frozen=True)
class Cause:
    """Something that takes memory and need not.

    Attributes:
        slug: its name.
        message: what it is, in a line.
        nbytes: that it takes, or that would be free without it where ``cure`` frees a part.
        freed_bytes: that the cure frees, as far as the report tells.
        cure: what to do.
        source: the user's line of its largest buffer, or nothing.
    """

    slug: str
    message: str
    nbytes: int
    freed_bytes: int
    cure: str
    source: str = ""

    @property
    def text(self) -> str:
        """All of it in a line."""
        at = f" ({self.source})" if self.source else ""
        frees = f", about {human(self.freed_bytes)} less" if self.freed_bytes else ""
        return f"{human(self.nbytes)} [{self.slug}] {self.message}{at}. To do{frees}: {self.cure}"

    def __str__(self) -> str:
        return filled(self.text, "  ")

    __repr__ = __str__


def kind_of(buffer: Buffer, parameters: frozenset[tuple[int, ...]] = frozenset()) -> str:
    """What a buffer is for.

    Args:
        buffer: one of a dump.
        parameters: shapes of the arguments.

    >>> kind_of(Buffer(4, "temp", "float32", (8, 2), "jit(f)/transpose(jvp())/dot_general", "", None, "dot"))
    'backward pass'
    """
    what = buffer.what
    if buffer.kind == "argument":
        if _OPTIMIZER.search(what):
            return "optimizer state"
        return "inputs" if buffer.dtype.startswith(("int", "uint", "bool")) else "parameters"
    if buffer.kind == "output":
        return "results"
    if buffer.kind in ("arrays", "code", "constant"):
        return buffer.kind
    if _COLLECTIVE.search(f"{buffer.instruction} {what}"):
        return "collectives"
    if REMAT_SCOPE in what:
        return "recompute"
    if TRANSPOSE_SCOPE in what:
        return "gradients" if parameters.intersection((buffer.shape, buffer.shape[1:])) - {()} else "backward pass"
    if JVP_SCOPE in what:
        return "saved residuals"
    return "gradients" if len(buffer.shape) > 2 and buffer.shape[1:] in parameters else "other temporaries"


def shapes_of_arguments(dump: Dump) -> frozenset[tuple[int, ...]]:
    """Shapes of the arguments, by which gradients are known."""
    return frozenset(buffer.shape for buffer in dump.buffers if buffer.kind == "argument" and buffer.shape)


def find_causes(dump: Dump) -> tuple[Cause, ...]:
    """What takes memory and need not, largest first.

    Args:
        dump: of any form; each rule asks for what it needs and finds nothing where the report lacks it.
    """
    found = [cause for rule in _RULES for cause in rule(dump) if cause.nbytes > 0.02 * max(1, dump.total_bytes)]
    return tuple(sorted(found, key=lambda cause: -cause.nbytes))


def _not_donated(dump: Dump) -> Iterator[Cause]:
    """Results as large as the arguments that they replace."""
    if dump.output_bytes is None or dump.argument_bytes is None:
        return
    own = dump.output_bytes - (dump.alias_bytes or 0)
    left = dump.argument_bytes - (dump.alias_bytes or 0)
    if own > 0 and own >= 0.5 * left > 0:
        yield Cause(
            "not-donated",
            "the results stand beside the arguments that they replace: the training state is there twice",
            min(own, left),
            min(own, left),
            "donate the state: jax.jit(step, donate_argnums=...)",
        )


def _saved_residuals(dump: Dump) -> Iterator[Cause]:
    """What is saved and stands under no other cause."""
    gathered = _gathered_arrays(dump)
    other = lambda b: _vocabulary(b, dump) or _scores(b, dump) or b in gathered
    saved = [b for b in dump.buffers if kind_of(b) == "saved residuals" and not other(b)]
    if any(b.dtype in _HALF for b in saved):
        saved = [b for b in saved if b.dtype != "float32"]
    if not saved:
        return
    largest = saved[0]
    layers = largest.shape[0] if "while" in largest.what and len(largest.shape) > 2 else 0
    stacked = f", the largest stacked over {layers} layers" if layers else ""
    each = ", ".join(dict.fromkeys(_name(b) for b in saved[:6]))
    spec, freed = _dropping(saved)
    yield Cause(
        "saved-residuals",
        f"values of the forward pass are saved for the backward pass in {_count(saved)}{stacked}: {each}",
        sum(b.nbytes for b in saved),
        freed,
        f"rematerialize the layers, jremat.remat(block, policies.get({spec!r})), or let jremat.fit choose what is "
        "saved",
        largest.source,
    )


def _dropping(saved: Sequence[Buffer]) -> tuple[str, int]:
    """The policy that drops most of what is saved for the least recompute, and its bytes.

    Values with names are dropped by them; without, all but outputs of matmuls, where that frees half.
    """
    total = sum(b.nbytes for b in saved)
    tags = dict.fromkeys(b.tag for b in saved if b.tag)
    named = sum(b.nbytes for b in saved if b.tag)
    if 2 * named >= total:
        return f"but:{','.join(map(str, tags))}", named
    cheap = sum(
        b.nbytes for b in saved if not re.search(r"dot_general|conv_general|gemm|cublas", b.what + b.instruction)
    )
    return ("dots_saveable", cheap) if 2 * cheap >= total else ("full", total)


def _logits(dump: Dump) -> Iterator[Cause]:
    logits = [b for b in dump.buffers if b.kind == "temp" and _vocabulary(b, dump)]
    if logits:
        yield Cause(
            "logits",
            f"logits in {_count(logits)} over a vocabulary of {_vocabulary(logits[0], dump):,}",
            sum(b.nbytes for b in logits),
            sum(b.nbytes for b in logits) * 7 // 8,
            "compute the loss in chunks of the sequence, a scan over 8 of them under remat: no whole logits exist then",
            logits[0].source,
        )


def _vocabulary(buffer: Buffer, dump: Dump) -> int:
    """The vocabulary's size among a buffer's dimensions, 0 where it has none: of logits, not of a parameter."""
    arguments = shapes_of_arguments(dump)
    if buffer.kind == "argument" or buffer.shape in arguments or len(buffer.shape) < 2:
        return 0
    known = {shape[0] for shape in arguments if len(shape) == 2} | {shape[-1] for shape in arguments if len(shape) == 2}
    size = max((n for n in buffer.shape[-1:] if n >= LEAST_VOCABULARY), default=0)
    named = re.search(r"logit|vocab|softmax_cross|log_softmax|lm_head|unembed|attend|loss", buffer.what + buffer.source)
    return size if size in known or named or not arguments else 0


def _attention_scores(dump: Dump) -> Iterator[Cause]:
    scores = [b for b in dump.buffers if b.kind == "temp" and _scores(b, dump)]
    if scores:
        yield Cause(
            "attention-scores",
            f"attention scores in {_count(scores)}, {scores[0].shape[-2]:,} queries by as many keys",
            sum(b.nbytes for b in scores),
            sum(b.nbytes for b in scores),
            "use an attention that never writes them, such as jax.nn.dot_product_attention(implementation='cudnn'); "
            "remat of the attention alone holds one layer's",
            scores[0].source,
        )


def _scores(buffer: Buffer, dump: Dump) -> bool:
    *rest, rows, columns = (1, 1, *buffer.shape)
    parameter = buffer.shape in shapes_of_arguments(dump) or buffer.shape[1:] in shapes_of_arguments(dump)
    return len(buffer.shape) > 2 and rows == columns >= LEAST_SEQUENCE and prod(rest) > 1 and not parameter


def _full_precision(dump: Dump) -> Iterator[Cause]:
    """Residuals in float32 of a program whose parameters or other residuals are in 16 bits."""
    saved = [b for b in dump.buffers if kind_of(b) == "saved residuals"]
    wide = [b for b in saved if b.dtype == "float32"]
    # Where no residual has 16 bits, most parameters must: a model in float32 throughout is meant so.
    rest = [b for b in saved if b.dtype in _HALF] or [b for b in dump.buffers if kind_of(b) == "parameters"]
    half = sum(b.nbytes for b in rest if b.dtype in _HALF)
    if wide and 2 * half >= sum(b.nbytes for b in rest) > 0:
        yield Cause(
            "float32-residuals",
            f"a program that computes in 16 bits saves float32 values in {_count(wide)}: {_name(wide[0])}",
            sum(b.nbytes for b in wide),
            sum(b.nbytes for b in wide) // 2,
            "cast before the value is saved, or save the 16-bit value that it was computed from",
            wide[0].source,
        )


_HALF = "bfloat16", "float16"


def _gathered_arrays(dump: Dump) -> list[Buffer]:
    """Results of all-gathers and the copies of them that the program's path still calls by their constraint."""
    temps = [b for b in dump.buffers if b.kind == "temp"]
    whole = {(b.dtype, b.shape) for b in temps if re.search(r"all[-_]gather", f"{b.instruction} {b.what}")}
    carries = r"all[-_]gather|sharding_constraint|/while$"
    return [b for b in temps if (b.dtype, b.shape) in whole and re.search(carries, f"{b.instruction} {b.what}")]


def _gathered(dump: Dump) -> Iterator[Cause]:
    gathered = _gathered_arrays(dump)
    if gathered:
        yield Cause(
            "gathered-parameters",
            f"gathered arrays are held in {_count(gathered)}, the largest {_name(gathered[0])}",
            sum(b.nbytes for b in gathered),
            sum(b.nbytes for b in gathered[1:]),
            "gather one layer at a time: scan over the layers, each under remat, whose replay gathers again",
            gathered[0].source,
        )


def _accumulators(dump: Dump) -> Iterator[Cause]:
    """Gradients that are there more than once, or wider than their parameter."""
    arguments = [b for b in dump.buffers if b.kind == "argument"]
    once = sum(b.nbytes for b in arguments if kind_of(b) == "parameters")
    shapes = shapes_of_arguments(dump)
    gradients = [b for b in dump.buffers if kind_of(b, shapes) == "gradients"]
    total = sum(b.nbytes for b in gradients)
    if once and total > 2.5 * once:
        yield Cause(
            "gradient-buffers",
            f"gradients in {_count(gradients)} take {total / once:.1f} times the parameters' bytes",
            total,
            total - once,
            "accumulate in one buffer (a scan over micro-batches with the sum as carry), in the parameters' precision",
            gradients[0].source,
        )


def _state(dump: Dump) -> Iterator[Cause]:
    arguments = dump.argument_bytes or sum(b.nbytes for b in dump.buffers if b.kind == "argument")
    twice = (dump.output_bytes or 0) - (dump.alias_bytes or 0) > 0.5 * arguments
    if arguments > 0.4 * dump.total_bytes and not twice and dump.form != "a device memory profile of JAX":
        yield Cause(
            "training-state",
            "parameters and optimizer state are most of the memory: no policy makes them smaller",
            arguments,
            arguments * 7 // 8,
            "shard them over devices (FSDP, ZeRO), keep moments in 16 bits or factored, or offload the optimizer state",
        )


def _fragmentation(dump: Dump) -> Iterator[Cause]:
    lost = dump.fragmentation_bytes or 0
    if lost > 0.05 * dump.total_bytes:
        yield Cause(
            "fragmentation", "lost between temporaries", lost, lost, "smaller or equal layers; another scheduler"
        )


def _padding(dump: Dump) -> Iterator[Cause]:
    """A TPU stores arrays in tiles of 8 by 128: short last dimensions are filled up."""
    extra = dump.padding_bytes or 0
    if dump.buffers and extra > 0.05 * dump.listed_bytes:
        worst = dump.buffers[0]
        yield Cause(
            "padding",
            f"the last two dimensions are filled up to the device's tiles: {_name(worst)}",
            extra,
            extra,
            "order dimensions so that the last is a multiple of 128 and the one before it of 8, or merge short ones",
            worst.source,
        )


def _taken_elsewhere(dump: Dump) -> Iterator[Cause]:
    """An allocation that is small beside what the allocator has left, or beside any device."""
    asked = dump.requested_bytes
    if asked is None or "TPU" in dump.form:
        return
    if dump.limit_bytes and dump.in_use_bytes is not None:
        left = dump.limit_bytes - dump.in_use_bytes
        if asked <= left:
            yield Cause(
                "fragmented-allocator",
                f"{human(left)} are free, in pieces smaller than the {human(asked)} asked for",
                max(asked, dump.total_bytes),
                0,
                "let the allocator reserve all at the start (XLA_PYTHON_CLIENT_PREALLOCATE=true, a larger "
                "XLA_PYTHON_CLIENT_MEM_FRACTION), or run the largest program first",
            )
    elif asked < 2**30 and dump.total_bytes < 2**30:
        yield Cause(
            "taken-elsewhere",
            f"only {human(asked)} were asked for, by a program of {human(dump.total_bytes)}: something else has taken "
            "the device's memory",
            max(asked, dump.total_bytes),
            0,
            "end other processes on the device (nvidia-smi), another framework's preallocation among them, or lower "
            "XLA_PYTHON_CLIENT_MEM_FRACTION for each of several",
        )


def _held_arrays(dump: Dump) -> Iterator[Cause]:
    """Of a profile of arrays: a line of the user's that made most of them."""
    if dump.form != "a device memory profile of JAX" or not dump.buffers:
        return
    largest = dump.buffers[0]
    if largest.nbytes > 0.3 * dump.total_bytes:
        yield Cause(
            "held-arrays",
            "arrays of one line hold most of the device's memory",
            largest.nbytes,
            largest.nbytes,
            "drop references to old arrays, donate them, or make them later",
            largest.source,
        )


_RULES: Sequence[Callable[[Dump], Iterator[Cause]]] = (
    _not_donated,
    _saved_residuals,
    _logits,
    _attention_scores,
    _full_precision,
    _gathered,
    _accumulators,
    _state,
    _fragmentation,
    _padding,
    _taken_elsewhere,
    _held_arrays,
)


def _count(buffers: Sequence[Buffer]) -> str:
    return "1 buffer" if len(buffers) == 1 else f"{len(buffers)} buffers"


def _name(buffer: Buffer) -> str:
    """A value as a reader knows it: its tag or operation, dtype and shape."""
    operation = buffer.tag or buffer.what.rstrip("/").rpartition("/")[2].partition("[")[0] or buffer.instruction
    return f"{operation} {buffer.dtype}[{','.join(map(str, buffer.shape))}]"
