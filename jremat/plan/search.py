"""The fastest choice that fits: predicted first, then shown by the compiler."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jremat.plan.stack import Choice
from jremat.policy import LayerPlan, Policy

PeakOf = Callable[[Policy | LayerPlan], int]
"""The peak of the whole step under a plan, in bytes."""


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Args:
        choice: the fastest that fits, or, where none does, the one that needs least.
        predicted_peak_bytes: before anything was compiled.
        peak_bytes: compiled; None where nothing was.
        fits: whether it does.
        predicted: place among the choices -> peak bytes, of those whose step was traced.
        compiles: how many it took.
    """

    choice: Choice
    predicted_peak_bytes: int
    peak_bytes: int | None
    fits: bool
    predicted: Mapping[int, int]
    compiles: int


def search(
    choices: Sequence[Choice],
    limit_bytes: int,
    predict: PeakOf,
    confirm: PeakOf | None,
    named: Sequence[Choice] = (),
    compiles: int = 2,
) -> Found:
    """The fastest of ``choices`` and ``named`` whose peak is at most ``limit_bytes``.

    Kept bytes fall along the choices, and the peak about with them: a line between traced choices says which one to
    trace next. What the compiler says of one choice corrects the prediction of all by the difference, since what a
    prediction misses (workspace, fragmentation) hardly depends on the plan: so the second compile is the last, but
    where nothing has fitted yet, where more than 7% of the memory would be left over, or where a named choice is faster
    and comes within 3% of the limit.

    Args:
        choices: fastest first, kept bytes falling; at least one.
        limit_bytes: for the whole step.
        predict: without a compile.
        confirm: by the compiler; None: the prediction is the answer. Where it is there, nothing fits before it says so.
        named: further choices, in any order, e.g. policies by name.
        compiles: to spend where one of them fits and uses the memory; six at most, and one for each named choice that
            is faster and near.

    >>> from jremat.policy import FULL
    >>> choices = [Choice(FULL, kept, 0, 10 - kept, 0) for kept in (9, 6, 3, 0)]
    >>> found = search(choices, 105, lambda plan: 100, lambda plan: 104)
    >>> found.choice.kept_bytes, found.peak_bytes, found.compiles
    (9, 104, 1)
    """
    plans = {choice.plan for choice in choices}
    others = {choice.plan: choice for choice in named if choice.plan not in plans}
    state = _Search([*choices, *others.values()], len(choices), predict)
    for end in (0, len(choices) - 1):
        state.traced(end)
    if confirm is None:
        place = state.next_place(limit_bytes)
        if place is None:
            place = min(range(len(state.choices)), key=state.expected)
        return state.found(place, state.traced(place) <= limit_bytes)
    for aim in _AIMS:
        best = state.fastest(k for k, peak in state.compiled.items() if peak <= limit_bytes)
        place = state.next_place(int(limit_bytes * (aim if best is None else 1)), best)
        # Where much of the memory is left over, the prediction was off, and further compiles are worth their time.
        wasted = best is not None and place is not None and state.compiled[best] < _USED * limit_bytes
        if best is not None and len(state.compiled) >= compiles and not wasted:
            break
        # A hair too much is worth a compile where another would be left over, or where what fits is much slower.
        if best is not None and place is None:
            place = state.likeliest(int(limit_bytes * _HAIR), state.seconds(best))
        if not state.compiled and place != 0:
            much_faster = np.inf if place is None else _MUCH * state.seconds(place)
            near = state.likeliest(int(limit_bytes * _HAIR), much_faster)
            place = place if near is None else near
        if place is None and best is None:
            place = state.likeliest()
            if place is not None and state.compiled and state.hopeless(place, int(_NEAR * limit_bytes)):
                break
        if place is None:
            break
        state.compiled[place] = confirm(state.choices[place].plan)
    best = state.fastest(k for k, peak in state.compiled.items() if peak <= limit_bytes)
    for place in state.order:  # no policy by name is passed over for a prediction that was a little too high
        if place == best or (best is not None and state.seconds(place) >= state.seconds(best)):
            break
        if (
            place >= state.own
            and place not in state.compiled
            and not state.hopeless(place, int(_PASSED_OVER * limit_bytes))
        ):
            state.compiled[place] = confirm(state.choices[place].plan)
            if state.compiled[place] <= limit_bytes:
                best = place
                break
    least = min(state.compiled, key=state.compiled.__getitem__)
    return state.found(least if best is None else best, best is not None)


_HAIR, _PASSED_OVER, _MUCH, _NEAR, _USED = 1.015, 1.03, 0.8, 1.2, 0.93
_AIMS = 1, 0.996, 0.985, 0.96, 0.9, 0
"""Shares of the limit that a choice is expected to need at most, compile by compile as long as none fits: of 77 steps
half are predicted to within 0.3%, and what is left of that after a correction is less."""


class _Search:
    """What is known of each choice's peak so far."""

    def __init__(self, choices: Sequence[Choice], own: int, predict: PeakOf):
        self.choices, self.own, self.predict = choices, own, predict
        self.order = sorted(range(len(choices)), key=lambda k: (choices[k].recompute_seconds, k))
        self.predicted: dict[int, int] = {}
        self.compiled: dict[int, int] = {}

    def traced(self, place: int) -> int:
        if place not in self.predicted:
            self.predicted[place] = self.predict(self.choices[place].plan)
        return self.predicted[place]

    def expected(self, place: int) -> int:
        """Peak bytes, corrected by what the compiler said of the choice that keeps about as much."""
        if place in self.predicted or place >= self.own:
            peak = self.traced(place)
        else:
            peak = peaks_between(self.choices[: self.own], self.frontier())[place]
        kept = self.choices[place].kept_bytes
        near = min(self.compiled, key=lambda k: abs(self.choices[k].kept_bytes - kept), default=None)
        return peak if near is None else peak + self.compiled[near] - self.traced(near)

    def frontier(self) -> dict[int, int]:
        """The traced peaks of the choices along which kept bytes fall."""
        return {k: peak for k, peak in self.predicted.items() if k < self.own}

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
        return Found(self.choices[place], self.traced(place), peak, fits, self.frontier(), len(self.compiled))


def peaks_between(choices: Sequence[Choice], predicted: Mapping[int, int]) -> tuple[int, ...]:
    """A peak for every choice: the traced ones, and a line in kept bytes between them.

    >>> from jremat.policy import FULL
    >>> peaks_between([Choice(FULL, kept, 0, 0, 0) for kept in (9, 6, 0)], {0: 190, 2: 100})
    (190, 160, 100)
    """
    places = sorted(predicted, reverse=True)  # fewest kept bytes first, as interpolation wants them
    kept = [choice.kept_bytes for choice in choices]
    line = np.interp(kept, [kept[k] for k in places], [predicted[k] for k in places])
    return tuple(predicted.get(k, int(peak)) for k, peak in enumerate(line))
