"""The ledger of a training run, read off its program: traced once with letters for its sizes, numbers put in after."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np

from jremat.estimate.collectives import ASSUMPTIONS as COLLECTIVES
from jremat.estimate.collectives import ITEM_BYTES, Spread
from jremat.estimate.config import TransformerConfig
from jremat.estimate.decoder.stage import Stage, lettered, numbers_of
from jremat.estimate.ledger import PHASES, Ledger, Line
from jremat.estimate.parallel import Parallel
from jremat.estimate.step import OPTIMIZERS, train_step
from jremat.estimate.timeline import Term, Timeline
from jremat.graph.arguments import take_apart
from jremat.graph.flops import count_in
from jremat.graph.letters import Polynomial, Size, at
from jremat.graph.peak import ASSUMPTIONS, peak_in
from jremat.graph.residuals import Residual, read_residuals
from jremat.graph.rules import rules_for
from jremat.graph.trace import Program, capture
from jremat.policy.counts import whole_number
from jremat.policy.decision import OFFLOAD
from jremat.policy.layers import LayerPlan, Request
from jremat.policy.policy import Policy

Optimizer = Literal["adamw", "momentum", "sgd"]
CALIBRATED_ON = "0.10.2"
"""The version of JAX whose compiler is taken where none is named."""
_REPEATED_TRACES = 256
_ARGUMENTS = {
    "argument 0": ("state", "weights", "weights"),
    "argument 1[0]": ("state", "master weights", "optimizer state"),
    "argument 1": ("state", "optimizer moments", "optimizer state"),
    "argument 2": ("state", "gradient sum", "gradients"),
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

    The step is traced once, with letters for its sizes, and kept for the next estimate of the same kind; what is asked
    for is put in their place. Kept for the backward pass is what the policy keeps of the traced program, to the byte;
    the peak is that of ``jremat.traced_peak`` on one device and rests on the ledger's ``assumptions``.

    Args:
        config: the architecture, its dtypes, dropout and attention.
        policy: of every layer, or a plan over the layers (of each pipeline stage).
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
    >>> full.kept[0].formula
    '4·L·b·h·s'
    """
    p = parallel or Parallel()
    _check(config, policy, batch, seq, chunk, optimizer, master_weights, accumulate, stack)
    p.check(config, batch, seq)
    ledgers = []
    for stage in sorted({0, p.pipeline - 1}):
        layers = p.layers_on(stage, config.num_layers)
        chosen = policy
        if stack != "chain" and isinstance(policy, LayerPlan):
            chosen = policy.uniform(layers) or policy  # a plan of one policy needs no executor
        chain = stack == "chain" or isinstance(chosen, LayerPlan)
        if chain and stack == "scan":
            raise ValueError(f"stack: a scan runs one policy for all layers, {policy.spec!r} has several")
        part = Stage(
            _kind(config, layers, seq), chosen, chain, chunk and min(chunk, seq), stage == 0, stage == p.pipeline - 1
        )
        constraints = _constraints(part, seq)
        traced = _traced(part, constraints, optimizer, master_weights, accumulate)
        ledgers.append(_Run(config, p, batch, seq, stage, traced, jax_version).ledger())
    return max(ledgers, key=lambda ledger: ledger.peak_bytes)


def _kind(config: TransformerConfig, layers: int, seq: int) -> TransformerConfig:
    """The config with the least sizes that have its kinds: equal for all that share a trace."""
    c = config
    if c.attention == "cudnn":  # a kernel of NVIDIA's keeps the same, and needs no array a block of keys
        c = replace(c, attention="blockwise", attention_block=1)
    elif c.attention == "blockwise":
        c = replace(c, attention_block=min(c.attention_block, -(-seq // 2)))
    else:
        c = replace(c, attention_block=1)
    return replace(
        c, vocab_size=1, num_layers=layers, hidden=1, heads=c.group, kv_heads=1, head_dim=2, mlp_hidden=1, max_seq=1
    )  # fmt: skip


def _constraints(stage: Stage, seq: int) -> tuple[str, ...]:
    """What holds for the sequence and what JAX couldn't decide without: whole blocks and chunks."""
    blocks = {stage.config.attention_block} if stage.config.attention == "blockwise" else set()
    blocks |= {stage.chunk} if stage.chunk else set()
    return tuple(sorted(f"s >= {n}" for n in blocks)) + tuple(
        sorted(f"mod(s,{n}) == 0" for n in blocks if seq % n == 0)
    )


@dataclass(frozen=True)
class Traced:
    """A stage's training step with letters for its sizes.

    Args:
        stage: that it was made from.
        program: of the step.
        kept: by its layers.
        recompute, forward: matmul FLOPs, of the stage's layers.
        num_params: on the stage.
        moments: whether the optimizer has a state.
    """

    stage: Stage
    program: Program
    kept: tuple[Residual, ...]
    recompute: Polynomial
    forward: Polynomial
    num_params: Polynomial
    moments: bool

    @functools.lru_cache(maxsize=_REPEATED_TRACES)  # noqa: B019 - as long as the trace itself is kept
    def timeline(self, numbers: tuple[tuple[str, int], ...], jax_version: str) -> Timeline:
        """What is alive at each step, in the order that these numbers give."""
        program = replace(self.program, jaxpr=at(self.program.jaxpr, dict(numbers)))
        peak = peak_in(program, (), jax_version)
        layers = Size(self.stage.config.num_layers, Polynomial.of("L"))
        return Timeline(peak, _ARGUMENTS, layers, self.stage.chunk is not None)


@functools.lru_cache(maxsize=_REPEATED_TRACES)
def _traced(
    stage: Stage, constraints: tuple[str, ...], optimizer: str, master_weights: bool, accumulate: int
) -> Traced:
    config, letters = lettered(stage.config, constraints)
    params, batch = stage.params(config), stage.batch(config, letters["b"], letters["s"])
    step, args = train_step(
        stage.apply(config), params, batch, optimizer=optimizer, master_weights=master_weights, accumulate=accumulate
    )
    program = capture(take_apart(step, args, {}))
    stream = jax.ShapeDtypeStruct((letters["b"], letters["s"], config.hidden), config.compute_dtype)
    layers = take_apart(stage.layers(config), (params["blocks"], stream, batch[-1]), {})
    forward = count_in(capture(layers).jaxpr)
    return Traced(
        stage,
        program,
        tuple(row for row in read_residuals(layers) if row.kind == "kept" or row.source.startswith("argument 1")),
        Polynomial.of(count_in(program.jaxpr).recompute),
        Polynomial.of(forward.model + forward.matmul.rerun),
        sum((Polynomial.product(leaf.shape) for leaf in jax.tree.leaves(params)), Polynomial()),
        optimizer != "sgd" or master_weights,
    )


@dataclass(frozen=True)
class _Run:
    """One stage of one run."""

    config: TransformerConfig
    parallel: Parallel
    batch: int
    seq: int
    stage: int
    traced: Traced
    jax_version: str

    @property
    def layers(self) -> int:
        return self.traced.stage.config.num_layers

    @functools.cached_property
    def numbers(self) -> Mapping[str, int]:
        """Of all devices together; L and P are the stage's, as the program's are."""
        return {**numbers_of(self.config, self.batch, self.seq), "L": self.layers}

    @functools.cached_property
    def own(self) -> Mapping[str, int]:
        """Of one device."""
        return self.parallel.shares(self.numbers)

    def device_bytes(self, term: Term) -> float:
        role, factors = term
        whole = Polynomial(((factors, 1),)).at(self.own)
        return whole / self.parallel.split(factors) / (self.parallel.data if self.parallel.shared(role) else 1)

    def ledger(self) -> Ledger:
        timeline = self.traced.timeline(tuple(self.own.items()), self.jax_version)
        kept = [self._kept(row) for row in self.traced.kept]
        more = list(self._more(kept))
        added = {span: sum(line.device_bytes for line, spans in more if span in spans) for span in timeline.spans}
        waits = self._head_waits(timeline)
        alive = timeline.at(self.device_bytes, added) + waits
        step = int(alive.argmax())
        phase = timeline.phases[step]
        lines: dict[tuple[str, str], Line] = {}
        for held in timeline.alive_at(step):
            line = Line(
                held.part, held.name, round(held.letters.at(self.numbers) * self._of_all(held.part, held.role)),
                round(sum(n * self.device_bytes((held.role, factors)) for factors, n in held.letters.terms)),
                self._formula(held.letters, held.role),
            )  # fmt: skip
            old = lines.get((line.part, line.name))
            if line.total_bytes:
                lines[line.part, line.name] = line if old is None else _sum(old, line)
        beside = [
            line for line, spans in more if line.device_bytes and any(timeline.spans[span][step] for span in spans)
        ]
        if np.any(waits) and waits[step]:
            formula = f"{ITEM_BYTES[self.config.param_dtype]}·v·h"
            name = "head, until its gradient is summed over devices"
            beside.append(Line("head", name, round(waits[step]), round(waits[step]), formula))
        peaks = tuple(
            (name, round(max((n for n, own in zip(alive, timeline.phases) if own == name), default=0)))
            for name in PHASES
        )
        order = ("state", "kept", "layer", "head", "other")
        c = self.config
        n_layers = c.num_layers / self.layers
        found = (*sorted(lines.values(), key=lambda line: order.index(line.part)), *beside)
        return Ledger(
            lines=found,
            kept=tuple(kept),
            symbols=(*self._symbols().items(),),
            assumptions=tuple(_assumed(self.traced.stage, self.parallel, self.jax_version)),
            devices=self.parallel.devices,
            stage=self.stage,
            recompute_flops=round(self.traced.recompute.at(self.numbers) * n_layers),
            forward_flops=round(self.traced.forward.at(self.numbers) * n_layers),
            peak_phase=phase,
            phase_bytes=peaks,
            state_bytes=sum(line.device_bytes for line in found if line.part == "state"),
        )

    def _of_all(self, part: str, role: str) -> float:
        """How many times what the stage holds there is over all stages."""
        if role in ("weights", "optimizer state", "gradients"):
            return self.config.num_params() / self.traced.num_params.at(self.numbers)
        return self.config.num_layers / self.layers if part == "kept" else 1

    def _symbols(self) -> dict[str, int]:
        names = {**self.numbers, "n": self.config.heads, "L": self.config.num_layers, "P": self.config.num_params()}
        unused = {"g"} | ({"t"} if self.config.positions != "learned" else set())
        return {name: size for name, size in names.items() if name not in unused}

    def _formula(self, letters: Polynomial, role: str) -> str:
        own = letters.at(self.numbers)
        params = self.traced.num_params.at(self.numbers)
        if role in ("weights", "optimizer state", "gradients") and own % params == 0:
            return f"{own // params}·P"
        return readable(letters, self.config.group > 1)

    def _kept(self, row: Residual) -> Line:
        letters, share = Polynomial.of(row.bytes), self.parallel.copies_in_flight(self.stage)
        role = "" if letters.letters & {"b", "s"} else "casts"
        device = sum(n * self.device_bytes((role, factors)) for factors, n in letters.terms) * share
        total = letters.at(self.numbers) * self.config.num_layers / self.layers
        if row.copies > 1:
            letters = letters // row.copies * Polynomial.of("L" if row.copies == self.layers else row.copies)
        name = row.name or ("block input" if row.kind == "input" else row.primitive)
        return Line(
            "kept", name, round(total), round(device), readable(letters, self.config.group > 1), row.decision is OFFLOAD
        )

    @functools.cached_property
    def _spread(self) -> Spread | None:
        if self.parallel.devices == 1:
            return None
        held, again = self.traced.num_params.at(self.own), dict(self.traced.recompute.terms)
        return Spread(
            self.config, self.parallel, self.own, self.traced.stage.chunk, held, self.traced.moments,
            again.get(("b", "d", "h", "m", "s"), 0) >= 2 * 2 * self.layers,
        )  # fmt: skip

    def _more(self, kept: list[Line]) -> Iterator[tuple[Line, tuple[str, ...]]]:
        """What no program of one device and one micro-batch has: collectives, and micro-batches in flight."""
        share = self.parallel.copies_in_flight(self.stage)
        flying = round(sum(line.device_bytes for line in kept if not line.on_host) * (1 - 1 / share))
        yield Line("kept", "of other micro-batches in flight", flying, flying, "kept"), PHASES
        if self._spread is not None:
            yield from self._spread.lines()

    def _head_waits(self, timeline: Timeline) -> Any:
        """By step, what of the head several devices hold longer than the program of one does."""
        if self._spread is None or not self.traced.stage.last:
            return 0
        there = timeline.of(self.device_bytes, lambda term: term[0] in ("", "gradients") and "v" in term[1])
        layers = timeline.spans["recompute"] | timeline.spans["backward"]
        return layers * (self._spread.head_bytes() - there).clip(0)


def _sum(one: Line, other: Line) -> Line:
    """Two buffers of one name as one line."""
    formula = one.formula if other.formula in one.formula.split(" + ") else f"{one.formula} + {other.formula}"
    total, device = one.total_bytes + other.total_bytes, one.device_bytes + other.device_bytes
    return replace(one, total_bytes=total, device_bytes=device, formula=formula)


def readable(letters: Polynomial, grouped: bool = True) -> str:
    """A polynomial with n for query heads, which are m groups of g."""
    return str(letters.replaced(("g", "m"), "n") if grouped else letters.replaced(("m",), "n"))


def _assumed(stage: Stage, parallel: Parallel, jax_version: str) -> Iterator[str]:
    yield f"layers run by {'the stack executor' if stage.chain else 'a scan'}; parameters are updated in place (donated)"
    yield from ASSUMPTIONS
    yield f"calibrated on programs compiled for an H200 by jax {rules_for(jax_version).jax}"
    if parallel.pipeline > 1:
        yield "pipeline: enough micro-batches to fill it; a plan over layers holds for each stage"
    if parallel.context > 1:
        yield "context: keys and values of other devices pass through, one share at a time, and are not counted"
    if parallel.devices > 1:
        yield from COLLECTIVES


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
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer: expected {' or '.join(map(repr, OPTIMIZERS))}, got {optimizer!r}")
    if master_weights and config.param_dtype == "float32":
        raise ValueError("master_weights: the weights are float32 themselves; it would only double them")
    if stack not in ("auto", "scan", "chain"):
        raise ValueError(f"stack: expected 'auto', 'scan' or 'chain', got {stack!r}")
