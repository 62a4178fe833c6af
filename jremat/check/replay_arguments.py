"""What a lint or a replay is given, held against what it can be."""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def checked_tolerance(tolerance: Any) -> float | None:
    """A tolerance, or None.

    Raises:
        ValueError: no number, one below 0, or one that nothing is beyond.

    >>> checked_tolerance(1e-3), checked_tolerance(0)
    (0.001, 0.0)
    """
    if tolerance is None:
        return None
    share = float(tolerance) if isinstance(tolerance, numbers.Real) and not isinstance(tolerance, bool) else math.nan
    if 0 <= share < math.inf:
        return share
    raise ValueError(f"tolerance: expected a share of at least 0, e.g. 1e-3, got {tolerance!r}")


def jit_under(options: Mapping[str, Any] | None) -> Callable[..., Any]:
    """``jax.jit`` under options of XLA's.

    Raises:
        ValueError: XLA doesn't know one, or can't read its value.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"compiler_options: expected names with values, e.g. {{'xla_...': True}}, got {options!r}")
    chosen = dict(options or {})
    if chosen:
        try:
            jax.jit(lambda: 0, compiler_options=chosen)()
        except (jax.errors.JaxRuntimeError, TypeError) as error:
            message = str(error).removeprefix("INVALID_ARGUMENT: ").splitlines()[0]
            unread = "expected names of XLA's options with a word, a number or a truth"
            why = message if isinstance(error, jax.errors.JaxRuntimeError) else unread
            raise ValueError(f"compiler_options: {why}, got {chosen!r}") from None
    return lambda run: jax.jit(run, compiler_options=chosen)


def refuse_abstract(arrays: Sequence[Any]) -> None:
    """A replay is run, so it needs numbers, and nobody around who only traces it.

    Raises:
        ValueError: a shape, a tracer, or a call inside ``jax.jit``.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in arrays):
        raise ValueError("args: expected arrays with values, got a jax.ShapeDtypeStruct; a replay is run")
    if any(isinstance(leaf, jax.core.Tracer) for leaf in [*arrays, jnp.add(0, 0)]):
        raise ValueError(
            "args: expected arrays with values, got a tracer; a replay is run: call it outside of jax.jit, jax.grad "
            "and jax.vmap"
        )


def refuse_traced(consts: Sequence[Any]) -> None:
    """As ``refuse_abstract``, of what a function closes over.

    Raises:
        ValueError: a tracer.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in consts):
        raise ValueError(
            "f: expected a function of arrays with values, but it closes over a tracer; a replay is run: call it "
            "outside of jax.jit, jax.grad and jax.vmap"
        )
