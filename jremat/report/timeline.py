"""What is alive at every moment of a step, by line of the ledger: the data of a picture."""

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jremat.graph.peak import Moment, PeakBuffer, PredictedMemory
from jremat.report.explain import ExplainedValue
from jremat.report.model_parts import module_of

LINES = {
    "argument": "arguments",
    "optimizer state": "optimizer state",
    "result": "results",
    "gradient": "gradients",
    "weights cast": "weights, cast",
    "kept activation": "kept for the backward pass",
    "logits and loss": "logits and loss",
    "recomputed": "recomputed",
    "activation": "work of the moment",
    "workspace": "workspace",
    "other": "other",
}
"""The lines, by what the peak calls them, in the order in which they are stacked: what stays longest at the bottom."""

MOST_BUFFERS = 1000
"""Buffers that are listed one by one, the largest; the lines hold all of them."""


@dataclass(frozen=True)
class TimelinePoint:
    """One moment.

    Args:
        alive_bytes: all lines together.
        phase: ``forward``, ``backward``, ``recompute`` or ``update``.
        operation, place, source: what runs, in which module, at which of the user's lines.
        depth: of how many loops it is inside; a loop's body is shown once.
    """

    alive_bytes: int
    phase: str
    operation: str
    place: str
    source: str
    depth: int


@dataclass(frozen=True)
class Timeline:
    """A step's memory, moment by moment.

    Args:
        peak_bytes: the most that is ever alive.
        peak_step: when.
        points: every moment, in program order.
        lines: (name, bytes at each moment), in the order in which they are stacked; they sum to ``alive_bytes``.
        buffers: the largest, each with its line and the first and last moment at which it is alive.
        untold: how many buffers are left out of ``buffers``.
        assumptions: that the prediction rests on.
    """

    peak_bytes: int
    peak_step: int
    points: tuple[TimelinePoint, ...]
    lines: tuple[tuple[str, tuple[int, ...]], ...]
    buffers: tuple[PeakBuffer, ...]
    untold: int
    assumptions: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def timeline(peak: PredictedMemory, kept: Iterable[ExplainedValue] = (), *, updates: bool = True) -> Timeline:
    """The lines of a predicted peak.

    Args:
        peak: as ``jremat.graph.peak`` predicts it.
        kept: an explanation's rows, by which the stacks of a loop get the names of what is stacked in them.
        updates: whether the step updates anything, or is a gradient alone.
    """
    moments = peak.timeline if updates else _without_update(peak.timeline)
    names = _Names(kept)
    buffers = tuple(
        replace(buffer, kind=kind, name=names.of(buffer, kind))
        for buffer in peak.buffers
        for kind in ("kept activation" if names.is_copy(buffer) else _kind(buffer, moments),)
    )
    found = {kind: _alive([b for b in buffers if b.kind == kind], len(moments)) for kind in LINES}
    listed = [sum(values) for values in zip(*found.values())]
    # What the peak counts beside buffers, such as the table of pointers in which results are handed back.
    found["other"] = [more + m.alive_bytes - sum_ for more, m, sum_ in zip(found["other"], moments, listed)]
    lines = tuple((LINES[kind], tuple(values)) for kind, values in found.items() if any(values))
    return Timeline(
        peak_bytes=peak.peak_bytes,
        peak_step=peak.peak_step,
        points=tuple(map(_point, moments)),
        lines=lines,
        buffers=buffers[:MOST_BUFFERS],
        untold=max(len(buffers) - MOST_BUFFERS, 0),
        assumptions=peak.assumptions,
    )


def thinned(found: Timeline, most: int) -> Timeline:
    """The same with at most ``most`` moments: of neighbours the one where most is alive, so the peak stays.

    >>> points = tuple(TimelinePoint(n, "forward", "", "", "", 0) for n in (1, 5, 2, 3))
    >>> thin = thinned(Timeline(5, 1, points, (("work", (1, 5, 2, 3)),), (), 0, ()), 2)
    >>> thin.lines, thin.peak_step
    ((('work', (5, 3)),), 0)
    """
    count = len(found.points)
    if count <= most:
        return found
    width = -(-count // most)
    groups = [range(start, min(start + width, count)) for start in range(0, count, width)]
    kept = [max(group, key=lambda k: found.points[k].alive_bytes) for group in groups]
    listed = []
    for buffer in found.buffers:  # alive at the first and at the last moment kept within its life
        born, dies = bisect.bisect_left(kept, buffer.born), bisect.bisect_right(kept, buffer.dies) - 1
        if born <= dies:
            listed.append(replace(buffer, born=born, dies=dies))
    return replace(
        found,
        peak_step=kept.index(found.peak_step),
        points=tuple(found.points[k] for k in kept),
        lines=tuple((name, tuple(values[k] for k in kept)) for name, values in found.lines),
        buffers=tuple(listed),
        untold=found.untold + len(found.buffers) - len(listed),
    )


def _without_update(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """What bears no scope of a derivative belongs to the pass that runs then."""
    phases = [moment.phase for moment in moments]
    turn = phases.index("backward") if "backward" in phases else len(phases)
    return tuple(
        replace(moment, phase="forward" if k < turn else "backward") if moment.phase == "update" else moment
        for k, moment in enumerate(moments)
    )


class _Names:
    """Names for buffers: of kept stacks those of the values in them, of arguments their path, short."""

    def __init__(self, kept: Iterable[ExplainedValue]) -> None:
        self.stacks: dict[Any, list[str]] = {}
        for row in kept:
            if row.fate == "kept" and row.copies > 1:
                self.stacks.setdefault(((row.copies, *row.shape), row.dtype), []).append(row.value)
        self.shapes = frozenset(self.stacks)

    def is_copy(self, buffer: PeakBuffer) -> bool:
        """Whether it is a kept stack once more, in the layout that its reader wants."""
        return buffer.name == "relaid" and (buffer.shape, buffer.dtype) in self.shapes

    def of(self, buffer: PeakBuffer, kind: str) -> str:
        """Its name; equal stacks of one loop take the names of equal shape one after the other."""
        if kind == "kept activation" and buffer.name == "scan":
            names = self.stacks.get((buffer.shape, buffer.dtype), [])
            return names.pop(0) if names else "stack of a loop"
        if self.is_copy(buffer):
            return "a kept stack, laid out anew"
        own = re.fullmatch(r"""argument \d+\[(['"])((?:argument|cotangent) .*)\1\]""", buffer.name)
        if own:
            return own[2]  # a gradient step takes its arguments by name
        path = re.fullmatch(r"argument \d+(?:\[\d+\])?(.+)", buffer.name)
        return re.sub(r"\['([^']*)'\]", r".\1", path[1]).lstrip(".") if path else buffer.name


def _kind(buffer: PeakBuffer, moments: Sequence[Moment]) -> str:
    """What the peak calls it, but kept where it waits for the backward pass, whatever made it."""
    kind = buffer.kind if buffer.kind in LINES else "other"
    later = ("backward", "recompute")
    waits = moments[min(buffer.dies, len(moments) - 1)].phase in later and moments[buffer.born].phase not in later
    return "kept activation" if kind == "activation" and waits else kind


def _alive(buffers: Sequence[PeakBuffer], steps: int) -> list[int]:
    """Bytes alive at each moment, from what is born and what dies."""
    change = [0] * (steps + 1)
    for buffer in buffers:
        change[buffer.born] += buffer.nbytes
        change[min(buffer.dies, steps - 1) + 1] -= buffer.nbytes
    alive, total = [], 0
    for more in change[:steps]:
        total += more
        alive.append(total)
    return alive


def _point(moment: Moment) -> TimelinePoint:
    return TimelinePoint(
        moment.alive_bytes, moment.phase, moment.operation, module_of(moment.scope), moment.source, moment.layer
    )


def peak_line(found: Timeline) -> str:
    """The peak in a line: where the program is then.

    >>> peak_line(Timeline(2, 0, (TimelinePoint(2, "forward", "sin", "mlp", "net.py:3 (f)", 1),), (), (), 0, ()))
    'forward, sin of mlp, net.py:3 (f), inside a loop'
    """
    if not found.points:
        return "nothing runs"
    point = found.points[found.peak_step]
    what = f"{point.operation}{f' of {point.place}' if point.place else ''}"
    loop = ", inside a loop" if point.depth else ""
    return f"{point.phase}, {what}{f', {point.source}' if point.source else ''}{loop}"
