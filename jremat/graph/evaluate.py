"""Run a traced function again, with names put on chosen values."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax.ad_checkpoint import checkpoint_name

from jremat.graph.differentiate import is_inexact
from jremat.graph.interpret import interpret, retraced, with_jaxprs
from jremat.graph.named import bind_named
from jremat.graph.trace import REWRITABLE
from jremat.jax_internals import bind, inner_jaxprs

Run = Callable[[Any, Sequence[Any]], list[Any]]
"""From an equation and its inputs to its outputs."""


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    marks: Mapping[str, str],
    prefix: str = "",
    runs: Mapping[str, Run] = MappingProxyType({}),
) -> list:
    """Evaluate ``jaxpr``, naming the values of ``marks``.

    Args:
        jaxpr: open; read by ``jremat.trace`` into the graph that ``marks`` speaks of.
        consts, inputs: arrays or tracers.
        marks: value id in that graph -> name; ids inside scans and branches are named there.
        prefix: of the ids, inside another operation.
        runs: operation id in that graph -> how it is run, where not as it stands.

    Returns:
        The outputs.
    """
    count = itertools.count()
    active = [x for x in (*consts, *inputs) if is_inexact(x)]

    def named(eqn: Any, given: Sequence[Any], around: tuple[Any, ...]) -> list[Any]:
        key = f"{prefix}{next(count)}"
        names = [marks.get(key if k == 0 else f"{key}:{k}") for k in range(len(eqn.outvars))]
        return run_named(eqn, given, key, names, marks, active, runs.get(key))

    return interpret(jaxpr, consts, inputs, named)


def run_named(
    eqn: Any,
    given: Sequence[Any],
    key: str,
    names: Sequence[str | None],
    marks: Mapping[str, str],
    active: Sequence[Any],
    run: Run | None = None,
) -> list[Any]:
    """One equation, its outputs under ``names`` and the values of ``marks`` inside it named.

    Args:
        eqn, given: it and its inputs.
        key: its id in the graph.
        names: of its outputs, or None.
        marks: as of ``evaluate``.
        active: as ``others`` of ``bind_named``.
        run: how it is run, where not as it stands.
    """
    inside = _marked_inside(eqn, key, marks)
    if inside or run:
        outs = run(eqn, given) if run else bind(eqn, given, **inside)
        return [checkpoint_name(out, name) if name else out for out, name in zip(outs, names)]
    return bind_named(eqn, given, names, active) if any(names) else bind(eqn, given)


def _marked_inside(eqn: Any, key: str, marks: Mapping[str, str]) -> dict[str, Any]:
    """The parameters to change so that the marks inside a loop body or a branch are named there."""
    if eqn.primitive.name not in REWRITABLE or not any(mark.startswith(f"{key}/") for mark in marks):
        return {}
    several = len(inner_jaxprs(eqn)) > 1

    def marked(k: int, jaxpr: Any) -> Any:
        prefix = f"{key}/{f'{k}.' if several else ''}"
        return retraced(jaxpr, lambda inner, consts, inputs: evaluate(inner, consts, inputs, marks, prefix))

    return with_jaxprs(eqn, marked)
