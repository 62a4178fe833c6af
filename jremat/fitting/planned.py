"""Chosen segments as a plan says them: values by their ids, with source lines."""

from collections.abc import Sequence

from jremat.fitting.choose import Inside, ProgramSegment
from jremat.fitting.plan import PlannedInside, PlannedSegment
from jremat.fitting.program import bodies_of
from jremat.graph.graph import Value
from jremat.graph.trace import Program, graph_of
from jremat.planner.read_block import markable
from jremat.policy.ops import SELECTABLE
from jremat.policy.shown import human


def planned_segments(program: Program, segments: Sequence[ProgramSegment]) -> tuple[PlannedSegment, ...]:
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
        largest = [f"{_called(value)} {human(value.nbytes)}" for value in kept[:2] if value.nbytes]
        ops = graph.ops[segment.start : segment.end]
        lines = dict.fromkeys(op.source for op in ops if op.source)
        modules = dict.fromkeys(path for op in ops for out in op.outputs if (path := graph.values[out].path))
        found.append(
            PlannedSegment(
                segment.start,
                segment.end,
                None if segment.kept is None else tuple(sorted(value.id for value in kept)),
                segment.held_bytes,
                segment.seconds,
                segment.flops,
                _ends(list(lines)),
                ", ".join(largest),
                tuple(map(planned_inside, segment.inside)),
                _ends(list(modules)),
            )
        )
    return tuple(found)


def _ends(texts: list[str]) -> str:
    """The first and the last."""
    return " … ".join(texts[:1] + texts[1:][-1:])


def _called(value: Value) -> str:
    """What a reader knows a value by: its tag, or its operation and module."""
    module = value.path.rpartition("/")[2]
    return value.name or (f"{value.primitive} of {module}" if module else value.primitive)
