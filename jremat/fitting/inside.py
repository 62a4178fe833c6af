"""What can be chosen inside of loops and branches: their bodies are cut and planned like programs of their own.

What an iteration keeps is stacked: it counts as often as the loop turns. What its backward pass needs beside counts
once. Where even the carries are too much, groups of iterations are replayed from the carry before each group.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jremat.fitting.choose import Choices, Inside, SegmentRow
from jremat.fitting.fitted import parts_of_segments
from jremat.fitting.planned import planned_segments
from jremat.fitting.program import bodies_of
from jremat.fitting.read import Reading, read
from jremat.fitting.run import InsideParts, run_inside
from jremat.graph.differentiate import inexact_places, is_inexact, of_places
from jremat.graph.rules import ALIASES
from jremat.graph.trace import aval_bytes, graph_of
from jremat.jax_internals import COND, SCAN, loop_parts
from jremat.planner.roofline import Cost
from jremat.policy.ops import SELECTABLE

_SMALL = 200
"""A loop that stores less than this part of what is stored is left as it is."""
_ROWS = 8
"""Rows of a body that are worked out at each limit."""


def choices_inside(
    reading: Reading, active: Sequence[int], cost: Cost, keep: Collection[str]
) -> dict[int, tuple[Inside, ...]]:
    """What can be chosen for the bodies of the loops and branches of a program, by their places; as they are first.

    Args:
        reading: of the program.
        active: places of its inputs that are differentiated.
        cost: of each operation.
        keep: tags of values that must not be recomputed.
    """
    stored = np.zeros(len(reading.program.jaxpr.eqns), np.int64)
    np.add.at(stored, reading.equation, reading.stored)
    known: dict[Any, tuple[Inside, ...]] = {}
    found = {}
    for place, eqn, moving in _differentiated(reading.program.jaxpr, active):
        if eqn.primitive.name not in (SCAN, COND) or stored[place] * _SMALL < stored.sum():
            continue
        bodies = (graph_of(body, SELECTABLE).fingerprint for body in bodies_of(eqn))
        key = eqn.primitive.name, eqn.params.get("length"), moving, *bodies
        if key not in known:
            known[key] = _Planned(eqn, moving, bool(reading.decides[place]), cost, keep).choices()
        found[place] = tuple(replace(choice, equation=place) for choice in known[key])
    return found


@dataclass(frozen=True, eq=False)
class _Planned:
    """One loop or branch.

    Args:
        eqn: it.
        active: places of its inputs that are differentiated.
        decides: whether a choice by value is made in it.
        cost, keep: as of ``read``.
    """

    eqn: Any
    active: tuple[int, ...]
    decides: bool
    cost: Cost
    keep: Collection[str]

    @cached_property
    def length(self) -> int:
        """How often it turns."""
        return self.eqn.params["length"] if self.eqn.primitive.name == SCAN else 1

    @cached_property
    def bodies(self) -> list[Choices]:
        """What each body can be made of."""
        found = []
        for program in bodies_of(self.eqn):
            given = [var.aval for var in program.jaxpr.invars]
            shift = len(self.eqn.invars) - len(given)  # a cond's first input says which branch is taken
            moving = {k - shift for k in self.active}
            if self.eqn.primitive.name == SCAN:
                first, count = loop_parts(self.eqn)
                moving |= set(range(first, first + count))
            active = [k for k in inexact_places(given) if k in moving]
            losses = inexact_places([v.aval for v in program.jaxpr.outvars])
            reading = read(program, active, losses, self.cost, self.keep, in_loop=True)
            inside = choices_inside(reading, active, self.cost, self.keep)
            found.append(Choices(reading, inside=inside, in_loop=True))
        return found

    def choices(self) -> tuple[Inside, ...]:
        """As it is, then what holds less, without those that another beats in bytes and seconds."""
        as_it_is = self._measured([c.as_it_is for c in self.bodies])
        found = [as_it_is, *(self._measured(rows) for rows in dict.fromkeys(self._rows()))]
        if not self.decides:  # a replay would decide anew
            found += [self._measured(c.rows, group) for group in self._groups() for c in (found[0], *found[:0:-3])]
        needs = lambda c: (c.held_bytes, c.held_bytes + c.own_bytes, c.seconds)
        better = lambda a, b: needs(a) != needs(b) and all(x <= y for x, y in zip(needs(a), needs(b)))
        rest = [c for c in found[1:] if not c.as_it_is and not any(better(other, c) for other in found)]
        return as_it_is, *rest

    def _rows(self) -> Iterator[tuple[SegmentRow, ...]]:
        """Rows of the bodies worth a look, the branches of a ``cond`` in step."""
        least = [choices.least().peak_bytes for choices in self.bodies]
        for limits, count in (([np.inf] * len(least), _ROWS), ([1.1 * peak for peak in least], _ROWS // 2)):
            lines = [_thinned(tuple(c.frontier(limit)), count) for c, limit in zip(self.bodies, limits)]
            for k in range(max(map(len, lines))):
                yield tuple(line[min(k, len(line) - 1)] for line in lines)

    def _groups(self) -> tuple[int, ...]:
        """Iterations of a group: about as many as there are groups, and half and twice as many."""
        root = round(self.length**0.5)
        return tuple(sorted({group for group in (root // 2, root, 2 * root) if 1 < group <= self.length // 2}))

    def _measured(self, rows: Sequence[SegmentRow], group: int = 1) -> Inside:
        """What a choice comes to: bytes as JAX's derivative has them, seconds as modelled."""
        bodies = [choices.reading for choices in self.bodies]
        parts = [
            (body.program, tuple(parts_of_segments(body.program, planned_segments(body.program, row.segments))))
            for body, row in zip(bodies, rows)
        ]
        inside = InsideParts(0, tuple(parts), group)
        types = [v.aval for v in self.eqn.invars]
        held = _kept_bytes(lambda *given: run_inside(inside, self.eqn, given), types, self.active)
        one_turn = max((row.peak_bytes for row in rows), default=0)
        seconds = max(row.seconds for row in rows) * self.length
        flops = max(row.flops for row in rows) * self.length
        if group > 1:
            of_group = InsideParts(0, tuple(parts), 1)
            turn = lambda *given: run_inside(of_group, self.eqn, given)
            one_turn += _kept_bytes(turn, types, self.active) * group // self.length
            seconds += bodies[0].forward_seconds * self.length
            flops += bodies[0].graph.matmul_flops * self.length
        return Inside(0, tuple(rows), group, held, one_turn, seconds, flops)


def _thinned(rows: Sequence[SegmentRow], count: int) -> list[SegmentRow]:
    """Rows from the one that holds most to the one that holds least, at even steps."""
    held = [sum(segment.held_bytes for segment in row.segments) for row in rows]
    aims = np.linspace(max(held), min(held), count)
    return list(dict.fromkeys(next(row for row, own in zip(rows, held) if own <= aim) for aim in aims))


def _kept_bytes(run: Any, types: Sequence[Any], active: Sequence[int]) -> int:
    """Bytes that a function makes and keeps for its backward pass, what it is given left out."""

    def kept(*given: Any) -> list[Any]:
        _, pull = jax.vjp(of_places(run, given, active), *(given[k] for k in active))
        return jax.tree.leaves(pull)

    jaxpr = jax.make_jaxpr(kept)(*types).jaxpr
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def origin(var: Any) -> Any:
        while var in makers and makers[var].primitive.name in ALIASES and isinstance(makers[var].invars[0], core.Var):
            var = makers[var].invars[0]
        return var

    made = {origin(var) for var in jaxpr.outvars if isinstance(var, core.Var)}
    return sum(aval_bytes(var.aval) for var in made if var in makers)


def _differentiated(jaxpr: Any, active: Sequence[int]) -> Iterator[tuple[int, Any, tuple[int, ...]]]:
    """The equations that read what depends on the inputs in these places, with the places of what does."""
    moving = {jaxpr.invars[k] for k in active}
    for place, eqn in enumerate(jaxpr.eqns):
        places = tuple(k for k, v in enumerate(eqn.invars) if isinstance(v, core.Var) and v in moving)
        if places:
            moving |= {v for v in eqn.outvars if is_inexact(v.aval)}
            yield place, eqn, places
