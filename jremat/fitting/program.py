"""Functions and loop bodies as rows of equations, and a plan's places in a row with other types."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend import core

from jremat.fitting.plan import PlannedInside, PlannedSegment
from jremat.graph.arguments import Arguments
from jremat.graph.effects import rerunnable
from jremat.graph.inlined import inlined, remats
from jremat.graph.interpret import consts_of
from jremat.graph.trace import Program, capture
from jremat.jax_internals import VARYING, inner_jaxprs, opened, weakly_cached


def entered_program(arguments: Arguments, override: bool = False) -> Program:
    """A call traced, its own calls entered: one row of equations.

    Args:
        arguments: of the call.
        override: whether the function's own remats are taken away.

    Raises:
        ValueError: it has an effect that a rerun would repeat.
    """
    return entered(rerunnable(capture(arguments)), override)


def entered(program: Program, override: bool = False) -> Program:
    """The same program, calls entered: one row of equations; without its own remats where they are overridden."""
    drop = frozenset(remats(program.jaxpr)) if override else frozenset()
    closed = jax.make_jaxpr(lambda *given: inlined(program.jaxpr, program.consts, given, drop))(
        *(var.aval for var in program.jaxpr.invars)
    )
    return replace(program, jaxpr=closed.jaxpr, consts=tuple(closed.consts))


def bodies_of(eqn: Any) -> tuple[Program, ...]:
    """The bodies of a loop or the branches of a ``cond``, calls entered."""
    return tuple(_entered_body(jaxpr) for jaxpr, _ in inner_jaxprs(eqn))


@weakly_cached
def _entered_body(jaxpr: Any) -> Program:
    return entered(Program(opened(jaxpr), tuple(consts_of(jaxpr)), None, ()))


def moved_segments(
    segments: Sequence[PlannedSegment], planned: Program, program: Program
) -> tuple[PlannedSegment, ...]:
    """Segments of one program as segments of the same under a ``shard_map``, which says what varies in equations.

    Raises:
        ValueError: the programs differ in more than that.
    """
    eqns = program.jaxpr.eqns
    added = {var for eqn in eqns if eqn.primitive.name == VARYING for var in eqn.outvars}
    # newer JAX also converts a number that it says to vary
    converts = [eqn for eqn in eqns if eqn.primitive.name == "convert_element_type"]
    added |= {eqn.outvars[0] for eqn in converts if isinstance(v := eqn.invars[0], core.Var) and v in added}
    places = [k for k, eqn in enumerate(eqns) if added.isdisjoint(eqn.outvars)]
    if [eqns[k].primitive for k in places] != [eqn.primitive for eqn in planned.jaxpr.eqns]:
        raise ValueError("arguments: expected the program as planned, got another inside of the shard_map")
    ends = [0, *(k + 1 for k in places[:-1]), len(eqns)]  # before what stands before an equation

    def value(name: str) -> str:
        digits = len(name) - len(name.lstrip("0123456789"))
        return f"{places[int(name[:digits])]}{name[digits:]}"

    def inside(own: PlannedInside) -> PlannedInside:
        pairs = zip(bodies_of(planned.jaxpr.eqns[own.equation]), bodies_of(eqns[places[own.equation]]))
        bodies = tuple(moved_segments(body, *pair) for body, pair in zip(own.bodies, pairs, strict=True))
        return replace(own, equation=places[own.equation], bodies=bodies)

    return tuple(
        replace(
            segment,
            start=ends[segment.start],
            end=ends[segment.end],
            kept=None if segment.kept is None else tuple(map(value, segment.kept)),
            inside=tuple(map(inside, segment.inside)),
        )
        for segment in segments
    )
