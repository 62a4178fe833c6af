"""A function run as a row of segments, some of them under remat."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jremat.graph.evaluate import evaluate
from jremat.graph.interpret import retraced, with_jaxprs
from jremat.graph.trace import Program
from jremat.jax_internals import SCAN, bind, loop_parts


@dataclass(frozen=True)
class Part:
    """Consecutive equations of a program.

    Args:
        start, end: of them, the second exclusive.
        marks: value id -> the name to put on it, of what can be kept; None: they run as they are.
        saved: the names that are kept.
        inside: the loops and branches among them whose bodies are run in parts.
    """

    start: int
    end: int
    marks: tuple[tuple[str, str], ...] | None
    saved: frozenset[str] = frozenset()
    inside: "tuple[InsideParts, ...]" = ()


@dataclass(frozen=True, eq=False)
class InsideParts:
    """A loop or a branch whose bodies are run in parts.

    Args:
        equation: its place.
        bodies: each with its parts.
        group: iterations that are replayed together from the carry before them; 1: each by itself.
    """

    equation: int
    bodies: tuple[tuple[Program, tuple[Part, ...]], ...]
    group: int = 1


def run_parts(program: Program, parts: Sequence[Part], prevent_cse: bool = True) -> Callable[..., list[Any]]:
    """The program's arrays to its results, part by part.

    Args:
        program: its calls entered.
        parts: all of its equations, in order.
        prevent_cse: as of ``jax.checkpoint``; False is right inside a loop alone.
    """
    jaxpr = program.jaxpr
    steps = [_step(jaxpr, part, prevent_cse) for part in parts]

    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(jaxpr.constvars, program.consts)) | dict(zip(jaxpr.invars, arrays))
        for ins, outs, step in steps:
            env |= dict(zip(outs, step([env[var] for var in ins]), strict=True))
        return [v.val if isinstance(v, core.Literal) else env[v] for v in jaxpr.outvars]

    return run


def _step(jaxpr: Any, part: Part, prevent_cse: bool) -> tuple[list[Any], list[Any], Callable[[list[Any]], list[Any]]]:
    """What a part reads and makes for later ones, and the function from one to the other."""
    eqns = jaxpr.eqns[part.start : part.end]
    made = {var for eqn in eqns for var in eqn.outvars}
    variables = lambda some: [v for v in some if not isinstance(v, core.Literal)]
    reads = dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars))
    ins = [var for var in reads if var not in made]
    later = {v for eqn in jaxpr.eqns[part.end :] for v in variables(eqn.invars)} | set(variables(jaxpr.outvars))
    outs = [var for eqn in eqns for var in eqn.outvars if var in later]
    inner = jaxpr.replace(constvars=[], invars=ins, outvars=outs, eqns=eqns)
    runs = {str(own.equation - part.start): functools.partial(run_inside, own) for own in part.inside}
    if part.marks is None:
        return ins, outs, lambda given: evaluate(inner, (), given, {}, runs=runs)
    marks = dict(part.marks)
    policy = jax.checkpoint_policies.nothing_saveable
    if part.saved:
        policy = jax.checkpoint_policies.save_only_these_names(*sorted(part.saved))
    run = lambda given: evaluate(inner, (), given, marks, runs=runs)
    return ins, outs, jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)


def run_inside(inside: InsideParts, eqn: Any, given: Sequence[Any]) -> list[Any]:
    """A loop or a branch, its bodies run in parts."""
    length = eqn.params["length"] if eqn.primitive.name == SCAN else 1
    group = min(inside.group, length)

    def body(k: int, jaxpr: Any) -> Any:
        alone = eqn.primitive.name != SCAN or min(length, group if group > 1 else length) == 1
        run = run_parts(*inside.bodies[k], prevent_cse=alone)  # a loop of one iteration is unrolled
        return retraced(jaxpr, lambda _, consts, inputs: run(*inputs))

    changed = with_jaxprs(eqn, body)
    return bind(eqn, given, **changed) if group == 1 else _grouped(eqn, given, group, changed)


def _grouped(eqn: Any, given: Sequence[Any], group: int, changed: dict[str, Any]) -> list[Any]:
    """A scan in groups of iterations, each replayed from the carry before it; a shorter one last."""
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    num_shared, num_carry = loop_parts(eqn)
    shared, carry, rows = given[:num_shared], list(given[num_shared:][:num_carry]), given[num_shared + num_carry :]
    whole, rest = divmod(length, group)
    first = rest if reverse else 0  # what is left over stands where the loop ends

    def replayed(count: int) -> Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]:
        def run(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = bind(eqn, [*shared, *carry, *rows], **changed, length=count)
            return outs[:num_carry], outs[num_carry:]

        nothing = jax.checkpoint_policies.nothing_saveable
        return jax.checkpoint(run, policy=nothing, prevent_cse=count == rest or whole == 1)

    grouped = [row[first : first + whole * group].reshape(whole, group, *row.shape[1:]) for row in rows]
    carry, made = jax.lax.scan(replayed(group), carry, grouped, length=whole, reverse=reverse)
    made = [out.reshape(whole * group, *out.shape[2:]) for out in made]
    if rest:
        left = slice(0, rest) if reverse else slice(whole * group, length)
        carry, more = replayed(rest)(carry, [row[left] for row in rows])
        made = [jnp.concatenate((b, a) if reverse else (a, b)) for a, b in zip(made, more)]
    return [*carry, *made]


def shifted(value: str, by: int) -> str:
    """The id of a value in the graph of the equations from ``by`` on.

    >>> shifted("17:1", 5), shifted("17/3", 17)
    ('12:1', '0/3')
    """
    digits = len(value) - len(value.lstrip("0123456789"))
    return f"{int(value[:digits]) - by}{value[digits:]}"
