"""The best few plans timed on the device that is here, and the fastest of them taken."""

from dataclasses import replace
from typing import Any

from jremat.measure import program, target
from jremat.policy import LayerPlan, Policy
from scripts.benchmark.build import built_under, config_of, flops_of
from scripts.benchmark.measure import timed
from scripts.planning.question import Answer
from scripts.training.remat import run_as

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
    places = [k for k, point in enumerate(plan.frontier) if point.plan == plan.policy]
    first = places[0] if places else 0
    last = len(plan.frontier) - 1
    chosen = sorted({first + (last - first) * k // (2 * _PLANS) for k in range(_PLANS)})
    rows: list[tuple[float, Policy | LayerPlan, int]] = []
    for place in chosen:
        candidate = plan.frontier[place].plan
        under = run_as(candidate.spec, candidate, "auto", config_of(answer.case))
        built = built_under(answer.case, kind.num_devices, under)
        memory, run = program(built.step, built.state, built.tokens, target=kind, num_buffers=0)
        figures = timed(answer.case, built, run, kind, flops_of(built, answer.case))
        rows.append((figures["tokens_per_second"], candidate, memory.peak_bytes))
        out.print(f"measured {figures['tokens_per_second']:,.0f} tokens/s under {candidate.spec}")
    _, best, peak_bytes = max(rows, key=lambda row: row[0])
    point = next(p for p in plan.frontier if p.plan == best)
    seconds = None if point.recompute_seconds is None else point.recompute_seconds / kind.num_devices
    step_seconds = None
    if plan.step_seconds is not None and plan.recompute_seconds is not None and seconds is not None:
        step_seconds = plan.step_seconds - plan.recompute_seconds + seconds
    return replace(
        answer,
        plan=replace(
            plan,
            policy=best,
            peak_bytes=peak_bytes,
            predicted_peak_bytes=point.predicted_peak_bytes,
            kept_bytes=point.kept_bytes // kind.num_devices,
            recompute_seconds=seconds,
            recompute_flops=point.recompute_flops,
            step_seconds=step_seconds,
        ),
    )
