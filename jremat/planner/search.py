"""The fastest choice that fits: predicted first, then shown by the compiler."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jremat.calibration import SEARCH
from jremat.planner.stack import Choice
from jremat.policy import LayerPlan, Policy

PeakOf = Callable[[Policy | LayerPlan], int]
"""The peak of the whole step under a plan, in bytes."""


@dataclass(frozen=True)
class Compiled:
    """A choice that was compiled.

    Args:
        choice: it.
        predicted_peak_bytes, peak_bytes: before and after.
    """

    choice: Choice
    predicted_peak_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Args:
        choice: the fastest that fits, or, where none does, the one that needs least.
        predicted_peak_bytes: before anything was compiled.
        peak_bytes: compiled; None where nothing was.
        fits: whether it does.
        lines: every choice of every line with its predicted peak, traced or between two that were.
        compiled: what the compiler was asked, in turn.
    """

    choice: Choice
    predicted_peak_bytes: int
    peak_bytes: int | None
    fits: bool
    lines: tuple[tuple[tuple[Choice, int], ...], ...]
    compiled: tuple[Compiled, ...]

    @property
    def compiles(self) -> int:
        """How many it took."""
        return len(self.compiled)

    def expected_bytes(self, choice: Choice, predicted_peak_bytes: int) -> int:
        """A choice's peak: the compiler's where it was compiled, else the prediction corrected."""
        return _corrected(choice, predicted_peak_bytes, self.compiled, SEARCH.reach)


def _corrected(choice: Choice, predicted: int, compiled: Iterable[Compiled], reach: float) -> int:
    """A prediction, corrected by the compiled peak of the nearest choice that runs as this one does.

    What a prediction misses depends on how the layers run (one loop, several loops, groups, schedules) and on how much
    they keep. So the correction is that of the nearest compiled choice of the same kind, in full where both keep as
    much, and falls to nothing where their kept bytes differ by the share ``reach`` of that choice's peak.
    """
    distance = lambda other: (other.choice.plan != choice.plan, abs(other.choice.kept_bytes - choice.kept_bytes))
    alike = (other for other in compiled if _kind(other.choice.plan) == _kind(choice.plan))
    near = min(alike, key=distance, default=None)
    if near is None:
        return predicted
    if near.choice.plan == choice.plan:
        return near.peak_bytes
    share = max(0.0, 1 - distance(near)[1] / (reach * max(1, near.predicted_peak_bytes)))
    return predicted + round(share * (near.peak_bytes - near.predicted_peak_bytes))


def _kind(plan: Policy | LayerPlan) -> tuple[bool, bool, bool]:
    """How layers run under a plan: whether in several loops, in groups, by a schedule.

    >>> from jremat.policy import FULL, NONE, Segment
    >>> mix = LayerPlan((Segment((FULL,), 3), Segment((NONE,))), label="mix:3*full,rest*none")
    >>> _kind(FULL), _kind(mix), _kind(LayerPlan((Segment((FULL,), group=3),), label="every_k:3,full"))
    ((False, False, False), (True, False, False), (False, True, False))
    """
    segments = plan.segments if isinstance(plan, LayerPlan) else ()  # a function's own rows of segments are of one kind
    several = len(segments) > 1 or any(len(segment.pattern) > 1 for segment in segments)
    return several, any(s.group > 1 for s in segments), any(s.slots is not None for s in segments)


def search(
    lines: Sequence[Sequence[Choice]],
    limit_bytes: int,
    predict: PeakOf,
    confirm: PeakOf | None,
    named: Sequence[Choice] = (),
    compiles: int = 2,
    improved: Callable[[Choice], Choice | None] = lambda _: None,
) -> Found:
    """The fastest choice, of the ``lines`` and of ``named``, whose peak is at most ``limit_bytes``.

    Kept bytes fall along a line, and the peak about with them: what lies between two traced choices is expected to lie
    between their peaks, which says which one to trace next. What the compiler says of one choice corrects the
    prediction of those that run as it does and keep about as much. The second compile is the last, but where nothing
    has fitted yet, where more than a fifth of the memory would be left over, or where a named choice is faster and
    comes within 3% of the limit.

    Args:
        lines: each fastest first, kept bytes falling; at least one, of at least one choice.
        limit_bytes: for the whole step.
        predict: without a compile.
        confirm: by the compiler; None: the prediction is the answer. Where it is there, nothing fits before it says so.
        named: further choices, in any order, e.g. policies by name.
        compiles: to spend where one of them fits and uses the memory, six at most; and one for each named choice that
            is faster and near, and one more where a named choice is the answer.
        improved: of a choice that fits, another that is faster and may need no more; None: there is none.

    >>> from jremat.policy import FULL
    >>> choices = [Choice(FULL, kept, 0, 10 - kept, 0) for kept in (9, 6, 3, 0)]
    >>> found = search([choices], 105, lambda plan: 100, lambda plan: 104)
    >>> found.choice.kept_bytes, found.peak_bytes, found.compiles
    (9, 104, 1)
    """
    state = _Search(lines, named, predict)
    if confirm is None:
        place = state.next_place(limit_bytes)
        if place is None:
            place = min(range(len(state.choices)), key=state.expected)
        return state.found(place, state.traced(place) <= limit_bytes)
    for aim in SEARCH.aims:
        best = state.fastest(k for k, peak in state.compiled.items() if peak <= limit_bytes)
        place = state.next_place(int(limit_bytes * (aim if best is None else 1)), best)
        # Where much of the memory is left over, the prediction was far off, and further compiles are worth their time.
        wasted = best is not None and place is not None and state.compiled[best] < SEARCH.used * limit_bytes
        if best is not None and len(state.compiled) >= compiles and not wasted:
            break
        # A hair too much is worth a compile where another would be left over, or where what fits is much slower.
        if best is not None and place is None:
            place = state.likeliest(int(limit_bytes * SEARCH.hair), state.seconds(best))
        if not state.compiled and place != 0:
            much_faster = np.inf if place is None else SEARCH.much_faster * state.seconds(place)
            near = state.likeliest(int(limit_bytes * SEARCH.hair), much_faster)
            place = place if near is None else near
        if place is None and best is None:
            place = state.likeliest()
            if place is not None and state.compiled and state.hopeless(place, int(SEARCH.near * limit_bytes)):
                break
        if place is None:
            break
        state.confirmed(place, confirm)
    best = state.fastest(k for k, peak in state.compiled.items() if peak <= limit_bytes)
    for place in state.order:  # no policy by name is passed over for a prediction that was a little too high
        if place == best or (best is not None and state.seconds(place) >= state.seconds(best)):
            break
        if (
            place in state.named
            and place not in state.compiled
            and not state.hopeless(place, int(SEARCH.passed_over * limit_bytes))
        ):
            state.confirmed(place, confirm)
            if state.compiled[place] <= limit_bytes:
                best = place
                break
    if best is not None and (len(state.compiled) < compiles or best in state.named):
        better = improved(state.choices[best])
        if better is not None and better.recompute_seconds < state.seconds(best):
            place = state.place_of(better)
            if place not in state.compiled and state.expected(place) <= SEARCH.hair * limit_bytes:
                state.confirmed(place, confirm)
                best = place if state.compiled[place] <= limit_bytes else best
    least = min(state.compiled, key=state.compiled.__getitem__)
    return state.found(least if best is None else best, best is not None)


class _Search:
    """What is known of each choice's peak so far."""

    def __init__(self, lines: Sequence[Sequence[Choice]], named: Sequence[Choice], predict: PeakOf):
        placed: dict[Policy | LayerPlan, tuple[Choice, int | None]] = {}  # each plan once, in its first line
        for k, line in enumerate(lines):
            for choice in line:
                placed.setdefault(choice.plan, (choice, k))
        for choice in named:
            placed.setdefault(choice.plan, (choice, None))
        self.choices = [choice for choice, _ in placed.values()]
        self.line = [k for _, k in placed.values()]
        plans = {choice.plan for choice in named}
        self.named = {k for k, plan in enumerate(placed) if plan in plans}
        self.predict = predict
        self.order = sorted(range(len(self.choices)), key=lambda k: (self.choices[k].recompute_seconds, k))
        self.predicted: dict[int, int] = {}
        self.compiled: dict[int, int] = {}
        self.peak: dict[int, int] = {}
        self.lines = [[place for place, own in enumerate(self.line) if own == k] for k in range(len(lines))]
        for places in self.lines:
            for end in places[:1] + places[-1:]:
                self.traced(end)

    def place_of(self, choice: Choice) -> int:
        """The place of a choice, which is added where it has none."""
        known = next((k for k, other in enumerate(self.choices) if other.plan == choice.plan), None)
        if known is None:
            self.choices.append(choice)
            self.line.append(None)
        return len(self.choices) - 1 if known is None else known

    def traced(self, place: int) -> int:
        if place not in self.predicted:
            self.predicted[place] = self.peak[place] = self.predict(self.choices[place].plan)
            own = self.line[place]
            if own is not None:
                self._draw(self.lines[own])
        return self.predicted[place]

    def _draw(self, places: Sequence[int]) -> None:
        """A peak for every choice of a line: what lies between two that were traced lies between their peaks."""
        known = [place for place in reversed(places) if place in self.predicted]  # fewest kept bytes first
        kept = lambda some: [self.choices[place].kept_bytes for place in some]
        between = np.interp(kept(places), kept(known), [self.predicted[place] for place in known])
        self.peak |= {k: self.predicted.get(k, int(peak)) for k, peak in zip(places, between)}

    def confirmed(self, place: int, confirm: PeakOf) -> None:
        self.traced(place)
        self.compiled[place] = confirm(self.choices[place].plan)

    def expected(self, place: int) -> int:
        """Peak bytes, corrected by the nearest compile of the same kind, however far: a guess at what to compile."""
        peak = self.traced(place) if self.line[place] is None else self.peak[place]
        return _corrected(self.choices[place], peak, self.proofs(), np.inf)

    def proofs(self) -> tuple[Compiled, ...]:
        return tuple(Compiled(self.choices[k], self.predicted[k], peak) for k, peak in self.compiled.items())

    def seconds(self, place: int) -> float:
        """What it recomputes, in the unit of the cost."""
        return self.choices[place].recompute_seconds

    def next_place(self, aim: int, best: int | None = None) -> int | None:
        """The fastest choice, faster than ``best``, that is expected to need at most so much and wasn't compiled."""
        for place in self.order:
            if place == best:
                break
            while place not in self.compiled and self.expected(place) <= aim:
                if place in self.predicted:
                    return place
                self.traced(place)
        return None

    def likeliest(self, aim: float = np.inf, seconds: float = np.inf) -> int | None:
        """Of the choices that take less than so long and weren't compiled, the one that is expected to need least; none
        if that is more than ``aim``."""
        left = [k for k in self.order if k not in self.compiled and self.seconds(k) < seconds]
        least = min(left, key=self.expected, default=None)
        return None if least is None or self.expected(least) > aim else least

    def hopeless(self, place: int, most_bytes: int) -> bool:
        """Whether both the prediction and what corrects it say that it needs more than that."""
        return min(self.expected(place), self.traced(place)) > most_bytes

    def fastest(self, places: Iterable[int]) -> int | None:
        """Of some choices the one that recomputes least."""
        return min(places, key=self.order.index, default=None)

    def found(self, place: int, fits: bool) -> Found:
        peak = self.compiled.get(place)
        lines = tuple(tuple((self.choices[k], self.peak[k]) for k in places) for places in self.lines)
        return Found(self.choices[place], self.traced(place), peak, fits, lines, self.proofs())
