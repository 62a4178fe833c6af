"""What every derivative here is taken by: all floating-point arrays among some values."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero


def is_inexact(x: Any) -> bool:
    """Whether an array, its type or a Python number is floating-point or complex; what has no dtype is not.

    >>> is_inexact(jnp.ones(2)), is_inexact(jnp.arange(2)), is_inexact(1.5)
    (True, False, True)
    """
    if not hasattr(x, "dtype") and not isinstance(x, int | float | complex):
        return False
    return bool(jnp.issubdtype(x.dtype if hasattr(x, "dtype") else jnp.result_type(x), jnp.inexact))


def inexact_places(values: Sequence[Any]) -> list[int]:
    """The places of the values that are differentiated by."""
    return [k for k, value in enumerate(values) if is_inexact(value)]


def of_places(f: Callable[..., Any], values: Sequence[Any], places: Sequence[int]) -> Callable[..., Any]:
    """``f`` as a function of the values in some places, the others fixed.

    >>> of_places(lambda x, y, z: x + 10 * y + 100 * z, [1, 2, 3], [0, 2])(4, 5)
    524
    """

    def of_chosen(*chosen: Any) -> Any:
        filled = dict(zip(places, chosen, strict=True))
        return f(*(filled.get(k, value) for k, value in enumerate(values)))

    return of_chosen


def pullback(f: Callable[..., Any], values: Sequence[Any], places: Sequence[int]) -> tuple[Any, Any]:
    """``jax.vjp`` of ``f(*values)`` by the values in some places."""
    return jax.vjp(of_places(f, values, places), *(values[k] for k in places))


def kept_by_pullback(f: Callable[..., Any]) -> Callable[..., list[Any]]:
    """From the arguments of ``f`` to everything that its backward pass reads."""
    return lambda *values: jax.tree.leaves(pullback(f, values, inexact_places(values))[1])


def zero_tangent(x: Any) -> SymbolicZero:
    """The tangent of a value that doesn't move."""
    return SymbolicZero(jax.typeof(x).to_tangent_aval())
