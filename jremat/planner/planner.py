"""Bytes in, the fastest plan that fits out, with its proof."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jremat.estimator.hardware import chip_of
from jremat.graph import trace
from jremat.graph.arguments import arrays_alone, take_apart
from jremat.graph.peak import predicted_memory
from jremat.graph.trace import graph_of
from jremat.measure import Target, compiled_memory, devices
from jremat.measure import target as find_target
from jremat.measure.memory_analysis import versions
from jremat.planner.options import PlanOptions
from jremat.planner.plan_arguments import (
    Objective,
    check_function,
    check_functions,
    checked_peak,
    known_bytes,
    known_objective,
    step_under,
)
from jremat.planner.read_block import read_block
from jremat.planner.result import DoesNotFit, KeptValue, Plan, Point, Points
from jremat.planner.roofline import Cost, Roofline, matmul_flops
from jremat.planner.search import Found, search
from jremat.planner.stack import Choice, Stack
from jremat.policy import FULL, NONE, LayerPlan, Policy, PolicyLike
from jremat.policy.shown import human
from jremat.policy.whole_number import whole_number
from jremat.transform.chain import stack as run_stack
from jremat.transform.checkpoint import checkpoint
from jremat.transform.decide import shapes_given
from jremat.transform.groups import gradient_step

StepOf = Callable[[Policy | LayerPlan], tuple[Callable[..., Any], tuple[Any, ...]]]
"""The whole step under a plan, and the shapes of its arguments."""
_DEFAULTS = PlanOptions()


def plan(
    f: Callable[..., Any],
    *args: Any,
    num_layers: int | None = None,
    hbm_bytes: int | str | None = None,
    target: str | Target = "local",
    step: StepOf | None = None,
    compiles: int = 2,
    options: PlanOptions = _DEFAULTS,
) -> Plan:
    """The fastest plan whose step fits the memory, shown to fit by compiling it.

    What is kept in a block is chosen exactly, by a 0/1 program on the program that a recompute runs; over the layers
    two neighbouring choices of its frontier are mixed; below full remat layers share a replay. The peak of the whole
    step is predicted from its program and confirmed by the compiler. On a target of several devices parameters count as
    cut as FSDP cuts them: replays of whole layers then wait for them once more.

    Args:
        f: the forward function. With ``num_layers`` a block ``block(layer_parameters, carry, *shared)`` to the next
            carry, as ``jremat.stack`` runs it; without, a function for ``jremat.checkpoint``.
        args: its arguments, arrays or ``jax.ShapeDtypeStruct``, of one layer.
        num_layers: L.
        hbm_bytes: device memory, as a number or as ``"80GiB"``; None: the target's own.
        target: what the step is compiled for, see ``jremat.measure.target``.
        step: ``step(plan)`` to the whole training step under a plan and the shapes of its arguments, so that weights,
            gradients, optimizer, logits and loss count, sharded where the target is several devices; None: the gradient
            of the layers alone, on one device, which leaves all of these out, and the plan's printed form says so.
        compiles: to spend on a plan that fits; up to six are spent where nothing fits so far, or over a fifth of the
            memory would be left over; and one on each of ``options.also`` that is faster and near, one more where that
            is the answer. 0: the prediction is the answer.
        options: a ``jremat.PlanOptions``: host memory, what to minimise, costs and policies of your own.

    Returns:
        The plan: ``.policy``, ``.spec``, ``.peak_bytes`` compiled beside ``.predicted_peak_bytes``,
        ``.recompute_flops``, ``.step_seconds`` modelled, ``.frontier``, and in words what it keeps.

    Raises:
        DoesNotFit: a ValueError that says by how much, with the leanest plan.
        ValueError: an argument out of range, or a function that returns something else than is asked of it; a target
            whose memory or chip is unknown, where that is needed.

    >>> block = lambda w, x: jnp.tanh(x @ w)
    >>> w, x = jnp.ones((64, 64)), jnp.ones((512, 64))
    >>> found = plan(block, w, x, num_layers=8, hbm_bytes=2**21, target="cpu")
    >>> found.peak_bytes <= 0.95 * 2**21, found.objective
    (True, 'flops')

    Source: Jain et al. 2020, arXiv 1910.02653, for the program; Chen et al. 2016, arXiv 1604.06174, for groups.
    """
    kind = equipped(find_target(target))
    memory_bytes = known_bytes(hbm_bytes, kind)
    num_layers = None if num_layers is None else whole_number("num_layers", num_layers, 1, MAX_LAYERS)
    compiles = whole_number("compiles", compiles, 0)
    check_function(f, args, num_layers)
    check_functions(step=step)
    if not isinstance(options, PlanOptions):
        raise ValueError(f"options: expected a jremat.PlanOptions, got {options!r}")
    if kind.num_devices > 1 and step is None:
        raise ValueError(f"step: expected the whole step, cut over the devices of target {kind.name!r}, got None")
    also = cast(tuple[Policy | LayerPlan, ...], options.also)
    if num_layers is None and (whole_stack := next((p for p in also if isinstance(p, LayerPlan)), None)):
        raise ValueError(f"also: {whole_stack.spec!r} is a plan over layers, and there is no num_layers")
    chosen = known_objective(options.objective, options.cost, kind)
    host_bytes, names_only = cast(int, options.host_bytes), options.names_only
    if num_layers is None:
        call = take_apart(f, args, {})
        f, args = (f, args) if all(call.traced) else (call.over_arrays(call.call), call.to_trace()[0])
    elif len(args) > 1:
        f, args = arrays_alone(f, args)
    wanted = _Wanted(f, args, num_layers, step)
    read = partial(_stack, wanted, options.cost or cost_of(kind, chosen), kind, host_bytes, options.keep)
    stack = read(names_only)
    lines = [stack.choices(host_bytes, groups=num_layers is not None and not names_only)]
    if tail := stack.tailed(host_bytes):
        lines.append(tail)
    # On several devices everything is cut; the memory for what is gathered is in the compiler's correction.
    own = lambda plan: predicted_memory(*_flat(wanted.step(plan))).peak_bytes // kind.num_devices
    traced = cache(lambda plan: checked_peak((options.predict or own)(plan)))
    compiled = cache(lambda plan: compiled_memory(*_flat(wanted.step(plan)), target=kind, num_buffers=0).peak_bytes)
    confirm = compiled if compiles else None
    limit = int(memory_bytes * (1 - options.margin))
    # Policies by name are costed on the block with all of its values, whatever the plan itself may keep.
    whole = read(False) if names_only else stack
    named = tuple(_understood(also, whole))
    allowed = [
        choice
        for choice in (whole.choice(FULL), whole.choice(NONE), *named)
        if choice.host_bytes <= host_bytes and not whole.repeats_a_decision(choice.plan)
    ]
    found = search(lines, limit, traced, confirm, allowed, max(compiles, 1), stack.with_tail)
    base = _base_seconds(wanted, whole, kind) if chosen == "seconds" else None
    point = partial(_point, found, seconds=chosen == "seconds")
    frontier = _frontier((pair for line in found.lines for pair in line), point)
    beside = Points(point(choice, traced(choice.plan)) for choice in named)
    result = _result(found, frontier, beside, whole, wanted, kind, memory_bytes, options.margin, chosen, base)
    if not found.fits:
        raise DoesNotFit(_why_not(result), result)
    return result


MAX_LAYERS = 1000
"""More are beyond any model and would keep the search waiting: it looks at mixes layer by layer."""


def equipped(kind: Target) -> Target:
    """A target that is here, with the chip and the memory that it turns out to have."""
    if kind.described:
        return kind
    device = devices(kind)[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return replace(kind, chip=chip_of(device.device_kind), hbm_bytes=limit)


@dataclass(frozen=True, eq=False)
class _Wanted:
    """What is to be planned."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    num_layers: int | None
    step_of: StepOf | None

    def step(self, plan: Policy | LayerPlan) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The whole step under a plan."""
        if self.step_of is not None:
            return step_under(self.step_of, plan)
        shapes = jax.tree.map(_shape, self.args)
        if self.num_layers is None:
            assert isinstance(plan, Policy), "a function without layers has one policy"
            return _gradient(checkpoint(self.f, plan)), shapes
        layer, *rest = shapes
        num_layers = self.num_layers
        stacked = jax.tree.map(lambda leaf: _shape(leaf, num_layers), layer)
        return gradient_step(run_stack(self.f, plan, num_layers=self.num_layers)), (stacked, *rest)


def _shape(leaf: Any, *stacked: int) -> jax.ShapeDtypeStruct:
    """The shape of an array, or of so many stacked; its sharding too where that is in its type."""
    shape = jax.ShapeDtypeStruct((*stacked, *jnp.shape(leaf)), jnp.result_type(leaf))
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return shape
    spec = PartitionSpec(*(None for _ in stacked), *sharding.spec)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding.update(spec=spec))


def _gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Value and gradient of the mean of what ``f`` returns, by everything that floats."""
    run = gradient_step(lambda args, _: f(*args))
    return lambda *args: run(args, ())


def _flat(step: tuple[Callable[..., Any], tuple[Any, ...]]) -> tuple[Any, ...]:
    return step[0], *step[1]


def cost_of(kind: Target, objective: Objective | None = None) -> Cost:
    """Seconds on the target's chip, or matmul FLOPs where those are wanted or the chip is unknown."""
    return matmul_flops if objective == "flops" or kind.chip is None else Roofline(kind.chip)


def _stack(
    wanted: _Wanted, cost: Cost, kind: Target, host_bytes: int, keep: Collection[str], names_only: bool
) -> Stack:
    link = kind.chip.host_link_bytes_per_second if kind.chip else None
    block = read_block(
        wanted.f,
        *wanted.args,
        cost=cost,
        keep=keep,
        names_only=names_only,
        fetched=0 if wanted.num_layers is None else 1,
        host_link_bytes_per_second=(link if cost is not matmul_flops else np.inf) if host_bytes else None,
    )
    carry = _nbytes(jax.eval_shape(wanted.f, *wanted.args))
    fetch = 0.0
    if wanted.num_layers is not None and kind.num_devices > 1 and kind.chip and cost is not matmul_flops:
        # Every device gets what it hasn't, in 16 bits; in the unit of a cost, the seconds of all devices.
        halves = sum(leaf.size * 2 for leaf in jax.tree.leaves(wanted.args[0]))
        fetch = halves * (kind.num_devices - 1) / kind.chip.chip_link_bytes_per_second
    return Stack(block, wanted.num_layers or 1, carry, fetch)


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf.dtype, "itemsize"))


def _base_seconds(wanted: _Wanted, stack: Stack, kind: Target) -> float | None:
    """Modelled seconds of the whole step without recompute.

    On several devices the layers' parameters are gathered twice and their gradients scattered once beside the
    arithmetic: the longer of the two counts.
    """
    if kind.chip is None:
        return None
    function, shapes = wanted.step(FULL)
    whole = Roofline(kind.chip).total(trace(function, *shapes)) / kind.num_devices
    arithmetic = max(0.0, whole - stack.choice(FULL).recompute_seconds / kind.num_devices)
    return max(arithmetic, 3 * stack.num_layers * stack.fetch_seconds / kind.num_devices)


def _understood(also: Iterable[Policy | LayerPlan], stack: Stack) -> Iterator[Choice]:
    """The policies that the block understands, with their costs."""
    for plan in also:
        try:
            yield stack.choice(plan)
        except ValueError:  # a name that this model hasn't
            continue


def _frontier(peaks: Iterable[tuple[Choice, int]], point: Callable[[Choice, int], Point]) -> Points:
    """The choices of which no faster one needs as little."""
    points: list[Point] = []
    for choice, peak in sorted(peaks, key=lambda pair: (pair[0].recompute_seconds, pair[1])):
        if not points or peak < points[-1].predicted_peak_bytes:
            points.append(point(choice, peak))
    return Points(points)


def _point(found: Found, choice: Choice, peak_bytes: int, seconds: bool) -> Point:
    modelled = choice.recompute_seconds if seconds else None
    expected = found.expected_bytes(choice, peak_bytes)
    return Point(choice.plan, choice.kept_bytes, peak_bytes, expected, modelled, choice.recompute_flops)


def _result(
    found: Found,
    frontier: Points,
    beside: Points,
    stack: Stack,
    wanted: _Wanted,
    kind: Target,
    memory_bytes: int,
    margin: float,
    objective: Objective,
    base: float | None,
) -> Plan:
    choice = found.choice
    seconds = choice.recompute_seconds / kind.num_devices if objective == "seconds" else None
    return Plan(
        policy=cast(PolicyLike, choice.plan),
        peak_bytes=found.peak_bytes,
        predicted_peak_bytes=found.predicted_peak_bytes,
        hbm_bytes=memory_bytes,
        margin=margin,
        host_bytes=choice.host_bytes // kind.num_devices,
        kept_bytes=choice.kept_bytes // kind.num_devices,
        recompute_seconds=seconds,
        recompute_flops=choice.recompute_flops,
        step_seconds=None if base is None or seconds is None else base + seconds,
        forward_flops=stack.block.forward_flops * stack.num_layers,
        objective=objective,
        kept=_kept(choice.plan, stack),
        frontier=frontier,
        beside=beside,
        compiles=found.compiles,
        target=kind.label,
        versions=versions(kind),
        shapes=shapes_given(graph_of(stack.block.program)),
        num_layers=wanted.num_layers,
        whole_step=wanted.step_of is not None,
    )


def _kept(plan: Policy | LayerPlan, stack: Stack) -> tuple[KeptValue, ...]:
    policies = [plan] * stack.num_layers if isinstance(plan, Policy) else plan.policies(stack.num_layers)
    found: dict[tuple[int, str], tuple[int, float]] = {}  # (node, where) -> layers, seconds spared in all of them
    for policy, layers in Counter(policies).items():
        outcome = stack.block.outcome(policy)
        for place in outcome.held:
            node = stack.block.problem.nodes[place]
            without = stack.block.problem.outcome(
                outcome.kept - {node.mark or ""}, outcome.offloaded - {node.mark or ""}
            )
            spared = without.recompute_seconds - outcome.recompute_seconds
            where = "host" if node.mark in outcome.offloaded else "device"
            before = found.get((place, where), (0, 0.0))
            found[place, where] = before[0] + layers, before[1] + layers * spared
    nodes = stack.block.problem.nodes
    rows = (
        KeptValue(layers, nodes[p].name or nodes[p].primitive, nodes[p].nbytes, where, nodes[p].source, spared / layers)
        for (p, where), (layers, spared) in found.items()
    )
    return tuple(sorted(rows, key=lambda row: -row.nbytes * row.layers))


def _why_not(leanest: Plan) -> str:
    peak = leanest.peak_bytes if leanest.peak_bytes is not None else leanest.predicted_peak_bytes
    limit = leanest.hbm_bytes * (1 - leanest.margin)
    return (
        f"hbm_bytes: nothing fits in {human(limit)} ({human(leanest.hbm_bytes)} less {leanest.margin:.0%}); "
        f"the leanest plan, {leanest.policy.spec}, needs {human(peak)}, {human(peak - limit)} more"
        + (f" ({leanest.not_counted})" if leanest.not_counted else "")
    )
