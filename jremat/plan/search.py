"""The fastest choice that fits: predicted first, then shown by the compiler."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

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
        compiles: so many at most, where one of them fits.

    >>> from jremat.policy import FULL
    >>> choices = [Choice(FULL, kept, 0, 10 - kept, 0) for kept in (9, 6, 3, 0)]
    >>> found = search(choices, 105, lambda plan: 100, lambda plan: 104)
    >>> choices[found.place].kept_bytes, found.compiled
    (9, {0: 104})
    """
    predicted: dict[int, int] = {}
    compiled: dict[int, int] = {}

    def traced(k: int) -> int:
        if k not in predicted:
            predicted[k] = predict(choices[k].plan)
        return predicted[k]

    def first_that_fits(limit: int, start: int) -> int:
        """The first choice from ``start`` on that is traced to fit, or the last."""
        for k in {start, len(choices) - 1}:
            traced(k)
        for _ in choices:
            line = peaks_between(choices, predicted)
            k = next((k for k in range(start, len(choices)) if line[k] <= limit), len(choices) - 1)
            if k in predicted:
                return k
            traced(k)
        raise AssertionError("each turn traces a choice that wasn't")

    k, shift = first_that_fits(limit_bytes, 0), 0
    while confirm is not None and k not in compiled:
        compiled[k] = confirm(choices[k].plan)
        shift = compiled[k] - traced(k)
        fitting = [j for j, peak in compiled.items() if peak <= limit_bytes]
        failed = [j for j, peak in compiled.items() if peak > limit_bytes]
        if fitting and len(compiled) >= compiles:
            break
        k = first_that_fits(limit_bytes - shift, min(max(failed, default=-1) + 1, len(choices) - 1))
        if fitting and k > min(fitting):
            break
    if confirm is None:
        return Found(k, predicted, compiled, predicted[k] <= limit_bytes)
    fitting = [j for j, peak in compiled.items() if peak <= limit_bytes]
    return Found(min(fitting, default=min(compiled, key=lambda j: compiled[j])), predicted, compiled, bool(fitting))


def peaks_between(choices: Sequence[Choice], predicted: Mapping[int, int]) -> tuple[int, ...]:
    """A peak for every choice: the traced ones, and a line in kept bytes between them; never rising along the choices.

    >>> from jremat.policy import FULL
    >>> peaks_between([Choice(FULL, kept, 0, 0, 0) for kept in (9, 6, 0)], {0: 190, 2: 100})
    (190, 160, 100)
    """
    places = sorted(predicted, reverse=True)  # fewest kept bytes first, as interpolation wants them
    kept = [choice.kept_bytes for choice in choices]
    line = np.interp(kept, [kept[k] for k in places], [predicted[k] for k in places])
    rising = accumulate((int(peak) for peak in reversed(line)), max)
    return tuple(reversed([*rising]))
