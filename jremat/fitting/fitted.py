"""A function that runs under a plan: same signature, same values, another backward pass."""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jremat.fitting.plan import FitPlan, PlannedInside, PlannedSegment
from jremat.fitting.program import bodies_of, entered_program, moved_segments
from jremat.fitting.run import InsideParts, Part, run_parts, shifted
from jremat.graph.arguments import Arguments, take_apart
from jremat.graph.trace import Program, graph_of
from jremat.jax_internals import compiled, varying_axes
from jremat.planner.read_block import markable
from jremat.policy.ops import SELECTABLE


@dataclass(frozen=True, eq=False, repr=False)
class Fitted:
    """A function under a plan; call it like the function.

    Args:
        f: the function.
        program: it, traced, calls entered.
        arguments: what it was traced with.
        plan: which segments are rematted, and what each keeps; prints as a table.
        override: whether the function's own remats are taken away.
    """

    f: Callable[..., Any]
    program: Program
    arguments: Arguments
    plan: FitPlan
    override: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "__name__", getattr(self.f, "__name__", type(self.f).__name__))
        object.__setattr__(self, "__doc__", getattr(self.f, "__doc__", None))
        with contextlib.suppress(TypeError, ValueError):  # some of C's have none that Python knows
            object.__setattr__(self, "__signature__", inspect.signature(self.f))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ``f`` returns for these arguments, of the shapes that the plan was made for."""
        given = take_apart(self.f, args, kwargs)
        self._check(given)
        axes = tuple(varying_axes(jax.typeof(array)) for array in given.arrays)
        if not any(axes):
            return jax.tree.unflatten(self.program.out_tree, self._run(*given.arrays))
        if axes not in self._within:  # the types of all its values differ, so that it is another program
            program = entered_program(given, self.override)
            parts = parts_of_segments(program, moved_segments(self.plan.segments, self.program, program))
            self._within[axes] = run_parts(program, parts)
        return jax.tree.unflatten(self.program.out_tree, self._within[axes](*given.arrays))

    def __repr__(self) -> str:
        return f"<{self.__name__} under a plan of {len(self.plan.segments)} segments>"  # type: ignore[attr-defined]

    @cached_property
    def _within(self) -> dict[Any, Callable[..., list[Any]]]:
        """How it is run inside of a ``shard_map``, by the axes over which its arguments vary."""
        return {}

    @cached_property
    def _run(self) -> Callable[..., list[Any]]:
        return compiled(run_parts(self.program, parts_of(self.program, self.plan)))

    def _check(self, given: Arguments) -> None:
        if given.tree != self.arguments.tree:
            raise ValueError(f"arguments: expected {self.arguments.tree} as planned, got {given.tree}")
        types = iter(var.aval for var in self.program.jaxpr.invars)
        for own, leaf, traced, now, path in zip(
            self.arguments.leaves, given.leaves, self.arguments.traced, given.traced, given.paths
        ):
            if traced:
                aval = next(types)
                # NumPy's 64 bits and Python's numbers are narrowed, as JAX does; a key's dtype is no number's
                shape, dtype = jnp.shape(leaf), leaf.dtype if isinstance(leaf, jax.Array) else jnp.result_type(leaf)
                narrowed = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
                if not now or shape != aval.shape or narrowed != aval.dtype:
                    raise ValueError(
                        f"{path}: expected {aval.dtype}{list(aval.shape)} as planned, got {dtype}{list(shape)}; a plan "
                        "holds for one set of shapes, so call jremat.fit for these"
                    )
            elif now or not (own is leaf or own == leaf):
                raise ValueError(f"{path}: expected {own!r} as planned, got {leaf!r}")


def parts_of(program: Program, plan: FitPlan) -> list[Part]:
    """A plan's segments as they are run.

    Raises:
        ValueError: the plan was made for another program.
    """
    graph = graph_of(program, SELECTABLE)
    if graph.signature.partition("-")[0] != plan.fingerprint.partition("-")[0]:
        raise ValueError(f"plan: it {graph.differs_from(plan.fingerprint)}: fit anew")
    return parts_of_segments(program, plan.segments)


def parts_of_segments(program: Program, segments: Sequence[PlannedSegment]) -> list[Part]:
    """Planned segments of a program as they are run.

    Raises:
        ValueError: a segment keeps what the program hasn't.
    """
    known = {c.value.id: c for c in markable(graph_of(program, SELECTABLE), False).values()}
    parts = []
    for segment in segments:
        inside = tuple(_inside_parts(program, own) for own in segment.inside)
        if segment.kept is None:
            parts.append(Part(segment.start, segment.end, None, inside=inside))
            continue
        unknown = [value for value in segment.kept if value not in known]
        if unknown:
            raise ValueError(f"plan: expected values of this program, got {', '.join(unknown)}")
        kept = [known[value] for value in segment.kept]
        marks = tuple((shifted(c.value.id, segment.start), c.mark) for c in kept if not c.inside)
        parts.append(Part(segment.start, segment.end, marks, frozenset(c.mark for c in kept), inside))
    return parts


def _inside_parts(program: Program, planned: PlannedInside) -> InsideParts:
    bodies = bodies_of(program.jaxpr.eqns[planned.equation])
    parts = (tuple(parts_of_segments(*pair)) for pair in zip(bodies, planned.bodies, strict=True))
    return InsideParts(planned.equation, tuple(zip(bodies, parts)), planned.group)
