"""Schedules that reverse a stack in few slots: uniform, √L, binomial (Revolve), two levels, and unequal layers."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

from jremat.transform.reversal_schedule import Action, Advance, Backward, Free, Restore, Schedule, Store

Split = Callable[[int, int, int], int]
"""(first layer, layer after the last, slots) to the layer whose input is stored next."""


def binomial(num_layers: int, slots: int) -> Schedule:
    """The schedule of fewest forward steps in ``slots``, all layers costing alike.

    Args:
        num_layers: L, at least 1.
        slots: states held at once, the stack's input among them, the working state not.

    Returns:
        Actions; ``binomial_steps`` of them advance a layer.

    >>> from jremat.transform.reversal_schedule import simulate
    >>> simulate(binomial(10, 3)).forward_steps == binomial_steps(10, 3) == 15
    True

    Source: Griewank and Walther 2000, Algorithm 799: revolve, equations 2 and 3.
    """
    _positive(num_layers=num_layers, slots=slots)

    return _recursive(num_layers, slots, _binomial_split)


def binomial_steps(num_layers: int, slots: int) -> int:
    """Fewest layers to advance: r L - C(s + r, s + 1), r the least with C(s + r, s) >= L.

    The forward sweep's L - 1 are among them; the last layer's forward and each layer's own rerun before its pullback
    are not. With one slot it is L (L - 1) / 2.

    >>> binomial_steps(16, 1), binomial_steps(16, 3), binomial_steps(16, 16)
    (120, 33, 15)

    Source: Griewank and Walther 2000, equation 3.
    """
    _positive(num_layers=num_layers, slots=slots)
    r = _repetition(num_layers, slots)
    return r * num_layers - math.comb(slots + r, slots + 1)


def optimal(costs: Sequence[float], slots: int) -> Schedule:
    """The schedule of least forward cost in ``slots`` for layers that cost differently, by dynamic programming.

    States are taken to be of one size. Time grows with L³ times slots: 64 layers in 8 slots take about a second.

    Args:
        costs: of each layer's forward, any unit, none negative.
        slots: as of ``binomial``.

    Raises:
        ValueError: no layers, no slots, or a negative cost.

    >>> from jremat.transform.reversal_schedule import simulate
    >>> simulate(optimal([1, 1, 9, 1], 2), [1, 1, 9, 1]).forward_cost  # the dear layer is advanced once
    12.0

    Source: the recursion of Griewank and Walther 2000 with the sum of the costs in place of the number of steps.
    """
    _positive(num_layers=len(costs), slots=slots)
    if min(costs) < 0:
        raise ValueError(f"costs: expected none negative, got {min(costs)}")
    before = [0.0, *accumulate(float(c) for c in costs)]

    @cache
    def best(lo: int, hi: int, held: int) -> tuple[float, int]:
        if hi - lo == 1:
            return 0.0, lo
        if held == 1:
            return sum(before[layer] - before[lo] for layer in range(lo, hi)), lo
        return min(
            (before[m] - before[lo] + best(m, hi, held - 1)[0] + best(lo, m, held)[0], m) for m in range(lo + 1, hi)
        )

    return _recursive(len(costs), slots, lambda lo, hi, held: best(lo, hi, held)[1])


def uniform(num_layers: int, period: int) -> Schedule:
    """Hold the input of every ``period``-th layer; a group is advanced once more, holding its layers' inputs.

    Args:
        num_layers: L.
        period: layers of a group, K; the last may be short. It is not advanced again: the sweep holds its inputs.

    Returns:
        A schedule with ceil(L / K) + K - 1 slots at most and fewer than 2 L forward steps.

    >>> from jremat.transform.reversal_schedule import simulate
    >>> tally = simulate(uniform(16, 4))
    >>> tally.forward_steps, tally.peak_slots  # 15 of the sweep, 3 for each of three groups
    (24, 6)

    Source: Chen et al. 2016, arXiv 1604.06174, section 4.1.
    """
    _positive(num_layers=num_layers, period=period)
    return multi_level(num_layers, period, max(period - 2, 0))


def square_root(num_layers: int) -> Schedule:
    """``uniform`` in groups of √L, rounded up: about 2 √L slots.

    >>> from jremat.transform.reversal_schedule import simulate
    >>> simulate(square_root(64)).peak_slots
    14

    Source: Chen et al. 2016, arXiv 1604.06174, section 4.1.
    """
    _positive(num_layers=num_layers)
    return uniform(num_layers, math.isqrt(num_layers - 1) + 1)


def multi_level(num_layers: int, period: int, slots: int) -> Schedule:
    """A schedule of two levels, periodic outside and binomial inside.

    The input of every ``period``-th layer is held on the outer level, and between two of these the layers are reversed
    in ``slots`` of the inner one.

    Args:
        num_layers: L.
        period: layers between two outer states; the last interval may be short.
        slots: inner states held at once, the interval's own input, which is an outer one, not among them; 0 or more.

    Returns:
        A schedule whose slots 0 to ceil(L / period) - 1 are the outer level, the rest the inner one.

    Raises:
        ValueError: a number out of its range.

    >>> from jremat.transform.reversal_schedule import simulate
    >>> simulate(multi_level(16, 8, 2)).peak_slots
    4

    Source: Pringle, Jones, Goswami, Narayanan and Goldberg 2016, for the two-level scheme; between the outer states
    Griewank and Walther 2000.
    """
    _positive(num_layers=num_layers, period=period)
    if slots < 0:
        raise ValueError(f"slots: expected 0 or more, got {slots}")
    starts = list(range(0, num_layers, period))
    free = list(range(len(starts), len(starts) + slots))
    actions: list[Action] = []
    for k, start in enumerate(starts):
        actions.append(Store(k))
        if k + 1 < len(starts):
            actions.append(Advance(start, starts[k + 1]))

    for k in reversed(range(len(starts))):
        stop = min(starts[k] + period, num_layers)
        if k + 1 < len(starts):
            actions.append(Restore(k))
        actions += _reverse(starts[k], stop, k, free, _binomial_split)
        actions.append(Free(k))
    return Schedule(num_layers, len(starts) + slots, tuple(actions))


def _recursive(num_layers: int, slots: int, split: Split) -> Schedule:
    actions = [Store(0), *_reverse(0, num_layers, 0, list(range(1, slots)), split), Free(0)]
    return Schedule(num_layers, slots, tuple(actions))


def _reverse(lo: int, hi: int, held: int, free: list[int], split: Split) -> list[Action]:
    """Take layers ``lo`` to ``hi`` - 1 back; their input is the working state and held in slot ``held``."""
    actions: list[Action] = []
    while hi - lo > 1:
        if free:
            middle, slot = split(lo, hi, len(free) + 1), free[0]
            actions += [Advance(lo, middle), *([Store(slot)] if hi - middle > 1 else [])]
            actions += _reverse(middle, hi, slot, free[1:], split)
            actions += [*([Free(slot)] if hi - middle > 1 else []), Restore(held)]
            hi = middle
        else:
            actions += [Advance(lo, hi - 1), Backward(hi - 1), Restore(held)]
            hi -= 1
    return [*actions, Backward(lo)]


def _binomial_split(lo: int, hi: int, held: int) -> int:
    n, r = hi - lo, _repetition(hi - lo, held)
    return lo + max(1, _reach(held, r - 2), n - _reach(held - 1, r))


def _reach(slots: int, repetition: int) -> int:
    """The longest stack that ``slots`` reverse with no layer advanced more than ``repetition`` times."""
    return math.comb(slots + repetition, slots) if repetition >= 0 else 0


def _repetition(num_layers: int, slots: int) -> int:
    r = 0
    while _reach(slots, r) < num_layers:
        r += 1
    return r


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
