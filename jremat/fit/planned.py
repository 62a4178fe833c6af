"""Chosen segments as a plan says them: values by their ids, with source lines."""

from collections.abc import Sequence

from jremat.fit.choose import Inside, Segment
from jremat.fit.plan import PlannedInside, PlannedSegment
from jremat.fit.program import bodies_of
from jremat.graph.trace import Program, graph_of
from jremat.plan.read_block import markable
from jremat.policy.ops import SELECTABLE
from jremat.policy.shown import human


def planned_segments(program: Program, segments: Sequence[Segment]) -> tuple[PlannedSegment, ...]:
    """Segments of a program, its calls entered, as a plan's."""
    graph = graph_of(program, SELECTABLE)
    places = markable(graph, False)

    def planned_inside(own: Inside) -> PlannedInside:
        eqn, op = program.jaxpr.eqns[own.equation], graph.ops[own.equation]
        bodies = tuple(planned_segments(*pair) for pair in zip(bodies_of(eqn), (row.segments for row in own.rows)))
        length = eqn.params.get("length", 1)
        return PlannedInside(own.equation, op.primitive, length, own.group, bodies, own.held_bytes, op.source)

    found = []
    for segment in segments:
        kept = sorted((places[mark].value for mark in segment.kept or ()), key=lambda value: -value.nbytes)
        largest = [f"{value.name or value.primitive} {human(value.nbytes)}" for value in kept[:2] if value.nbytes]
        lines = [*dict.fromkeys(op.source for op in graph.ops[segment.start : segment.end] if op.source)]
        found.append(
            PlannedSegment(
                segment.start,
                segment.end,
                None if segment.kept is None else tuple(sorted(value.id for value in kept)),
                segment.held_bytes,
                segment.seconds,
                segment.flops,
                " … ".join(lines[:1] + lines[1:][-1:]),
                ", ".join(largest),
                tuple(map(planned_inside, segment.inside)),
            )
        )
    return tuple(found)
