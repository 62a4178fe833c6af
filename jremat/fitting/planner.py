"""Any function and a number of bytes in, the same function that fits out."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jremat.fitting.choose import Choices, Inside, SegmentRow
from jremat.fitting.fitted import Fitted
from jremat.fitting.inside import choices_inside
from jremat.fitting.plan import FitPlan, FitPoint, load
from jremat.fitting.planned import planned_segments
from jremat.fitting.program import entered_program
from jremat.fitting.read import Reading, read
from jremat.graph.arguments import Arguments, take_apart
from jremat.graph.peak import PredictedMemory, predicted_memory
from jremat.graph.trace import Program
from jremat.measure import Target, compiled_memory
from jremat.measure import target as find_target
from jremat.measure.memory_analysis import versions
from jremat.planner.plan_arguments import (
    Objective,
    check_functions,
    check_margin,
    checked_tags,
    known_bytes,
    known_objective,
    step_under,
)
from jremat.planner.planner import cost_of, equipped
from jremat.planner.roofline import Cost
from jremat.planner.search import Found, search
from jremat.planner.stack import Choice
from jremat.policy.shown import human
from jremat.policy.whole_number import whole_number

StepOf = Callable[[Callable[..., Any]], tuple[Callable[..., Any], tuple[Any, ...]]]
"""The user's whole step with a function in it, and the shapes of its arguments."""

_POINTS = 24
"""Rows of segments that are worked out between the leanest and the program as it is."""


class DoesNotFit(ValueError):
    """Nothing fits the memory there is; ``leanest`` is the function under the plan that comes nearest."""

    def __init__(self, message: str, leanest: Fitted):
        super().__init__(message)
        self.leanest = leanest


def fit(
    f: Callable[..., Any],
    *args: Any,
    hbm_bytes: int | str | None = None,
    target: str | Target = "local",
    step: StepOf | None = None,
    argnums: int | Sequence[int] = 0,
    objective: Objective | None = None,
    cost: Cost | None = None,
    keep: Collection[str] = (),
    margin: float = 0.05,
    compiles: int = 2,
    plan: FitPlan | str | Path | None = None,
    override: bool = False,
    **kwargs: Any,
) -> Fitted:
    """``f`` with a backward pass that fits the memory: same signature, same values, nothing else to change.

    The function is traced once and its equations are cut into segments at narrow points of what is alive. Each segment
    is left as it is or rematted, with what it keeps chosen exactly by a min cut; where to cut and what to keep is the
    fastest choice under the peak, by a dynamic program. The peak is predicted and then confirmed by the compiler.

    Args:
        f: a loss, or any traceable function that is differentiated.
        args, kwargs: its arguments, arrays or ``jax.ShapeDtypeStruct``; the result takes these shapes alone.
        hbm_bytes: device memory, as an int or as ``"80GiB"``; None: the target's own.
        target: what the step is compiled for, see ``jremat.measure.target``.
        step: ``step(f)`` to the whole training step with ``f`` in it and the shapes of its arguments, so that the
            optimizer counts; None: value and gradient of ``f``.
        argnums: the arguments that are differentiated, as in ``jax.grad``.
        objective: ``seconds``, by roofline on the target's chip, or ``flops``, of matmuls; None: seconds where the
            target is a chip that the table knows.
        cost: of each operation, e.g. measured, in place of the roofline.
        keep: tags of values that must not be recomputed; what a choice by value (top-k, sort, argmax) is made from
            never is.
        margin: share of the memory to leave free.
        compiles: to spend on a plan that fits; more are spent where none does yet, or much memory is left over. 0: the
            prediction is the answer.
        plan: one that ``.plan.save`` wrote, or its path: applied as it is, nothing is searched or compiled.
        override: take away the function's own ``jax.checkpoint`` (``nn.remat``) and plan what is inside; else each of
            them is one operation that reruns as it says.

    Returns:
        The function; ``.plan`` prints its segments, ``.plan.save(path)`` writes them.

    Raises:
        DoesNotFit: a ValueError with the least that can be reached.
        ValueError: an argument out of range, a plan of another program, or an effect in ``f`` that a rerun would
            repeat.

    >>> def loss(ws, x):
    ...     for w in ws:
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.mean(x)
    >>> ws, x = [jnp.ones((64, 64))] * 8, jnp.ones((1024, 64))
    >>> small = fit(loss, ws, x, hbm_bytes="4.25MiB", target="cpu", margin=0.0, compiles=0)
    >>> bool(small(ws, x) == loss(ws, x)), small.plan.predicted_peak_bytes <= 4.25 * 2**20
    (True, True)

    Source: Chen et al. 2016, arXiv 1604.06174, for segments; Jain et al. 2020, arXiv 1910.02653, for the choice.
    """
    arguments = take_apart(f, args, kwargs)
    program = entered_program(arguments, override)
    if plan is not None:
        found = load(plan) if isinstance(plan, str | Path) else plan
        fitted = Fitted(f, program, arguments, found, override)
        _ = fitted._run  # raises where it is another program's
        return fitted
    kind = equipped(find_target(target))
    memory_bytes = known_bytes(hbm_bytes, kind)
    compiles = whole_number("compiles", compiles, 0)
    check_margin(margin)
    check_functions(step=step, cost=cost)
    if kind.num_devices > 1 and step is None:
        raise ValueError(f"step: expected the whole step, cut over the devices of target {kind.name!r}, got None")
    wanted = Wanted(f, arguments, program, active_places(arguments, argnums), loss_places(program), step, override)
    chosen = known_objective(objective, cost, kind)
    return planner(wanted, kind, chosen, cost, checked_tags(keep)).fit(memory_bytes, margin, compiles)


@dataclass(frozen=True, eq=False)
class Planner:
    """A function with every row of segments that is worth a look, ready to be fitted into any memory.

    Args:
        wanted: what is fitted.
        reading: of it.
        rows: fastest first.
        kind: what the step is compiled for.
        objective: the unit of the rows' seconds.
    """

    wanted: "Wanted"
    reading: Reading
    rows: tuple[SegmentRow, ...]
    kind: Target
    objective: Objective

    @cached_property
    def _line(self) -> dict[Any, SegmentRow]:
        return {_key(row): row for row in self.rows}

    @cached_property
    def made(self) -> Callable[[Any], Fitted]:
        """A row's key to the function under it."""
        wanted = self.wanted
        planned = lambda key: planned_row(self.reading, self._line[key])
        return cache(lambda key: Fitted(wanted.f, wanted.program, wanted.arguments, planned(key), wanted.override))

    @cached_property
    def traced(self) -> Callable[[Any], int]:
        """A row's key to the predicted peak of the step, on one device."""
        devices = self.kind.num_devices
        return cache(lambda key: predicted_memory(*self.wanted.step(self.made(key))).peak_bytes // devices)

    @cached_property
    def confirm(self) -> Callable[[Any], int]:
        """A row's key to the compiled peak of the step."""
        return cache(
            lambda key: compiled_memory(*self.wanted.step(self.made(key)), target=self.kind, num_buffers=0).peak_bytes
        )

    def fit(self, memory_bytes: int, margin: float, compiles: int) -> Fitted:
        """The fastest that fits; arguments are those of ``fit``.

        Raises:
            DoesNotFit: nothing does.
        """
        line = [Choice(cast(Any, key), row.peak_bytes, 0, row.seconds, row.flops) for key, row in self._line.items()]
        confirm = self.confirm if compiles else None
        found = search([line], int(memory_bytes * (1 - margin)), self.traced, confirm, (), compiles or 1)
        best = self.made(cast(Any, found.choice.plan))
        whole = replace(
            best.plan,
            peak_bytes=found.peak_bytes,
            predicted_peak_bytes=found.predicted_peak_bytes,
            hbm_bytes=memory_bytes,
            margin=margin,
            objective=self.objective,
            base_seconds=self.reading.step_seconds,
            target=self.kind.label,
            versions=tuple(sorted(versions(self.kind).items())),
            compiles=found.compiles,
            frontier=_frontier(found),
        )
        fitted = replace(best, plan=whole)
        if not found.fits:
            raise DoesNotFit(_why_not(whole, predicted_memory(*self.wanted.step(fitted))), fitted)
        return fitted


def planner(wanted: "Wanted", kind: Target, objective: Objective, cost: Cost | None, keep: tuple[str, ...]) -> Planner:
    """Read a function and work out its rows of segments."""
    by_cost = cost or cost_of(kind, objective)
    reading = read(wanted.program, wanted.active, wanted.losses, by_cost, keep)
    choices = Choices(reading, inside=choices_inside(reading, wanted.active, by_cost, keep))
    return Planner(wanted, reading, tuple(_rows(choices)), kind, objective)


@dataclass(frozen=True, eq=False)
class Wanted:
    """What is to be fitted.

    Args:
        f, arguments, program: the function, and what it is traced with and to.
        active: places among the arrays that it is differentiated by.
        losses: places among its results that are differentiated.
        step_of: the user's.
        override: whether its own remats are taken away.
    """

    f: Callable[..., Any]
    arguments: Arguments
    program: Program
    active: tuple[int, ...]
    losses: tuple[int, ...]
    step_of: StepOf | None
    override: bool = False

    def step(self, fitted: Fitted) -> tuple[Any, ...]:
        """The step with the function in it, and its arguments."""
        if self.step_of is not None:
            function, shapes = step_under(self.step_of, fitted)
            return function, *shapes
        run = fitted._run

        def value_and_grad(*arrays: Any) -> Any:
            def loss(*chosen: Any) -> Any:
                given = list(arrays)
                for k, value in zip(self.active, chosen):
                    given[k] = value
                outs = run(*given)
                total = sum(jnp.mean(outs[k]) for k in self.losses)
                return jnp.real(total) if jnp.iscomplexobj(total) else total, outs

            return jax.value_and_grad(loss, tuple(range(len(self.active))), has_aux=True)(
                *(arrays[k] for k in self.active)
            )

        def one_value(*arrays: Any) -> Any:
            (value, outs), gradients = value_and_grad(*arrays)
            rest = [out for k, out in enumerate(outs) if k not in self.losses]
            return value, rest, gradients

        return one_value, *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.program.jaxpr.invars)


def active_places(arguments: Arguments, argnums: int | Sequence[int]) -> tuple[int, ...]:
    """The places among a call's arrays of those that it is differentiated by.

    Raises:
        ValueError: there are none.
    """
    args, _ = jax.tree.unflatten(arguments.tree, arguments.leaves)
    numbers = (argnums,) if isinstance(argnums, int | np.integer) else tuple(argnums)
    if not numbers or not all(
        isinstance(k, int | np.integer) and not isinstance(k, bool) and -len(args) <= k < len(args) for k in numbers
    ):
        raise ValueError(f"argnums: expected positions of the {len(args)} arguments, as in jax.grad, got {argnums!r}")
    owners = [k for k, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    wanted = {int(k) % len(args) for k in numbers}
    owner_of = iter(
        [owner for owner, traced in zip([*owners, *([-1] * len(arguments.leaves))], arguments.traced) if traced]
    )
    real = lambda leaf: jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    places = tuple(k for k, leaf in enumerate(arguments.arrays) if next(owner_of) in wanted and real(leaf))
    if not places:
        raise ValueError(f"argnums: expected arguments with floating-point arrays to differentiate by, got {argnums!r}")
    return places


def loss_places(program: Program) -> tuple[int, ...]:
    """The places of the results that are differentiated: of (loss, aux) the loss, else all that float.

    Raises:
        ValueError: there are none.
    """
    outs = [v.aval for v in program.jaxpr.outvars]
    real = [k for k, aval in enumerate(outs) if jnp.issubdtype(aval.dtype, jnp.inexact)]
    shape = jax.tree.unflatten(program.out_tree, range(len(outs)))
    if isinstance(shape, tuple) and len(shape) == 2 and isinstance(shape[0], int):
        first = shape[0]
        if first in real and not outs[first].shape:
            return (first,)
    if not real:
        raise ValueError("f: expected a floating-point result to differentiate, got none")
    return tuple(real)


def _rows(choices: Choices) -> list[SegmentRow]:
    """Rows of segments worth a look, fastest first: each next one is slower and needs less."""
    least, most = choices.least(), choices.row(np.inf)
    assert most is not None, "without a limit everything fits"
    found = [most, least]
    for limit in np.linspace(least.peak_bytes, most.peak_bytes, _POINTS)[1:-1]:
        row = choices.row(float(limit))
        if row is not None:
            found.append(row)
    rows: list[SegmentRow] = []
    for row in sorted(found, key=lambda row: (row.seconds, row.peak_bytes)):
        if not rows or row.peak_bytes < rows[-1].peak_bytes:
            rows.append(row)
    return rows


def _key(row: SegmentRow) -> tuple[tuple[int, int, frozenset[str] | None, tuple[Inside, ...]], ...]:
    """What tells one row from another."""
    return tuple((segment.start, segment.end, segment.kept, segment.inside) for segment in row.segments)


def planned_row(reading: Reading, row: SegmentRow) -> FitPlan:
    """A row of segments as a plan."""
    return FitPlan(
        reading.graph.signature, planned_segments(reading.program, row.segments), base_seconds=reading.step_seconds
    )


def _frontier(found: Found) -> tuple[FitPoint, ...]:
    """The choices of which no faster one needs as little, fastest first."""
    points: list[FitPoint] = []
    for choice, peak in sorted((pair for line in found.lines for pair in line), key=lambda p: p[0].recompute_seconds):
        expected = found.expected_bytes(choice, peak)
        if not points or expected < points[-1].expected_peak_bytes:
            segments = sum(kept is not None or bool(inside) for *_, kept, inside in cast(Any, choice.plan))
            points.append(FitPoint(expected, choice.recompute_seconds, choice.recompute_flops, segments))
    return tuple(points)


def _why_not(leanest: FitPlan, traced: PredictedMemory) -> str:
    """What to say where nothing fits.

    Args:
        leanest: the plan that needs least.
        traced: the peak of the step under it.
    """
    peak = leanest.peak_bytes if leanest.peak_bytes is not None else leanest.predicted_peak_bytes
    limit = leanest.hbm_bytes * (1 - leanest.margin)
    held = traced.peak_bytes - traced.temp_bytes
    made = [b for b in traced.alive_at(traced.peak_step) if b.kind not in ("argument", "optimizer state", "result")]
    why = f"; arguments and results alone are {human(held)}" if held > limit else ""
    if made and not why:
        largest = made[0]
        shape = f"{largest.dtype}[{', '.join(map(str, largest.shape))}]"
        moment = next(m for m in traced.timeline if m.step == traced.peak_step)
        where = f" at {line}" if (line := largest.source or moment.source) else ""
        why = f"; the largest value alive then is {largest.name} {shape}, {human(largest.nbytes)}{where}"
    return (
        f"hbm_bytes: nothing fits in {human(limit)} ({human(leanest.hbm_bytes)} less {leanest.margin:.0%}); the least "
        f"that was reached is {human(peak)}, {human(peak - limit)} more{why}"
    )
