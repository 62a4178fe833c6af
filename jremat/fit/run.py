"""A function run as a row of segments, some of them under remat."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from jremat.graph.evaluate import evaluate
from jremat.graph.trace import Program


@dataclass(frozen=True)
class Part:
    """Consecutive equations of a program.

    Args:
        start, end: of them, the second exclusive.
        marks: value id -> the name to put on it, of what can be kept; None: they run as they are.
        saved: the names that are kept.
    """

    start: int
    end: int
    marks: tuple[tuple[str, str], ...] | None
    saved: frozenset[str] = frozenset()


def run_parts(program: Program, parts: Sequence[Part]) -> Callable[..., list[Any]]:
    """The program's arrays to its results, part by part.

    Args:
        program: its calls entered.
        parts: all of its equations, in order.
    """
    jaxpr = program.jaxpr
    steps = [_step(jaxpr, part) for part in parts]

    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(jaxpr.constvars, program.consts)) | dict(zip(jaxpr.invars, arrays))
        for ins, outs, step in steps:
            env |= dict(zip(outs, step([env[var] for var in ins]), strict=True))
        return [v.val if isinstance(v, core.Literal) else env[v] for v in jaxpr.outvars]

    return run


def _step(jaxpr: Any, part: Part) -> tuple[list[Any], list[Any], Callable[[list[Any]], list[Any]]]:
    """What a part reads and makes for later ones, and the function from one to the other."""
    eqns = jaxpr.eqns[part.start : part.end]
    made = {var for eqn in eqns for var in eqn.outvars}
    variables = lambda some: [v for v in some if not isinstance(v, core.Literal)]
    reads = dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars))
    ins = [var for var in reads if var not in made]
    later = {v for eqn in jaxpr.eqns[part.end :] for v in variables(eqn.invars)} | set(variables(jaxpr.outvars))
    outs = [var for eqn in eqns for var in eqn.outvars if var in later]
    inner = jaxpr.replace(constvars=[], invars=ins, outvars=outs, eqns=eqns)
    if part.marks is None:
        return ins, outs, lambda given: evaluate(inner, (), given, {})
    marks = dict(part.marks)
    policy = jax.checkpoint_policies.nothing_saveable
    if part.saved:
        policy = jax.checkpoint_policies.save_only_these_names(*sorted(part.saved))
    return ins, outs, jax.checkpoint(lambda given: evaluate(inner, (), given, marks), policy=policy)


def shifted(value: str, by: int) -> str:
    """The id of a value in the graph of the equations from ``by`` on.

    >>> shifted("17:1", 5), shifted("17/3", 17)
    ('12:1', '0/3')
    """
    digits = len(value) - len(value.lstrip("0123456789"))
    return f"{int(value[:digits]) - by}{value[digits:]}"
