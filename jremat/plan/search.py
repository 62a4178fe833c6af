"""The fastest choice that fits: predicted first, then shown by the compiler."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jremat.plan.stack import Choice
from jremat.policy import LayerPlan, Policy

PeakOf = Callable[[Policy | LayerPlan], int]
"""The peak of the whole step under a plan, in bytes."""


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Args:
        place: of the fastest choice that fits, or, where none does, of the one compiled to least.
        predicted: place -> peak bytes, of the choices whose step was traced.
        compiled: place -> peak bytes, of the choices whose step was compiled.
        fits: whether the choice does.
    """

    place: int
    predicted: Mapping[int, int]
    compiled: Mapping[int, int]
    fits: bool


def search(
    choices: Sequence[Choice], limit_bytes: int, predict: PeakOf, confirm: PeakOf | None, compiles: int = 2
) -> Found:
    """The fastest of ``choices`` whose peak is at most ``limit_bytes``.

    Kept bytes fall along the choices, and the peak about with them: a line between traced choices says which one to
    trace next. What the compiler says of one choice corrects the prediction of all by the difference, since what a
    prediction misses (workspace, fragmentation) hardly depends on the plan. Where a compiler is there, no answer
    stands that it hasn't confirmed: if the last compile allowed doesn't fit, further ones go on down the choices.

    Args:
        choices: fastest first, kept bytes falling; at least one.
        limit_bytes: for the whole step.
        predict: without a compile.
        confirm: by the compiler; None: the prediction is the answer.
        compiles: to spend where one of them fits; more where much of the memory is left over or nothing fits so far.

    >>> from jremat.policy import FULL
    >>> choices = [Choice(FULL, kept, 0, 10 - kept, 0) for kept in (9, 6, 3, 0)]
    >>> found = search(choices, 105, lambda plan: 100, lambda plan: 104)
    >>> choices[found.place].kept_bytes, found.compiled
    (9, {0: 104})
    """
    predicted: dict[int, int] = {}
    compiled: dict[int, int] = {}

    def fitting() -> int | None:
        """The fastest choice that the compiler found to fit."""
        return min((k for k, peak in compiled.items() if peak <= limit_bytes), default=None)

    def aim() -> int:
        """What the next choice is expected to need at most: a little less where a compile came out too large and none
        has fitted yet, a little more where one has and a better one is looked for."""
        if fitting() is not None:
            return int(limit_bytes * _WORTH_A_TRY)
        return int(limit_bytes * _AFTER_A_MISS) if compiled else limit_bytes

    def traced(k: int) -> int:
        if k not in predicted:
            predicted[k] = predict(choices[k].plan)
        return predicted[k]

    def expected(k: int) -> int:
        """Peak bytes, corrected by what the compiler said of the nearest choice."""
        near = min(compiled, key=lambda j: abs(j - k), default=None)
        return peaks_between(choices, predicted)[k] + (compiled[near] - traced(near) if near is not None else 0)

    def next_place() -> int | None:
        """The choice to compile next: the fastest that is expected to fit; of those faster than one that does, if none
        is, the likeliest; where nothing is expected to fit, what is expected to need least."""
        while True:
            best = fitting()
            left = [k for k in range(len(choices) if best is None else best) if k not in compiled]
            peaks = {k: expected(k) for k in left}
            least = min(left, key=lambda k: peaks[k], default=None)
            k = next((k for k in left if peaks[k] <= min(aim(), limit_bytes)), least)
            if k is None or (best is not None and peaks[k] > aim()):
                return None
            if k in predicted:
                return k
            traced(k)

    for end in (0, len(choices) - 1):
        traced(end)
    if confirm is None:
        k = next_place()
        assert k is not None, "nothing was compiled, so there is a next"
        return Found(k, predicted, compiled, predicted[k] <= limit_bytes)
    while (k := next_place()) is not None:
        best = fitting()
        # Where much of the memory is left over, the prediction was off, and further compiles are worth their time.
        wasted = best is not None and compiled[best] < _USED * limit_bytes and expected(k) <= limit_bytes
        if best is not None and len(compiled) >= compiles + wasted * _MORE:
            break
        hopeless = min(expected(k), traced(k)) > _NEAR * limit_bytes
        if compiled and (hopeless or len(compiled) >= compiles + _MORE):
            break
        compiled[k] = confirm(choices[k].plan)
    best = fitting()
    least = min(compiled, key=lambda j: compiled[j])
    return Found(least if best is None else best, predicted, compiled, best is not None)


_AFTER_A_MISS, _WORTH_A_TRY = 0.995, 1.01
"""Shares of the limit: of 77 steps half are predicted to within 0.6%, and what is left of that after a correction is
less."""
_USED = 0.93
_MORE, _NEAR = 4, 1.2
"""Before it says that nothing fits, the search compiles so many more choices as long as they come as near as that."""


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


@dataclass(frozen=True)
class Answer:
    """The choice that was made, with its peaks.

    Args:
        choice: the fastest that fits, or, where none does, the one compiled to least.
        predicted_peak_bytes: before anything was compiled.
        peak_bytes: compiled; None where nothing was.
        compiles: how many it took.
        fits: whether it does.
    """

    choice: Choice
    predicted_peak_bytes: int
    peak_bytes: int | None
    compiles: int
    fits: bool


def answered(found: Found, choices: Sequence[Choice]) -> Answer:
    """What a search found, as an answer."""
    predicted = found.predicted.get(found.place, peaks_between(choices, found.predicted)[found.place])
    peak = found.compiled.get(found.place)
    return Answer(choices[found.place], predicted, peak, len(found.compiled), found.fits)


def or_named(
    answer: Answer, named: Iterable[Choice], limit_bytes: int, predict: PeakOf, confirm: PeakOf | None
) -> Answer:
    """The answer, or a named policy that is faster and fits: the planner's own may miss the memory by a hair.

    Args:
        answer: of the search.
        named: what the policies cost.
        limit_bytes, predict, confirm: as of ``search``.

    >>> from jremat.policy import FULL, NONE
    >>> own, full = Choice(NONE, 0, 0, 9.0, 0), Choice(FULL, 0, 0, 7.0, 0)
    >>> or_named(Answer(own, 90, 90, 2, True), [full], 100, lambda plan: 99, lambda plan: 100).choice.plan
    policies.get('full')
    """
    for choice in sorted(named, key=lambda choice: choice.recompute_seconds):
        if answer.fits and choice.recompute_seconds >= answer.choice.recompute_seconds:
            break
        predicted = predict(choice.plan)
        if predicted > limit_bytes * (1 if confirm is None else _HAIR if answer.fits else _LAST_HOPE):
            continue
        peak = confirm(choice.plan) if confirm else None
        answer = replace(answer, compiles=answer.compiles + (confirm is not None))
        if peak is None or peak <= limit_bytes:
            return Answer(choice, predicted, peak, answer.compiles, True)
        if not answer.fits and answer.peak_bytes is not None and peak < answer.peak_bytes:
            answer = Answer(choice, predicted, peak, answer.compiles, False)
    return answer


_HAIR, _LAST_HOPE = 1.05, 1.3
"""A named policy predicted to be so little above the limit is compiled; the second where nothing fits so far."""
