"""The ledger of a training run in closed form: from a config, a policy and shapes; no trace, no arrays."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jremat.estimate import collectives
from jremat.estimate.block import block_of, item_bytes, sizes_of
from jremat.estimate.config import TransformerConfig
from jremat.estimate.ledger import MOMENTS, Ledger, Line, Moment, Part, summed
from jremat.estimate.parallel import Parallel
from jremat.estimate.parameters import Parameters, parameters_of, spread
from jremat.estimate.stack import Row, StackKept, matmul_flops, stack_kept
from jremat.estimate.work import CALIBRATED_ON, Compiler, assumptions, compiler_for, head_work, layer_work, relaid
from jremat.policy.counts import whole_number
from jremat.policy.decision import OFFLOAD
from jremat.policy.layers import LayerPlan, Request
from jremat.policy.policy import Policy

Optimizer = Literal["adamw", "momentum", "sgd"]
OPTIMIZER_MOMENTS: Mapping[str, int] = {"adamw": 2, "momentum": 1, "sgd": 0}
"""Running means a parameter."""

_BACKWARD: tuple[Moment, ...] = ("mlp", "attention")
_PLACES = {"P_blocks": ("block",), "P_head": ("head", "tied"), "P_embedding": ("embedding",)}
_SYMBOL = {
    "gradients of the layers": "P_blocks",
    "gradient of the head": "P_head",
    "gradients of the embedding": "P_embedding",
}


def estimate(
    config: TransformerConfig,
    policy: Policy | LayerPlan,
    *,
    batch: int,
    seq: int,
    chunk: int | None = None,
    optimizer: Optimizer = "adamw",
    master_weights: bool = False,
    accumulate: int = 1,
    parallel: Parallel | None = None,
    stack: Literal["auto", "scan", "chain"] = "auto",
    jax_version: str = CALIBRATED_ON,
) -> Ledger:
    """The memory of one training step, line by line.

    Kept for the backward pass is what the policy keeps of the traced program, to the byte; the peak rests on the
    ledger's ``assumptions``.

    Args:
        config: the architecture, its dtypes, dropout and attention.
        policy: of every layer, or a plan over the layers (of each pipeline stage's chunk).
        batch: sequences that go through the model at a time, over all data replicas.
        seq: tokens of each, at most ``config.max_seq`` where positions are learned.
        chunk: positions whose logits are alive at a time; None keeps all logits.
        optimizer: ``adamw`` (two moments), ``momentum`` (one) or ``sgd`` (none); moments have the dtype of what they
            update, as optax makes them: the weights, or their float32 masters.
        master_weights: a float32 copy of weights that are bfloat16.
        accumulate: micro-batches of one step; above 1 there is a float32 sum of their gradients.
        parallel: degrees of parallelism; None: one device.
        stack: ``auto`` takes a scan where one policy holds for all layers and the executor elsewhere, as training does;
            ``scan`` and ``chain`` insist.
        jax_version: by whose compiler the peak is reckoned, e.g. ``0.12.0``; what is kept is the same.

    Returns:
        The ledger of the device where the peak is highest.

    Raises:
        ValueError: an argument out of range, degrees that don't divide, a policy that doesn't fit the block or a plan
            that doesn't fit the layers.

    >>> from jremat.policy import FULL, NONE
    >>> config = TransformerConfig(vocab_size=256, num_layers=4, hidden=64, heads=4, kv_heads=4, head_dim=16,
    ...                            mlp_hidden=256, max_seq=128)
    >>> full, none = (estimate(config, p, batch=2, seq=128) for p in (FULL, NONE))
    >>> full.kept_bytes, none.kept_bytes  # 4 b s h L, and (64 b s h + 4 b n s² + 16 b s) L
    (262144, 6307840)
    """
    p = parallel or Parallel()
    _check(config, policy, batch, seq, chunk, optimizer, master_weights, accumulate, stack)
    compiler = compiler_for(jax_version)
    p.check(config, batch, seq)
    if stack != "chain" and isinstance(policy, LayerPlan):
        policy = policy.uniform(config.num_layers // p.chunks) or policy  # a plan of one policy needs no executor
    chain = stack == "chain" or isinstance(policy, LayerPlan)
    sizes = {**sizes_of(config, batch, seq), "L": config.num_layers, "P": config.num_params()}
    sizes["k"] = min(config.attention_block, -(-seq // 2))  # keys that blockwise attention reads at a time
    for symbol, places in _PLACES.items():
        sizes[symbol] = sum(part.count for part in parameters_of(config) if part.place in places)
    if chunk is not None:
        sizes["c"] = min(chunk, seq)
    run = _Run(config, p, sizes, chunk, OPTIMIZER_MOMENTS[optimizer], master_weights, accumulate, chain, compiler)
    if chain and stack == "scan":
        raise ValueError(f"stack: a scan runs one policy for all layers, {policy.spec!r} has several")
    kept = stack_kept(config, policy, config.num_layers // p.chunks, sizes, chain=chain)
    whole = matmul_flops(block_of(config).tensors.values(), sizes) * config.num_layers
    ledgers = [
        Ledger(
            run.lines(kept, stage),
            tuple((name, sizes[name]) for name in sizes if name != "1"),
            (*_assumed(config, p, chain), *assumptions(compiler)),
            p.devices,
            stage,
            kept.recomputed_flops * p.chunks,
            whole,
        )
        for stage in sorted({0, p.pipeline - 1})
    ]
    return max(ledgers, key=lambda ledger: ledger.peak_bytes)


_Kind = tuple[str, Sequence[Parameters], int, bool, tuple[Moment, ...]]


@dataclass(frozen=True)
class _Run:
    """One run's facts, and its lines."""

    config: TransformerConfig
    parallel: Parallel
    sizes: Mapping[str, int]
    chunk: int | None
    moments: int
    master_weights: bool
    accumulate: int
    chain: bool
    compiler: Compiler

    def head_last(self, kept: StackKept) -> bool:
        """Whether the head's gradient is taken after the layers': if it is to be summed over devices, or if the
        compiler turns first to what most bytes stand behind, and these are the logits."""
        p, size = (
            self.parallel,
            lambda axes, dtype: math.prod(self.sizes[a] for a in axes) * item_bytes(dtype, self.config),
        )
        stacks = sum(row.copies * size(row.axes, row.dtype) for row in kept.rows)
        first = self.compiler.largest_first and size(("b", "s", "v"), "compute") > stacks
        return self.chunk is None and (first or p.sequence or (p.zero > 0 and p.tensor == 1))

    def lines(self, kept: StackKept, stage: int) -> tuple[Line, ...]:
        first, last = stage == 0, stage == self.parallel.pipeline - 1
        head_last = self.head_last(kept)
        rows = [
            *self._state(first, last, head_last),
            *(self._kept(row, stage) for row in kept.rows),
            *(self._row("layer", f"replay: {row.name}", row, _BACKWARD) for row in kept.replay),
            *self._work(kept),
            *self._gathered(kept, first, last, head_last),
            *(self._embedding() if first else ()),
            *(self._head(head_last) if last else ()),
        ]
        return tuple(line for line in summed(rows) if line.total_bytes)

    def _state(self, first: bool, last: bool, head_last: bool) -> Iterable[Line]:
        c, p = self.config, self.parallel
        item = item_bytes("param", c)
        parts = parameters_of(c)
        of = lambda *places: [x for x in parts if x.place in places]
        # Under ZeRO-1 the whole gradients are there until each replica has its share of them.
        end: tuple[Moment, ...] = () if p.zero == 1 else ("update",)
        early = ("loss", *_BACKWARD, *end)
        late = end if head_last else ("turn", *_BACKWARD, *end)
        kinds: list[_Kind] = [
            ("weights", parts, item, p.zero >= 3, MOMENTS),
            ("gradients of the layers", of("block"), item, p.zero >= 2, early),
            ("gradient of the head", of("head", "tied"), item, p.zero >= 2, late),
            ("gradients of the embedding", of("embedding"), item, p.zero >= 2, end),
        ]
        if self.accumulate > 1:
            kinds.append(("gradient sum", parts, 4, p.zero >= 2, MOMENTS))
        if self.moments:
            size = self.moments * (4 if self.master_weights else item)  # of the dtype of what they update
            kinds.append(("optimizer moments", parts, size, p.zero >= 1, MOMENTS))
        if self.master_weights:
            kinds.append(("master weights", parts, 4, p.zero >= 1, MOMENTS))
        for name, chosen, size, shared, alive in kinds:
            held, total = spread(chosen, p, first=first, last=last), sum(x.count for x in chosen)
            device = size * (-(-held // p.data) if shared else held)
            yield Line("state", name, size * total, device, f"{size}·{_SYMBOL.get(name, 'P')}", ("P",), alive)

    def _kept(self, row: Row, stage: int) -> Line:
        p = self.parallel
        line = self._row("kept", row.name, row, ("loss", "turn", *_BACKWARD))
        formula = self._formula(row, row.copies * p.chunks)
        total, held = line.total_bytes * p.chunks, line.device_bytes * p.in_flight(stage)
        if p.zero >= 3 and not {"b", "s"} & set(row.axes):
            held = -(-held // p.data)  # a cast of weights is kept as they are: shared out
        return replace(line, total_bytes=total, device_bytes=held, formula=formula, crosses=True)

    def _row(self, part: Part, name: str, row: Row, alive: tuple[Moment, ...]) -> Line:
        total = math.prod(self.sizes[a] for a in row.axes) * row.copies * item_bytes(row.dtype, self.config)
        device = -(-total // self.parallel.divisor(row.axes))
        scales = tuple(dict.fromkeys(axis for axis in row.axes if axis != "1"))
        return Line(part, name, total, device, self._formula(row, row.copies), scales, alive, row.decision is OFFLOAD)

    def _formula(self, row: Row, copies: int) -> str:
        """Bytes of a value times its axes, times how many there are."""
        factors = [str(item_bytes(row.dtype, self.config)), *(a for a in row.axes if a != "1")]
        if copies > 1:
            factors.append("L" if copies == self.sizes["L"] else str(copies))
        return "·".join(factors)

    def _work(self, kept: StackKept) -> Iterable[Line]:
        block = block_of(self.config, chain=self.chain)
        work = layer_work(self.config, block, kept.recomputed, self.compiler)
        for name, row, alive in (*work, *relaid(self.config, kept.rows)):
            yield self._row("layer", name, row, alive)

    def _gathered(self, kept: StackKept, first: bool, last: bool, head_last: bool) -> Iterable[Line]:
        held = spread(parameters_of(self.config), self.parallel, first=first, last=last)
        sizes, again = self.sizes, kept.recomputed
        return collectives.gathered(self.config, self.parallel, sizes, again, held, self.moments, head_last)

    def _embedding(self) -> Iterable[Line]:
        rows = [("embedding: row of each token", Row("", ("b", "s", "1"), "int32", 1))]
        rows += [("embedding: dropout key", Row("", (), "key", 1))] if self.config.dropout else []
        for name, row in rows:
            yield replace(self._row("head", name, row, ("loss", "turn", *_BACKWARD)), crosses=True)

    def _head(self, head_last: bool) -> Iterable[Line]:
        waits = ("head: input", "head: logits") if head_last else ()
        for name, row in head_rows(self.config, self.chunk):
            alive: tuple[Moment, ...] = ("loss", "turn", *_BACKWARD) if name in waits else ("loss",)
            yield replace(self._row("head", name, row, alive), crosses=True)
        for name, row, alive in head_work(self.config, self.chunk):
            yield self._row("head", name, row, alive)


def head_rows(config: TransformerConfig, chunk: int | None) -> Iterable[tuple[str, Row]]:
    """What the final norm, the head and the loss keep, to the byte."""
    stream = ("b", "s", "h")
    yield "final norm: input", Row("", stream, "compute", 1)
    stats = 2 if config.norm == "layernorm" else 1
    yield "final norm: statistics", Row("", ("b", "s", "1"), "float32", stats)
    yield "head: input", Row("", stream, "compute", 1)
    if chunk is None:
        if config.param_dtype != config.compute_dtype:
            yield "head: weights cast", Row("", ("v", "h"), "compute", 1)
        yield "head: logits", Row("", ("b", "s", "v"), "compute", 1)
    yield "loss: log-sum-exp", Row("", ("b", "s"), "float32", 1)


def _check(config, policy, batch, seq, chunk, optimizer, master_weights, accumulate, stack) -> None:
    if not isinstance(config, TransformerConfig):
        raise ValueError(f"config: expected a TransformerConfig, got {config!r}")
    if isinstance(policy, Request):
        raise ValueError(
            f"policy: {policy.spec!r} needs shapes before it is a policy; resolve it first: "
            "policies.get(spec).resolve(block, *args, num_layers=L)"
        )
    if not isinstance(policy, Policy | LayerPlan):
        raise ValueError(f"policy: expected a Policy or a LayerPlan, e.g. policies.get('full'), got {policy!r}")
    for name, value in (("batch", batch), ("seq", seq), ("accumulate", accumulate)):
        whole_number(name, value)
    if chunk is not None:
        whole_number("chunk", chunk)
    if config.positions == "learned" and seq > config.max_seq:
        raise ValueError(f"seq: expected at most max_seq={config.max_seq}, which has a row a position, got {seq}")
    if optimizer not in OPTIMIZER_MOMENTS:
        raise ValueError(f"optimizer: expected {' or '.join(map(repr, OPTIMIZER_MOMENTS))}, got {optimizer!r}")
    if master_weights and config.param_dtype == "float32":
        raise ValueError("master_weights: the weights are float32 themselves; it would only double them")
    if stack not in ("auto", "scan", "chain"):
        raise ValueError(f"stack: expected 'auto', 'scan' or 'chain', got {stack!r}")


def _assumed(config: TransformerConfig, parallel: Parallel, chain: bool) -> Iterable[str]:
    yield f"layers run by {'the stack executor' if chain else 'a scan'}; parameters are updated in place (donated)"
    if config.attention == "cudnn":
        yield "cuDNN's attention keeps its output and log-sum-exp; its own workspace is taken to be dq in float32"
    if parallel.pipeline > 1:
        yield "pipeline: enough micro-batches to fill it; a plan over layers holds for each chunk of them"
    if parallel.context > 1:
        yield "context: keys and values of other devices pass through, one share at a time, and are not counted"
    if parallel.devices > 1:
        yield from collectives.ASSUMPTIONS
