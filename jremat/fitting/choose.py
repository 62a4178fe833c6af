"""Which segments, and what each keeps: a dynamic program over the places to cut, under the peak.

A segment is left alone, or rematted with a point of its frontier. From the first segment to the last, what is held for
the backward pass grows; the backward pass of a segment needs that, what the segment itself stores or recomputes, and
cotangents. For a limit on that sum the fastest row of segments is a shortest path whose state is the bytes held.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from jremat.fitting.cuts import Lives, lives, narrow_points
from jremat.fitting.read import Reading
from jremat.planner.cut import Network, reduced

# Prices of a byte at which segments are solved, over the forward pass's seconds a stored byte: from where almost all is
# kept to where nothing is.
_PRICES = 1e-3, 0.03, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.4, 2.0, 3.0, 6.0, 1e3
_MOST_CUTS, _LONGEST, _WIDTH = 64, 16, 256


@dataclass(frozen=True)
class ProgramSegment:
    """Consecutive equations under one decision.

    Args:
        start, end: of its equations, the second exclusive.
        kept: marks of what is kept of it; None: it is left alone.
        held_bytes: that it adds to what is alive until its backward pass.
        own_bytes: that its backward pass needs beside what earlier segments hold.
        seconds: of recompute.
        flops: of recomputed matmuls.
        inside: the loops and branches in it whose bodies are planned.
    """

    start: int
    end: int
    kept: frozenset[str] | None
    held_bytes: int
    own_bytes: int
    seconds: float
    flops: int = 0
    inside: "tuple[Inside, ...]" = ()


@dataclass(frozen=True)
class SegmentRow:
    """Segments of a whole function, in order.

    Args:
        segments: all of its equations.
    """

    segments: tuple[ProgramSegment, ...]

    @cached_property
    def peak_bytes(self) -> int:
        """The most that any backward pass of a segment needs, arguments and results left out."""
        held = np.cumsum([0, *(s.held_bytes for s in self.segments[:-1])])
        return int(max((h + s.own_bytes for h, s in zip(held, self.segments)), default=0))

    @property
    def seconds(self) -> float:
        """Of recompute."""
        return sum(s.seconds for s in self.segments)

    @property
    def flops(self) -> int:
        """Of recomputed matmuls."""
        return sum(s.flops for s in self.segments)


@dataclass(frozen=True)
class Inside:
    """A loop or a branch, its bodies run as rows of segments.

    Args:
        equation: its place.
        rows: of each body.
        group: iterations that are replayed together from the carry before them; 1: each by itself.
        held_bytes: that all iterations keep for the backward pass.
        own_bytes: that the backward pass of one iteration needs beside.
        seconds: of recompute, in all iterations.
        flops: of recomputed matmuls.
    """

    equation: int
    rows: tuple[SegmentRow, ...]
    group: int
    held_bytes: int
    own_bytes: int
    seconds: float
    flops: int

    @property
    def as_it_is(self) -> bool:
        """Whether nothing in it is rematted."""
        return self.group == 1 and all(s.kept is None and not s.inside for row in self.rows for s in row.segments)


@dataclass(frozen=True)
class _Point:
    """A choice for the nodes of a segment: places of what is kept, its bytes, and what is run again."""

    kept: tuple[int, ...]
    nbytes: int
    seconds: float
    flops: int


class Choices:
    """Every segment that a row can be made of, each solved once with all that equal it.

    Args:
        reading: of the function, or of a loop's body.
        inside: what can be chosen for the bodies of a loop or branch, by its place, as it is first.
        in_loop: whether it is a body, which waits for its backward pass: its last segment can be rematted too.
    """

    def __init__(
        self,
        reading: Reading,
        most_cuts: int = _MOST_CUTS,
        inside: Mapping[int, Sequence[Inside]] = MappingProxyType({}),
        in_loop: bool = False,
    ):
        jaxpr = reading.program.jaxpr
        count = len(jaxpr.eqns)
        stored = np.zeros(count + 1, np.int64)
        np.add.at(stored, reading.equation + 1, reading.stored)
        self.reading = reading
        self.stored = np.cumsum(stored)  # by the equations before each
        self.lives: Lives = lives(jaxpr)
        self.cotangents = np.concatenate([[0], self.lives.cotangents(count)])  # before each equation
        places = narrow_points(self.lives.crossing(count), self.stored[1:].astype(float), most_cuts)
        around = {k + after for k in inside for after in (0, 1)}
        self.inside, self.in_loop = inside, in_loop
        self.bounds = sorted({0, *places, *around, count})
        self.scratch = np.array([reading.scratch[a:b].max(initial=0) for a, b in pairwise(self.bounds)], np.int64)
        marked = {node.mark: place for place, node in enumerate(reading.nodes) if node.mark}
        self.node_of = {  # value id -> the node that it is kept as
            c.value.id: marked[own] for m, c in reading.places.items() if (own := reading.aliases.get(m, m)) in marked
        }
        leaving = {place for start, end in pairwise(self.bounds) for place in self._leaving(start, end)[1]}
        units = np.searchsorted(self.bounds, reading.equation, "right")
        small = reduced(reading.nodes, units.tolist(), leaving)
        self.nodes, self.origin = tuple(small.values()), np.array([*small], np.int64)
        self.network = Network.of(self.nodes)
        self.flops = np.array([node.matmul_flops for node in self.nodes], np.int64)
        self.starts = np.searchsorted(reading.equation[self.origin], self.bounds)
        even = reading.forward_seconds / max(1, int(reading.stored.sum()))
        self.prices = tuple(even * factor for factor in _PRICES)
        self.solved: dict[bytes, tuple[_Point, ...]] = {}
        pieces = len(self.bounds) - 1
        self.between = {
            (low, high): self._options(low, high) for low in range(pieces) for high in range(low + 1, pieces + 1)
        }

    def _leaving(self, start: int, end: int) -> tuple[int, set[int]]:
        """Bytes and nodes of the values that equations make for later ones."""
        which = self.lives.leaving(start, end)
        ids = (f"{made}:{k}" if k else f"{made}" for made, k in zip(self.lives.made[which], self.lives.place[which]))
        return int(self.lives.nbytes[which].sum()), {self.node_of[id] for id in ids if id in self.node_of}

    def _options(self, low: int, high: int) -> tuple[ProgramSegment, ...]:
        start, end = self.bounds[low], self.bounds[high]
        outs, leaving = self._leaving(start, end)
        held = self._between(start, end) + max(0, outs - self._stored_among(leaving))
        scratch = self.reading.scratch
        loops = [self.inside[k] for k in self.inside if start <= k < end]
        within = max((choices[0].own_bytes for choices in loops), default=0)
        ends = self.bounds[low + 1 : high + 1]
        growing = self.stored[ends] - self.stored[start] + self.cotangents[ends] + self.scratch[low:high]
        alone = within + max(held + int(self.cotangents[end]), int(growing.max()) + held - self._between(start, end))
        found = [ProgramSegment(start, end, None, held, alone, 0.0)]
        only = loops[0] if end == start + 1 and loops else ()
        for choice in only[1:]:
            keeps = outs + choice.held_bytes
            own = keeps + choice.own_bytes + int(self.cotangents[end] + scratch[start])
            found.append(ProgramSegment(start, end, None, keeps, own, choice.seconds, choice.flops, (choice,)))
        length = high - low
        last = high == len(self.bounds) - 1 and not self.in_loop
        if not last and (length <= 6 or (length <= _LONGEST and not length % 2)) and not self._decides(start, end):
            need = held + int(self.cotangents[end] + scratch[start:end].max(initial=0))
            first = self.starts[low]
            every: list[tuple[Inside, ...]] = [(choice,) for choice in only]
            every = every or [tuple(c[0] for c in loops), tuple(_leanest(c) for c in loops)]
            for point in self._points(first, self.starts[high], leaving):
                names = frozenset(str(self.nodes[first + k].mark) for k in point.kept)
                keeps = point.nbytes + outs
                for chosen in dict.fromkeys(every):
                    less = sum(self.inside[c.equation][0].held_bytes - c.held_bytes for c in chosen)
                    own = max(need - less + max((c.own_bytes for c in chosen), default=0), keeps)
                    seconds = point.seconds + sum(c.seconds for c in chosen)
                    flops = point.flops + sum(c.flops for c in chosen)
                    planned = tuple(c for c in chosen if not c.as_it_is)
                    found.append(ProgramSegment(start, end, names, keeps, own, seconds, flops, planned))
        return tuple(found)

    def _between(self, start: int, end: int) -> int:
        """Bytes that equations store for the backward pass, as it is."""
        return int(self.stored[end] - self.stored[start])

    def _decides(self, start: int, end: int) -> bool:
        """Whether a choice by value is made inside of a loop or a kernel among these equations."""
        return bool(self.reading.decides[start:end].any())

    def _stored_among(self, nodes: set[int]) -> int:
        """Bytes of the values that leave a segment which XLA stores anyway."""
        total = 0
        for place in nodes:
            at = place
            while not self.reading.stored[at] and self.reading.nodes[at].is_tag:
                at = self.reading.nodes[at].reads[0]
            total += int(self.reading.stored[at])
        return total

    def _points(self, first: int, last: int, leaving: set[int]) -> tuple[_Point, ...]:
        """What is worth keeping of the nodes of a segment; what leaves it is there anyway."""
        whole, own = self.network, slice(first, last)
        edges = slice(*np.searchsorted(whole.readers, (first, last)))
        inside = whole.reads[edges] >= first
        part = Network(
            whole.seconds[own],
            np.where(np.isin(self.origin[own], [*leaving]), 0.0, whole.nbytes[own]),
            whole.marked[own],
            whole.forced[own],
            whole.needed[own],
            whole.readers[edges][inside] - first,
            whole.reads[edges][inside] - first,
        )
        key = b"|".join(getattr(part, field.name).tobytes() for field in fields(part))
        if key not in self.solved:
            self.solved[key] = _frontier(part, self.flops[own], self.prices)
        return self.solved[key]

    @property
    def as_it_is(self) -> SegmentRow:
        """Everything left alone."""
        return SegmentRow(self.between[0, len(self.bounds) - 1][:1] if len(self.bounds) > 1 else ())

    def row(self, limit_bytes: float) -> SegmentRow | None:
        """The fastest row of segments whose modelled peak is at most so much; None where there is none."""
        return next(iter(self.frontier(limit_bytes)), None)

    def frontier(self, limit_bytes: float = np.inf) -> Iterator[SegmentRow]:
        """The rows whose modelled peak is at most so much, fastest first: each next one holds less when all is done."""
        held, spent = [np.zeros(1, np.int64)], [np.zeros(1)]
        back: list[list[tuple[int, int, ProgramSegment]]] = [[]]
        for high in range(1, len(self.bounds)):
            columns = []
            for low in range(high):
                for segment in self.between[low, high]:
                    fits = np.flatnonzero(held[low] + segment.own_bytes <= limit_bytes)
                    if len(fits):
                        columns.append((low, segment, fits))
            nbytes = np.concatenate([held[low][fits] + s.held_bytes for low, s, fits in columns] or [held[0][:0]])
            seconds = np.concatenate([spent[low][fits] + s.seconds for low, s, fits in columns] or [spent[0][:0]])
            column = np.repeat(np.arange(len(columns)), [len(fits) for _, _, fits in columns])
            state = np.concatenate([fits for _, _, fits in columns] or [column])
            best = _best(nbytes, seconds)
            held.append(nbytes[best])
            spent.append(seconds[best])
            back.append([(columns[column[k]][0], int(state[k]), columns[column[k]][1]) for k in best])
        for end in np.argsort(spent[-1], kind="stable"):
            segments: list[ProgramSegment] = []
            at, place = len(self.bounds) - 1, int(end)
            while at:
                at, place, segment = back[at][place]
                segments.append(segment)
            yield SegmentRow(_joined(segments[::-1]))

    def least(self) -> SegmentRow:
        """The row of least modelled peak."""
        best = self.row(np.inf)
        assert best is not None, "without a limit everything fits"
        low, high = 0, best.peak_bytes
        while high - low > high // 200:
            middle = (low + high) // 2
            found = self.row(middle)
            low, high = (middle, high) if found is None else (low, min(middle, found.peak_bytes))
            best = found or best
        return best


def _leanest(choices: Sequence[Inside]) -> Inside:
    """The choice that needs least where its loop is run again."""
    return min(choices, key=lambda choice: (choice.held_bytes + choice.own_bytes, choice.seconds))


def _best(nbytes: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Places of the states that no other beats in both, thinned out to about ``_WIDTH``."""
    if not len(nbytes):
        return np.zeros(0, np.int64)
    order = np.lexsort((nbytes, seconds))
    least = np.minimum.accumulate(nbytes[order])
    best = order[np.concatenate([[True], least[1:] < least[:-1]])]  # slower and holding less each time
    if len(best) > _WIDTH:
        bucket = nbytes[best] * _WIDTH // (int(nbytes[best].max()) + 1)
        best = best[np.concatenate([[True], bucket[1:] != bucket[:-1]])]
    return best


def _joined(segments: Sequence[ProgramSegment]) -> tuple[ProgramSegment, ...]:
    """Neighbours that are left alone as one."""
    found: list[ProgramSegment] = []
    for segment in segments:
        if found and found[-1].kept is None and segment.kept is None:
            last = found.pop()
            own = max(last.own_bytes, last.held_bytes + segment.own_bytes)
            segment = replace(
                segment,
                start=last.start,
                held_bytes=last.held_bytes + segment.held_bytes,
                own_bytes=own,
                seconds=last.seconds + segment.seconds,
                flops=last.flops + segment.flops,
                inside=(*last.inside, *segment.inside),
            )
        found.append(segment)
    return tuple(found)


def _frontier(network: Network, flops: np.ndarray, prices: Sequence[float]) -> tuple[_Point, ...]:
    """The best choices at some prices, fastest first."""
    found = set()
    for price in prices:
        kept, again, _ = network.sides(price)
        places = tuple(np.flatnonzero(kept).tolist())
        figures = int(network.nbytes[kept].sum()), float(network.seconds[again].sum()), int(flops[again].sum())
        found.add(_Point(places, *figures))
    points: list[_Point] = []
    for point in sorted(found, key=lambda p: (p.seconds, p.nbytes)):
        if not points or point.nbytes < points[-1].nbytes:
            points.append(point)
    return tuple(points)
