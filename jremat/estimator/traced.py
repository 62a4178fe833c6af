"""A training step traced once with letters for its sizes, and its ledger at any numbers and on any devices."""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jremat.estimator.collectives import ASSUMPTIONS as COLLECTIVES
from jremat.estimator.collectives import Spread
from jremat.estimator.ledger import PHASES, Ledger, Line, Part
from jremat.estimator.parallel import Parallel
from jremat.estimator.step import train_step
from jremat.estimator.timeline import Held, SymbolicTimeline, Term
from jremat.graph.arguments import take_apart
from jremat.graph.flops import count_in
from jremat.graph.letters import Polynomial, Size, at
from jremat.graph.peak import ASSUMPTIONS, peak_in
from jremat.graph.residuals import Residual, read_residuals
from jremat.graph.rules import rules_for
from jremat.graph.trace import Program, aval_bytes, capture
from jremat.jax_internals import SCAN, SIZE
from jremat.policy.decision import OFFLOAD

_STATE = ("weights", "optimizer state", "gradients")
_ARGUMENTS: Mapping[str, tuple[Part, str, str]] = {
    "argument 0": ("state", "weights", "weights"),
    "argument 1[0]": ("state", "master weights", "optimizer state"),
    "argument 1": ("state", "optimizer moments", "optimizer state"),
    "argument 2": ("state", "gradient sum", "gradients"),
}


@dataclass(frozen=True, eq=False)
class Traced:
    """A training step with letters for its sizes.

    Args:
        program: of the step.
        kept: between the layers' forward and backward pass.
        recompute, forward: matmul FLOPs of the layers.
        num_params: that the step updates.
        results: bytes of what the step returns beside its state.
        moments: whether the optimizer has a state.
        num_layers: that are stacked.
        chunked: whether the loss is a loop.
        last: whether the loss is there at all.
    """

    program: Program
    kept: tuple[Residual, ...]
    recompute: Polynomial
    forward: Polynomial
    num_params: Polynomial
    results: Polynomial
    moments: bool
    num_layers: int
    chunked: bool = False
    last: bool = True

    @property
    def letters(self) -> frozenset[str]:
        """All that are in the shapes of what is handed in."""
        shapes = (size for v in self.program.jaxpr.invars for size in getattr(v.aval, "shape", ()))
        return frozenset(letter for size in shapes for letter in Polynomial.of(size).letters)

    def timeline(self, numbers: Mapping[str, int], jax_version: str) -> SymbolicTimeline:
        """What is alive at each step, in the order that these numbers give."""
        return _timeline(self, tuple(sorted(numbers.items())), jax_version)


@functools.lru_cache(maxsize=256)
def _timeline(traced: Traced, numbers: tuple[tuple[str, int], ...], jax_version: str) -> SymbolicTimeline:
    program = replace(traced.program, jaxpr=at(traced.program.jaxpr, dict(numbers)))
    layers = Size(traced.num_layers, Polynomial.of_text("L"))
    return SymbolicTimeline(peak_in(program, (), jax_version), _ARGUMENTS, layers, traced.chunked, traced.results)


def trace_step(
    f: Callable[..., Any],
    params: Any,
    batch: tuple[Any, ...],
    out: Any,
    layers: tuple[Callable[..., Any], tuple[Any, ...]],
    layer: tuple[Callable[..., Any], tuple[Any, ...]],
    num_layers: int,
    *,
    optimizer: str = "adamw",
    master_weights: bool = False,
    accumulate: int = 1,
    chunked: bool = False,
) -> Traced:
    """Trace a step around ``f``, and its layers by themselves.

    Args:
        f: ``f(params, *batch)``, a loss or a part of a model.
        params, batch, out: shapes, in numbers or letters.
        layers: the part of ``f`` that a policy governs, of the parameters first and what goes from layer to layer next,
            and its shapes.
        layer: one of them without its policy, and its shapes.
        num_layers: that are stacked.
        optimizer, master_weights, accumulate: as of ``train_step``.
        chunked: whether the loss is a loop.
    """
    step, args = train_step(
        f, params, batch, out, optimizer=optimizer, master_weights=master_weights, accumulate=accumulate
    )
    taken, one = take_apart(*layers, {}), take_apart(*layer, {})
    with warnings.catch_warnings():  # the CPU has no host memory of its own; the device that is estimated has
        warnings.filterwarnings("ignore", ".*backend ignores", UserWarning)
        program, rows = capture(take_apart(step, args, {})), read_residuals(taken)
    forward = count_in(capture(one).jaxpr) * num_layers
    return Traced(
        program,
        tuple(row for row in rows if _is_kept(row)),
        Polynomial.of(count_in(program.jaxpr).recompute),
        Polynomial.of(forward.model + forward.matmul.rerun),
        sum((Polynomial.product(leaf.shape) for leaf in jax.tree.leaves(params)), Polynomial()),
        sum(
            (Polynomial.of(aval_bytes(leaf)) for leaf in jax.tree.leaves(out)),
            Polynomial(),
        ),
        optimizer != "sgd" or master_weights,
        num_layers,
        chunked,
        args[3] is None,
    )


def _is_kept(row: Residual) -> bool:
    """Whether layers keep it: what they made, or their input; a size as a number is there for its letter alone."""
    if row.primitive == SIZE or (row.primitive == "convert_element_type" and not row.shape):
        return False
    return row.kind == "kept" or row.source.startswith("argument 1")


@dataclass(frozen=True)
class Run:
    """A traced step at some numbers, on some devices.

    Args:
        traced: of this stage of the pipeline.
        numbers: of all devices together.
        parallel: how it is spread.
        jax_version: by whose compiler.
        stage: of the pipeline.
        num_layers, num_params: of all stages.
        spread: the collectives' buffers, None where they aren't known.
        grouped: whether heads are the product of g and m; else n is what the program calls m.
        assumptions: beside those of the peak.
    """

    traced: Traced
    numbers: Mapping[str, int]
    parallel: Parallel
    jax_version: str
    stage: int = 0
    num_layers: int = 1
    num_params: int = 0
    spread: Spread | None = None
    grouped: bool = True
    assumptions: tuple[str, ...] = ()

    @functools.cached_property
    def own(self) -> Mapping[str, int]:
        """The numbers of one device."""
        return self.parallel.shares({**self.numbers, "L": self.traced.num_layers})

    @functools.cached_property
    def _whole(self) -> Mapping[str, int]:
        return {**self.numbers, "L": self.traced.num_layers}

    @functools.cached_property
    def _stage_params(self) -> int:
        return self.traced.num_params.at(self._whole)

    def device_bytes(self, term: Term) -> float:
        """The value of a term on one device."""
        role, factors = term
        whole = Polynomial(((factors, 1),)).at(self.own)
        return whole / self.parallel.split(factors) / self.parallel.shards(role)

    def ledger(self) -> Ledger:
        """Its ledger."""
        timeline = self.traced.timeline(self.own, self.jax_version)
        kept = self.kept()
        beside = [(line, spans) for line, spans in self._beside(kept) if line.device_bytes]
        added = {span: sum(line.device_bytes for line, own in beside if span in own) for span in timeline.spans}
        waits = self._head_waits(timeline)
        alive = timeline.at(self.device_bytes, added) + waits
        step = int(alive.argmax())
        lines = list(self._lines(timeline.alive_at(step)))
        lines += [line for line, spans in beside if any(timeline.spans[span][step] for span in spans)]
        if waits[step]:
            held = round(waits[step])
            lines.append(Line("head", "head, until its gradient is summed over devices", held, held, "logits or 4·v·h"))
        order = ("state", "kept", "layer", "head", "other")
        stages = self.num_layers / self.traced.num_layers
        return Ledger(
            lines=tuple(sorted(lines, key=lambda line: order.index(line.part))),
            kept=kept,
            symbols=self._symbols(),
            assumptions=(*self.assumptions, *self._assumed()),
            devices=self.parallel.devices,
            stage=self.stage,
            recompute_flops=round(self.traced.recompute.at(self._whole) * stages),
            forward_flops=round(self.traced.forward.at(self._whole) * stages),
            peak_phase=timeline.phases[step],
            phase_bytes=tuple((name, round(max(alive[timeline.spans[name]], default=0))) for name in PHASES),
            state_bytes=round(self._state_bytes(timeline)),
        )

    def peak_bytes(self, parallel: Parallel) -> int:
        """The peak under another layout of the same stage, in the order of this one's kernels: a substitution alone."""
        timeline, other = self.traced.timeline(self.own, self.jax_version), replace(self, parallel=parallel)
        if self.spread is not None:
            held = self.traced.num_params.at(other.own)
            other = replace(other, spread=replace(self.spread, parallel=parallel, own=other.own, num_params=held))
        kept = other.kept() if parallel.pipeline > 1 else ()
        added = dict.fromkeys(timeline.spans, 0)
        for line, spans in other._beside(kept):
            added |= {span: added[span] + line.device_bytes for span in spans}
        return round((timeline.at(other.device_bytes, added) + other._head_waits(timeline)).max())

    def _state_bytes(self, timeline: SymbolicTimeline) -> float:
        """Of one device: what is there from step to step, and a gradient for each weight."""
        lasting = [
            held for held in timeline.held if held.role in _STATE and held.dies - held.born == len(timeline.phases) - 1
        ]
        gradients = [replace(held, role="gradients") for held in lasting if held.role == "weights"]
        return sum(
            n * self.device_bytes((held.role, factors))
            for held in (*lasting, *gradients)
            for factors, n in held.letters.terms
        )

    def _lines(self, alive: Iterable[Held]) -> Iterator[Line]:
        """Buffers of one name as one line."""
        letters: dict[tuple[Part, str, str], Polynomial] = {}
        for held in alive:
            key = held.part, held.name, held.role
            letters[key] = letters.get(key, Polynomial()) + held.letters
        for (part, name, role), found in letters.items():
            whole = found.at(self._whole)
            device = sum(n * self.device_bytes((role, factors)) for factors, n in found.terms)
            times = self.num_params / self._stage_params if role in _STATE else 1
            times = self.num_layers / self.traced.num_layers if part == "kept" else times
            formula, each = readable(found, self.grouped), whole / self._stage_params
            if role in _STATE and round(each) and abs(each / round(each) - 1) < 1e-3:  # beside a counter of steps
                formula = f"{round(each)}·P"
            if whole:
                yield Line(part, name, round(whole * times), round(device), formula)

    def kept(self) -> tuple[Line, ...]:
        """What the layers keep, values of one name as one line."""
        letters: dict[tuple[str, bool, str], Polynomial] = {}
        for row in self.traced.kept:
            found = Polynomial.of(row.bytes)
            role = "" if found.letters & {"b", "s"} else "casts"
            if row.copies > 1 and row.copies == self.traced.num_layers:
                found = found // row.copies * Polynomial.of_text("L")
            carried = row.kind == "input" or row.primitive == SCAN  # a loop stacks the input of each turn
            key = row.name or ("block input" if carried else row.primitive), row.decision is OFFLOAD, role
            letters[key] = letters.get(key, Polynomial()) + found
        return tuple(self._kept(name, host, role, found) for (name, host, role), found in letters.items())

    def _kept(self, name: str, host: bool, role: str, letters: Polynomial) -> Line:
        device = sum(n * self.device_bytes((role, factors)) for factors, n in letters.terms)
        device *= self.parallel.copies_in_flight(self.stage)
        total = letters.at(self._whole) * self.num_layers / self.traced.num_layers
        return Line("kept", name, round(total), round(device), readable(letters, self.grouped), host)

    def _beside(self, kept: tuple[Line, ...]) -> Iterator[tuple[Line, tuple[str, ...]]]:
        """What no program of one device and one micro-batch has: micro-batches in flight, and collectives."""
        share = self.parallel.copies_in_flight(self.stage)
        flying = round(sum(line.device_bytes for line in kept if not line.on_host) * (1 - 1 / share))
        yield Line("kept", "of other micro-batches in flight", flying, flying, "kept"), PHASES
        if self.spread is not None:
            yield from self.spread.lines()

    def _head_waits(self, timeline: SymbolicTimeline) -> Any:
        """By step, what of the head several devices hold longer than the program of one does."""
        if self.spread is None or not self.traced.last:
            return np.zeros(len(timeline.phases))
        there = timeline.of(self.device_bytes, lambda term: term[0] in ("", "gradients") and "v" in term[1])
        layers = timeline.spans["recompute"] | timeline.spans["backward"]
        return layers * (self.spread.head_bytes() - there).clip(0)

    def _symbols(self) -> tuple[tuple[str, int], ...]:
        numbers = {name: size for name, size in self.numbers.items() if name in self.traced.letters}
        if {"g", "m"} <= set(numbers):
            numbers["n"] = numbers.pop("g") * numbers["m"]
        elif not self.grouped and "m" in numbers:
            numbers["n"] = numbers.pop("m")
        return (*numbers.items(), ("L", self.num_layers), ("P", self.num_params))

    def _assumed(self) -> Iterator[str]:
        yield "parameters are updated in place (donated)"
        yield from ASSUMPTIONS
        yield f"calibrated on programs compiled for an H200 by jax {rules_for(self.jax_version).jax}"
        if self.parallel.pipeline > 1:
            yield "pipeline: enough micro-batches to fill it; a plan over layers holds for each stage"
        if self.parallel.context > 1:
            yield "context: keys and values of other devices pass through, one share at a time, and are not counted"
        if self.parallel.devices > 1:
            yield from COLLECTIVES


def readable(letters: Polynomial, grouped: bool = True) -> str:
    """A polynomial with n for query heads, which are m groups of g."""
    return str(letters.replaced(("g", "m") if grouped else ("m",), "n"))
