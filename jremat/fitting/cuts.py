"""Where a row of equations can be cut: at narrow points of the bytes that are alive between them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend import core

from jremat.graph.differentiate import is_inexact
from jremat.graph.trace import aval_bytes


@dataclass(frozen=True, eq=False)
class Lives:
    """The values that a row of equations makes.

    Args:
        made, last: of each, the equation that makes it and the last one that reads it.
        place: which of that equation's results it is.
        nbytes: of each.
        real: of each, the bytes that its cotangent takes.
    """

    made: np.ndarray
    last: np.ndarray
    place: np.ndarray
    nbytes: np.ndarray
    real: np.ndarray

    def crossing(self, count: int) -> np.ndarray:
        """Bytes that are alive between each of ``count`` equations and the next."""
        return self._over(count, self.nbytes)

    def cotangents(self, count: int) -> np.ndarray:
        """Bytes of cotangents that are alive there in the backward pass."""
        return self._over(count, self.real)

    def _over(self, count: int, sizes: np.ndarray) -> np.ndarray:
        steps = np.zeros(count + 1, np.int64)
        np.add.at(steps, self.made, sizes)
        np.add.at(steps, self.last, -sizes)
        return np.cumsum(steps)[:count]

    def leaving(self, start: int, end: int) -> np.ndarray:
        """Which values the equations from ``start`` to before ``end`` make for later ones."""
        return (self.made >= start) & (self.made < end) & (self.last >= end)


def lives(jaxpr: Any) -> Lives:
    """The values that a jaxpr's equations make and later ones read."""
    last = {v: k for k, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not isinstance(v, core.Literal)}
    rows = [
        (k, last[var], place, aval_bytes(var.aval), _cotangent_bytes(var.aval))
        for k, eqn in enumerate(jaxpr.eqns)
        for place, var in enumerate(eqn.outvars)
        if var in last
    ]
    columns = np.array(rows, np.int64).reshape(len(rows), 5).T
    return Lives(*columns)


def _cotangent_bytes(aval: Any) -> int:
    return aval_bytes(aval) if is_inexact(aval) else 0


_NONE = np.iinfo(np.int64).max


def narrow_points(crossing: np.ndarray, progress: np.ndarray, most: int) -> list[int]:
    """Where to cut, at most about ``most`` places: each the narrowest of all that are near it.

    Near is counted in ``progress``, so that equal layers are cut at equal places.

    Args:
        crossing: bytes alive after each equation.
        progress: a running sum over the equations, such as of the bytes that they store.
        most: places wanted.

    Returns:
        The places of the first equation of each segment but the first.

    >>> narrow_points(np.array([9, 1, 9, 9, 1, 9]), np.arange(6.0), 3)
    [2, 5]
    """
    count = len(crossing) - 1  # not after the last
    if count < 1:
        return []

    def within(reach: float) -> list[int]:
        first = np.searchsorted(progress, progress - reach, "left")
        last = np.searchsorted(progress, progress + reach, "right")
        return [
            k + 1
            for k in range(count)
            if crossing[first[k] : k].min(initial=_NONE) > crossing[k] <= crossing[k : min(last[k], count)].min()
        ]

    low, high = 0.0, float(progress[-1] - progress[0]) or 1.0
    found = within(low)
    if len(found) <= most:
        return found
    for _ in range(16):
        reach = (low + high) / 2
        found = within(reach)
        low, high = (reach, high) if len(found) > most else (low, reach)
    return within(high)
