"""What is alive at each step of a program, as polynomials in its sizes: one trace, then any number of layouts.

The order of the kernels and the life of each buffer are those of ``jremat.graph.peak`` at one set of numbers; the bytes
are letters still. So a layout of devices is a substitution and one matrix product.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jremat.estimator.ledger import PHASES, Part, Phase
from jremat.graph.letters import Polynomial, Size, bytes_of
from jremat.graph.peak import PeakBuffer, PredictedMemory

Role = str
"""What a buffer is to ZeRO: ``weights``, ``optimizer state``, ``gradients``, or nothing that replicas can share out."""
Term = tuple[Role, tuple[str, ...]]
"""A product of letters in the bytes of buffers of one role."""


@dataclass(frozen=True)
class Held:
    """One buffer.

    Args:
        part, name: of the ledger's line that it belongs to.
        role: see ``Role``.
        letters: its bytes.
        born, dies: first and last step at which it is alive.
    """

    part: Part
    name: str
    role: Role
    letters: Polynomial
    born: int
    dies: int


class SymbolicTimeline:
    """The buffers of a program at every step.

    Args:
        peak: predicted from a program whose sizes remember their letters.
        arguments: the beginning of an argument's path -> the part, name and role of its buffers.
        layers: how many are stacked.
        chunked: whether the loss is a loop too.
        results: bytes of what is returned beside the state.
    """

    def __init__(
        self,
        peak: PredictedMemory,
        arguments: Mapping[str, tuple[Part, str, Role]],
        layers: Size,
        chunked: bool,
        results: Polynomial,
    ):
        self.held = tuple(_held(buffer, arguments, layers) for buffer in peak.buffers if buffer.nbytes)
        steps = len(peak.timeline)
        self.held += (Held("other", "results", "", results, 0, steps - 1),)
        self.phases: Sequence[Phase] = _phases(peak, chunked)
        mlp = _in_mlp(peak, self.phases)
        self.spans = {phase: np.array([own == phase for own in self.phases]) for phase in PHASES} | {"mlp": mlp}
        """By phase, and for the backward pass of the layers' MLP, the steps that belong to it."""
        self.terms: tuple[Term, ...] = tuple(
            {(held.role, factors): None for held in self.held for factors, _ in held.letters.terms}
        )
        place = {term: k for k, term in enumerate(self.terms)}
        changes = np.zeros((steps + 1, len(self.terms)))
        for held in self.held:
            for factors, n in held.letters.terms:
                changes[held.born, place[held.role, factors]] += n
                changes[held.dies + 1, place[held.role, factors]] -= n
        self.alive = changes[:-1].cumsum(0)
        """Bytes at each step over the value of each term."""

    def at(self, value: Callable[[Term], float], added: Mapping[str, float]) -> np.ndarray:
        """Bytes alive at each step.

        Args:
            value: of each term, on one device.
            added: bytes beside the buffers, by the span in which they are alive.
        """
        alive = self.of(value, lambda term: True)
        for span, nbytes in added.items():
            alive += nbytes * self.spans[span]
        return alive

    def of(self, value: Callable[[Term], float], chosen: Callable[[Term], bool]) -> np.ndarray:
        """The same of some terms alone."""
        return self.alive @ np.array([value(term) if chosen(term) else 0.0 for term in self.terms])

    def alive_at(self, step: int) -> tuple[Held, ...]:
        """The buffers alive at a step."""
        return tuple(held for held in self.held if held.born <= step <= held.dies)


def _phases(peak: PredictedMemory, chunked: bool) -> Sequence[Phase]:
    """The phase of each step; kernels without a scope between two of the backward pass are its own."""
    phases = [moment.phase for moment in peak.timeline]
    named = [k for k, phase in enumerate(phases) if phase != "update"]
    before = "forward"
    for k in range(named[-1] + 1 if named else 0):
        phases[k] = before = before if phases[k] == "update" else phases[k]
    back = [k for k, phase in enumerate(phases) if phase in ("recompute", "backward")]
    loops = [k for k in back if peak.timeline[k].layer]
    if chunked:  # the first loop is the loss's
        loops = [k for place, k in enumerate(loops) if k - place != loops[0]]
    for k in back:
        if loops and k < loops[0]:
            phases[k] = "head"
    return phases  # type: ignore[return-value]


def _in_mlp(peak: PredictedMemory, phases: Sequence[Phase]) -> np.ndarray:
    """Which steps are of the backward pass of an MLP, by its scope; all of the layers' where none has it."""
    inside, found = False, []
    for moment, phase in zip(peak.timeline, phases):
        inside = phase == "backward" and ("mlp" in moment.scope if moment.scope else inside)
        found.append(inside)
    return np.array(found if any(found) else [phase == "backward" for phase in phases])


_PARTS: Mapping[str, Part] = {"kept activation": "kept", "logits and loss": "head"}


def _held(buffer: PeakBuffer, arguments: Mapping[str, tuple[Part, str, Role]], layers: Size) -> Held:
    stacked = type(buffer.shape[0]) is int and buffer.shape[0] == layers if buffer.shape else False  # not by chance
    letters = bytes_of((layers, *buffer.shape[1:]) if stacked else buffer.shape, buffer.nbytes)
    place = functools.partial(Held, letters=letters, born=buffer.born, dies=buffer.dies)
    if buffer.kind in ("argument", "optimizer state"):
        for head, (part, name, role) in arguments.items():
            if buffer.name.startswith(head):
                return place(part, name, role)
        return place("other", "batch", "")
    of_batch = bool(letters.letters & {"b", "s"})
    if buffer.kind == "gradient" and not of_batch:
        return place("state", "gradients", "gradients")
    role = "casts" if buffer.kind == "kept activation" and not of_batch else ""
    part = _PARTS.get(buffer.kind, "layer")
    return place(part, "kept activations" if part == "kept" else f"{buffer.kind}: {buffer.name}", role)
