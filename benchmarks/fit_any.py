"""``jremat.fit`` on models of many kinds, beside what people put there by hand.

    python benchmarks/fit_any.py                          # continues; --only unet vit for some of them
    python benchmarks/fit_any.py --minutes 0              # the table from what is there

Value and gradient of each loss, compiled for a described H200, XLA's own remat pass off; nothing is run. What was
compiled lies in benchmarks/fit_any.json, which a further run continues: delete a model's rows where it or the planner
changes. The table is written to benchmarks/fit_any.md.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from jremat.terminal.command_line import run
from jremat.terminal.start_jax import start_jax

start_jax()

import flax.linen as nn
import jax
import numpy as np
import tyro

import jremat
from benchmarks.fit_any_models import MODELS, Program
from jremat.fitting.cuts import lives, narrow_points
from jremat.fitting.planner import DoesNotFit, Planner, Wanted, active_places, loss_places, planner
from jremat.fitting.program import entered_program
from jremat.fitting.run import Part, run_parts
from jremat.graph.arguments import take_apart
from jremat.graph.trace import graph_of
from jremat.measure import target
from jremat.planner.planner import equipped
from jremat.planner.roofline import Roofline

HERE = Path(__file__).parent
ROWS = HERE / "fit_any.json"
COST = Roofline(target("h200").chip)
BUDGETS = 6
MIB = 2**20
POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""Put by hand on every block."""


def main(only: tuple[str, ...] = (), minutes: float = 1e6) -> None:
    """Fill in what is missing and write the table.

    Args:
        only: names of models; none: all.
        minutes: after these nothing further is compiled.
    """
    until = time.time() + 60 * minutes
    unknown = set(only) - set(MODELS)
    if unknown:
        raise ValueError(f"only: expected names of models ({', '.join(MODELS)}), got {', '.join(sorted(unknown))}")
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    for name in only or MODELS:
        if time.time() < until:
            measured(name, rows.setdefault(jax.__version__, {}).setdefault(name, {}), rows, until)
    (HERE / "fit_any.md").write_text("\n".join(table(rows)) + "\n")


def measured(name: str, model: dict[str, Any], rows: Any, until: float) -> None:
    """Fill in a model's figures, each saved as it lands."""

    def kept(place: dict[str, Any], key: str, found: Callable[[], Any]) -> Any:
        if key not in place and time.time() < until:
            place[key] = found()
            ROWS.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
            print(name, key, place[key], file=sys.stderr, flush=True)
        return place.get(key)

    _, blocks, build = MODELS[name]
    loss, args = build(lambda block: block)
    plain = kept(model, "as it is", lambda: figures(loss, args))
    started = time.process_time()
    ours = planner_of(loss, args)
    took = time.process_time() - started
    kept(model, "equations", lambda: len(ours.reading.program.jaxpr.eqns))
    kept(model, "planning seconds", lambda: took)
    by_hand = model.setdefault("by hand", {})
    for label, step in hand_made(name, ours, blocks):
        kept(by_hand, label, lambda step=step: figures(*step()))
    least = kept(model, "least", lambda: least_bytes(ours))
    if not (plain and least):
        return
    budgets = np.linspace(least, plain["peak"], BUDGETS)
    wanted = {f"budget {k}": int(limit) for k, limit in enumerate(budgets)}
    wanted |= {f"at {label}": row["peak"] for label, row in by_hand.items()}
    for label, limit in wanted.items():
        kept(model.setdefault("fitted", {}), label, lambda limit=limit: fitted(ours, limit))


def planner_of(loss: Callable[..., Any], args: Sequence[Any]) -> Planner:
    """What ``jremat.fit`` plans with, for all budgets."""
    arguments = take_apart(loss, args, {})
    program = entered_program(arguments, False)
    wanted = Wanted(loss, arguments, program, active_places(arguments, 0), loss_places(program), None)
    return planner(wanted, equipped(target("h200")), "seconds", COST, ())


def figures(loss: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """What a loss comes to: compiled bytes, modelled seconds and matmuls of its value and gradient."""
    step = step_of(loss, args)
    memory = jremat.compiled_memory(step, *args, target="h200", num_buffers=0)
    again = jremat.flops(step, *args).recompute
    return {
        "peak": memory.peak_bytes,
        "arguments": memory.argument_bytes,
        "recompute": again,
        "seconds": modelled_seconds(step, args),
    }


def modelled_seconds(step: Callable[..., Any], args: Sequence[Any]) -> float:
    """A whole step by roofline, remats opened: one measure for every contender, whoever chose."""
    return sum(COST(graph_of(entered_program(take_apart(step, args, {}), True))))


def step_of(loss: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """Value and gradient, the rest of the results beside."""
    has_aux = isinstance(jax.eval_shape(loss, *args), tuple)
    return jax.value_and_grad(loss, has_aux=has_aux)


def hand_made(name: str, ours: Planner, blocks: int) -> Iterator[tuple[str, Callable[[], Program]]]:
    """What people do: remat on every block, √N segments of full remat, one checkpoint around the whole."""
    build = MODELS[name][2]

    def on_blocks(policy: Any) -> Program:
        return build(lambda block: (nn.remat if isinstance(block, type) else jax.checkpoint)(block, policy=policy))

    for label, policy in POLICIES.items():
        yield label, lambda policy=policy: on_blocks(policy)
    loss, args = build(lambda block: block)
    yield "√N segments", lambda: (in_segments(ours, round(math.sqrt(blocks))), args)
    yield "whole", lambda: (jax.checkpoint(loss), args)


def in_segments(ours: Planner, count: int) -> Callable[..., Any]:
    """The loss with full remat on each of about equal segments, cut where little is alive."""
    program = ours.wanted.program
    num = len(program.jaxpr.eqns)
    narrow = narrow_points(lives(program.jaxpr).crossing(num), np.arange(float(num)), 64)
    aims = [num * k // count for k in range(1, count)]
    bounds = sorted({0, num, *(min(narrow, key=lambda place: abs(place - aim)) for aim in aims)})
    run = run_parts(program, [Part(*pair, (), frozenset()) for pair in pairwise(bounds)])
    return lambda *args: jax.tree.unflatten(program.out_tree, run(*jax.tree.leaves(args)))


def least_bytes(ours: Planner) -> int:
    """The least peak that is reached."""
    try:
        return int(ours.fit(1, 0.0, 2).plan.peak_bytes or 0)
    except DoesNotFit as error:
        return int(error.leanest.plan.peak_bytes or 0)


def fitted(ours: Planner, limit: int) -> dict[str, Any]:
    """``fit`` into so many bytes."""
    started = time.process_time()
    try:
        found = ours.fit(limit, 0.0, 2)
    except DoesNotFit as error:
        found = error.leanest
    took = time.process_time() - started
    step, *arrays = ours.wanted.step(found)
    plan = found.plan
    return {
        "limit": limit,
        "peak": plan.peak_bytes,
        "predicted": plan.predicted_peak_bytes,
        "overhead": plan.overhead,
        "compiles": plan.compiles,
        "processor": took,
        "segments": len(plan.segments),
        "recompute": jremat.flops(step, *arrays).recompute,
        "seconds": modelled_seconds(step, arrays),
    }


# ------------------------------------------------------------------------------------------------------- the table


def table(rows: Any) -> Iterator[str]:
    """The figures as markdown."""
    yield "# Any program, fitted\n\n    python benchmarks/fit_any.py\n"
    yield (
        "Value and gradient of each loss, compiled for a described H200, not run, XLA's own remat pass off. Peaks are "
        "the compiler's, in MiB; activations are the peak less the arguments, of those as it is. Extra time is the "
        "planner's modelled recompute, of a step as it is; recomputed matmuls are counted on the gradient's program."
    )
    for version, models in rows.items():
        yield f"\n## jax {version}\n"
        yield from summary(models)
        for name, model in models.items():
            if "fitted" in model:
                yield f"\n### {MODELS[name][0]}\n"
                yield from of_model(model)


def of_model(model: dict[str, Any]) -> Iterator[str]:
    plain = model["as it is"]
    free = lambda peak: (peak - plain["arguments"]) / (plain["peak"] - plain["arguments"])
    yield (
        f"{model['equations']:,} equations, planned in {model['planning seconds']:.0f} s of a processor; as it is "
        f"{plain['peak'] / MIB:,.0f} MiB, of which arguments {plain['arguments'] / MIB:,.0f}.\n"
    )
    head = ("memory", "budget", "predicted", "compiled", "activations", "extra time", "TFLOP again", "compiles")
    head = (*head, "exceeded")
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for label, row in model["fitted"].items():
        hand = model["by hand"].get(label.removeprefix("at "))
        cells = (
            label,
            *(f"{row[key] / MIB:,.0f}" for key in ("limit", "predicted", "peak")),
            f"{free(row['peak']):.0%}",
            f"{row['overhead']:.1%}",
            f"{row['recompute'] / 1e12:.2f}" + (f" ({hand['recompute'] / 1e12:.2f} by hand)" if hand else ""),
            str(row["compiles"]),
            "yes" if row["peak"] > row["limit"] else "no",
        )
        yield f"| {' | '.join(cells)} |"


def summary(models: dict[str, Any]) -> Iterator[str]:
    """How far what must hold does."""
    done = [model for model in models.values() if "fitted" in model]
    budgets = [[r for k, r in model["fitted"].items() if k.startswith("budget")] for model in done]
    every = [row for rows in budgets for row in rows]
    duels = [
        (model["fitted"][f"at {label}"], hand)
        for model in done
        for label, hand in model["by hand"].items()
        if f"at {label}" in model["fitted"]
    ]
    rises = sum(b["overhead"] > a["overhead"] * (1 + 1e-9) for rows in budgets for a, b in pairwise(rows))
    off = [row["peak"] / row["predicted"] - 1 for row in every]
    yield "| measure | found |\n|---|---|"
    yield f"| models | {len(done)} of {len(MODELS)} |"
    yield f"| budgets exceeded by the compiled peak | {sum(r['peak'] > r['limit'] for r in every)} of {len(every)} |"
    yield f"| more memory but slower | {rises} |"
    yield f"| compiled beside predicted peak, median of the error | {statistics.median(map(abs, off or [0.0])):.1%} |"
    yield f"| compiles a budget, median | {statistics.median([r['compiles'] for r in every] or [0])} |"
    for figure, key in (("recomputed matmuls", "recompute"), ("modelled step", "seconds")):
        pairs = [(ours[key], hand[key]) for ours, hand in duels if key in ours and key in hand]
        more = sum(ours > hand * (1 + 1e-6) for ours, hand in pairs)
        less = sum(ours < hand * (1 - 1e-6) for ours, hand in pairs)
        yield (
            f"| given the peak of remat by hand, {len(pairs)} of them: {figure} less, equal, more | "
            f"{less}, {len(pairs) - less - more}, {more} |"
        )


if __name__ == "__main__":
    run(lambda: tyro.cli(main, description=__doc__) or 0, "fit_any")
