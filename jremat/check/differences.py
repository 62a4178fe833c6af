"""Two runs held side by side: the first value that differs, and two traces of one function."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jremat.check.marked_values import Tap
from jremat.graph.trace import user_line
from jremat.jax_internals import inner_jaxprs, is_ref, opened, tagged_name


@dataclass(frozen=True)
class Difference:
    """A value that isn't the same twice.

    Args:
        name: the user's tag, the primitive that made it, or the path of a result or a gradient.
        shape, dtype: of one copy.
        line: the user's line, ``file.py:12 (function)``.
        where: ``trace``: the function is another each time it is traced; ``run``: its value is another each time it
            is run; ``rerun``: remat's rerun makes another value than the first run; ``result`` or ``gradient``: with
            remat another than without; ``refused``: JAX has no gradient of it.
        relative: the largest difference over the largest magnitude; infinite where there is no number for it.

    >>> print(Difference("up", (2, 3), "float32", "model.py:7 (mlp)", "rerun", 0.5))
    up float32[2, 3] at model.py:7 (mlp) (rerun, by 5.0e-01)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    line: str
    where: str
    relative: float

    def __str__(self) -> str:
        at = f" at {self.line}" if self.line else ""
        return f"{self.name} {self.dtype}{list(self.shape)}{at} ({self.where}, by {self.relative:.1e})"


def relative(a: Any, b: Any, floor: float = 0.0) -> float:
    """The largest difference of two arrays over their largest magnitude, or over ``floor`` if that is larger.

    0 only where they are equal bit for bit, NaN with NaN.

    >>> relative(np.array([1.0, 2.0]), np.array([1.0, 2.5]))
    0.2
    """
    a, b = np.asarray(a), np.asarray(b)
    if a.tobytes() == b.tobytes():
        return 0.0
    if a.dtype == bool or np.issubdtype(a.dtype, np.integer):
        return float(np.mean(a != b))  # a decision is the same or another: the share of those that differ
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    x, y = a.astype(wide), b.astype(wide)
    if not np.array_equal(np.isfinite(x), np.isfinite(y)):
        return float("inf")
    finite = np.isfinite(x)
    if not finite.any():
        return 0.0
    scale = max(np.abs(x[finite]).max(), np.abs(y[finite]).max(), floor, np.finfo(np.float64).tiny)
    return float(np.abs(x[finite] - y[finite]).max() / scale)


def between_runs(taps: Sequence[Tap], one: Sequence[Any], two: Sequence[Any]) -> list[tuple[Tap, float]]:
    """Each value of a program with how much it differs between two runs of it."""
    return [(tap, relative(a, b)) for tap, a, b in zip(taps, one, two)]


def of_reruns(taps: Sequence[Tap], values: Sequence[Any]) -> list[tuple[Tap, float]]:
    """Each value that remat recomputed, with how much it differs from the first run's of the same name.

    Of several of a name (the turns of a loop, the layers of a stack, a tag that is used twice) the nearest counts.
    """
    first: dict[Any, list[Any]] = defaultdict(list)
    for tap, value in zip(taps, values):
        if not tap.again:
            first[tap.key] += list(_copies(tap, value))
    exact = {key: {copy.tobytes() for copy in copies} for key, copies in first.items()}
    return [
        (tap, max(_nearest(copy, first[tap.key], exact[tap.key]) for copy in _copies(tap, value)))
        for tap, value in zip(taps, values)
        if tap.again and tap.key in first and np.size(value)
    ]


def _nearest(value: Any, among: Sequence[Any], exact: set[bytes]) -> float:
    return 0.0 if value.tobytes() in exact else min(relative(other, value) for other in among)


def _copies(tap: Tap, value: Any) -> Any:
    array = np.asarray(value)
    copies = math.prod(array.shape[: array.ndim - len(tap.shape)])  # not -1: of no numbers, NumPy can't tell how many
    return array.reshape(copies, *tap.shape)


def between_traces(one: Any, two: Any) -> list[Difference]:
    """The first equation or constant in which two traces of a function differ, if any; both are closed jaxprs."""
    found = _closed(one, two)
    return [found] if found is not None else []


def _closed(one: Any, two: Any) -> Difference | None:
    for k, (a, b) in enumerate(zip(one.consts, two.consts)):
        if _is_data(a) and (by := relative(a, b) if np.shape(a) == np.shape(b) else np.inf):
            var = one.jaxpr.constvars[k]
            return _trace("constant", var.aval, _reader(one.jaxpr, var), by)
    return _equations(one.jaxpr, two.jaxpr)


def _equations(one: Any, two: Any) -> Difference | None:
    for a, b in zip(one.eqns, two.eqns):
        if a.primitive is not b.primitive or [str(v.aval) for v in a.outvars] != [str(v.aval) for v in b.outvars]:
            return _of(a, np.inf)
        for u, v in zip(a.invars, b.invars):
            if isinstance(u, core.Literal) != isinstance(v, core.Literal):
                return _of(a, np.inf)
            if isinstance(u, core.Literal) and (by := relative(u.val, v.val)):
                return _of(a, by)
        if _settings(a) != _settings(b):
            return _of(a, np.inf)
        for (inner_a, _), (inner_b, _) in zip(inner_jaxprs(a), inner_jaxprs(b)):
            closed = [x for x in (inner_a, inner_b) if isinstance(x, core.ClosedJaxpr)]
            found = _closed(*closed) if len(closed) == 2 else _equations(opened(inner_a), opened(inner_b))
            if found is not None:
                return found if found.line else _of(a, found.relative)
    if len(one.eqns) != len(two.eqns):
        longer = max(one.eqns, two.eqns, key=len)
        return _of(longer[min(len(one.eqns), len(two.eqns))], np.inf)
    return None


def _reader(jaxpr: Any, var: Any) -> str:
    """The user's line that reads a variable, looked for inside too."""
    for eqn in jaxpr.eqns:
        if var in eqn.invars:
            inner = [opened(j) for j, _ in inner_jaxprs(eqn)]
            place = eqn.invars.index(var)
            deeper = _reader(inner[0], inner[0].invars[place]) if inner and place < len(inner[0].invars) else ""
            if line := deeper or user_line(eqn):
                return line
    return ""


def _settings(eqn: Any) -> dict[str, str]:
    """The parameters that are plain data."""
    plain = (int, float, bool, str, tuple, type(None), np.dtype, np.generic)
    return {
        key: str(value)
        for key, value in eqn.params.items()
        if isinstance(value, plain)
        and not any(isinstance(v, core.Jaxpr | core.ClosedJaxpr | Callable) for v in _items(value))
    }


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple) else (value,)


def _of(eqn: Any, by: float) -> Difference:
    name = tagged_name(eqn.primitive, eqn.params) or eqn.primitive.name
    return _trace(name, eqn.outvars[0].aval if eqn.outvars else None, user_line(eqn), by)


def _trace(name: str, aval: Any, line: str, by: float) -> Difference:
    return Difference(
        name, tuple(getattr(aval, "shape", ())), str(getattr(aval, "dtype", "")), line, "trace", float(by)
    )


def _is_data(value: Any) -> bool:
    return (
        hasattr(value, "dtype")
        and not is_ref(jax.typeof(value))
        and not jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    )
