"""The binomial schedule (Revolve), which reverses a stack in few slots."""

import math

from jremat.transform.reversal_schedule import Action, Advance, Backward, Free, Restore, ReversalSchedule, Store


def binomial(num_layers: int, slots: int) -> ReversalSchedule:
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
    actions = [Store(0), *_reverse(0, num_layers, 0, list(range(1, slots))), Free(0)]
    return ReversalSchedule(num_layers, slots, tuple(actions))


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


def _reverse(lo: int, hi: int, held: int, free: list[int]) -> list[Action]:
    """Take layers ``lo`` to ``hi`` - 1 back; their input is the working state and held in slot ``held``."""
    actions: list[Action] = []
    while hi - lo > 1:
        if free:
            middle, slot = _split(lo, hi, len(free) + 1), free[0]
            actions += [Advance(lo, middle), *([Store(slot)] if hi - middle > 1 else [])]
            actions += _reverse(middle, hi, slot, free[1:])
            actions += [*([Free(slot)] if hi - middle > 1 else []), Restore(held)]
            hi = middle
        else:
            actions += [Advance(lo, hi - 1), Backward(hi - 1), Restore(held)]
            hi -= 1
    return [*actions, Backward(lo)]


def _split(lo: int, hi: int, held: int) -> int:
    """The layer whose input is stored next."""
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
