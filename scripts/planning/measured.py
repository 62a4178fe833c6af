"""The best few plans timed on the device that is here, and the fastest of them taken."""

from dataclasses import replace
from typing import Any, cast

from jremat.measure import program, target
from jremat.planner.result import Plan, Point
from jremat.policy import PolicyLike
from jremat.terminal.tables import show
from models.remat import remat
from scripts.benchmark.build import built_under, config_of, flops_of
from scripts.benchmark.measure import timed
from scripts.planning.question import Answer

_PLANS = 3
"""Neighbours on the frontier differ by a layer, so three spread ones say which way to go."""


def fastest(answer: Answer, out: Any) -> Answer:
    """The answer, its plan replaced by the one with the most measured tokens a second.

    Timed are the chosen plan and leaner ones of the frontier, which fit too: a model that charges recompute too much
    would have kept too much.

    Args:
        out: a console for the lines that say what was measured.
    """
    plan, kind = answer.plan, target(answer.case.target)
    candidates = [None, *leaner(plan, _PLANS - 1)]  # None: the chosen plan
    rows: list[tuple[float, Point | None, int]] = []
    for point in candidates:
        policy = plan.policy if point is None else point.plan
        built = built_under(answer.case, remat(policy, config_of(answer.case)))
        memory, run = program(built.step, built.state, built.tokens, target=kind, num_buffers=0)
        figures = timed(answer.case, built, run, kind, flops_of(built, answer.case))
        rows.append((figures["tokens_per_second"], point, memory.peak_bytes))
        show(out, f"measured {figures['tokens_per_second']:,.0f} tokens/s under {policy.spec}")
    _, best, peak_bytes = max(rows, key=lambda row: row[0])
    if best is None:
        return replace(answer, plan=replace(plan, peak_bytes=peak_bytes))
    seconds = None if best.recompute_seconds is None else best.recompute_seconds / kind.num_devices
    step_seconds = None
    if plan.step_seconds is not None and plan.recompute_seconds is not None and seconds is not None:
        step_seconds = plan.step_seconds - plan.recompute_seconds + seconds
    return replace(
        answer,
        plan=replace(
            plan,
            policy=cast(PolicyLike, best.plan),
            peak_bytes=peak_bytes,
            predicted_peak_bytes=best.predicted_peak_bytes,
            kept_bytes=best.kept_bytes // kind.num_devices,
            recompute_seconds=seconds,
            recompute_flops=best.recompute_flops,
            step_seconds=step_seconds,
        ),
    )


def leaner(plan: Plan, most: int) -> list[Point]:
    """Points of the frontier's leaner half that are expected to need less than the plan, spread from the nearest on."""
    peak = plan.predicted_peak_bytes if plan.peak_bytes is None else plan.peak_bytes
    left = [p for p in plan.frontier if p.plan != plan.policy and p.expected_peak_bytes < peak]
    reach = max(len(left) // 2, min(len(left), most))
    places = sorted({k * reach // most for k in range(most)}) if reach else []
    return [left[place] for place in places]
