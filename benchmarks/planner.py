"""The planner beside its bound, beside others' ways to choose, and beside every named policy.

    python benchmarks/planner.py > benchmarks/planner.md

Whole training steps (AdamW, state donated) compiled for a described H200, XLA's own remat pass off, nothing run; times
are modelled by the planner's roofline. Peaks lie in benchmarks/planner.json, which a further run continues (after
--minutes nothing further is compiled, and the tables speak of what is there): delete it where models or planner change.
The whole takes about two hours of one quiet core.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from jremat.terminal.command_line import run
from jremat.terminal.start_jax import start_jax

start_jax()

import jax
import numpy as np
import tyro

from benchmarks.planner_cases import ALLOWED, MODELS, OBJECTIVES, SHARES, Duel, Model, OutOfTime, Peaks, budgets, duels
from jremat.planner.baselines import BASELINES
from jremat.planner.block import Budget, best
from jremat.planner.cut import convex_frontier
from jremat.planner.problem import Node, Problem
from jremat.planner.search import Found

MIB = 2**20
ATTENTION = {"dot": "materialised", "blockwise": "fused"}


def main(minutes: float = 1e6, most: int = 100, first: int = 8) -> None:
    """Write the tables to stdout.

    Args:
        minutes: after these nothing further is compiled.
        most: named policies to compile for each model, spread from the leanest to the one that keeps most; there are
            about thirty that come to different programs.
        first: so many of the models.
    """
    peaks, models = Peaks(time.time() + 60 * minutes), MODELS[:first]
    fought = {o: {m: duels(m, o, peaks, most) for m in models} for o in OBJECTIVES[:1]}
    given = {m: budgets(m, peaks) for m in models}
    fought |= {o: {m: duels(m, o, peaks, most) for m in models} for o in OBJECTIVES[1:]}
    traced = {m: frontier(m, peaks) for m in models}
    print("# The planner\n\n    python benchmarks/planner.py > benchmarks/planner.md\n")
    print(
        f"jax {jax.__version__}. Whole training steps, AdamW, state donated, float32 parameters, bfloat16 compute, no "
        "dropout; compiled for h200, not run, XLA's own remat pass off. Seconds of recompute are modelled. "
        f"{peaks.num_compiled} programs are compiled so far; what has no row wasn't."
    )
    note = "Processor milliseconds, so that a busy machine doesn't lengthen them."
    head = ("problem", "nodes", "marks", "one budget, median ms", "40 budgets, s", "convex frontier, s", "must be")
    table("One block, solved to a gap of nothing", head, solved(models), note)
    head = ("32 layers that differ", "nodes", "marks", "one budget for all, processor s", "must be")
    table("A joint program over layers", head, joint(models))
    head = ("attention", "choice", "points", "exact better", "exact worse", "median ratio", "largest", "must be")
    note = (
        "One block at 13 budgets from nothing to all; ratio of modelled recompute to the exact choice's, where that "
        "recomputes at all. The wide knapsack is nobody's: PyTorch's with every value an item, worth what lies behind."
    )
    table("The exact choice beside others'", head, beside(models), note)
    for objective in OBJECTIVES:
        what = "modelled seconds of recompute" if objective == "seconds" else "matmul FLOPs of recompute"
        head = ("model", "budgets", "no worse", "strictly better", "could be better", "by 6 compiles", "by naming it")
        head = (*head, "at full's peak: peak", "recompute", "must be")
        note = (
            f"Given the compiled peak and the host bytes of a named policy, no margin: {what} of the plan beside the "
            "least of all compiled named policies at no more peak. Where the least named recomputes nothing, nothing "
            "can be better. The named policies are among the planner's choices; two compiles and one for each of them "
            "that is faster and near, or six where it says so."
        )
        table(f"Beside named policies, objective {objective}", head, named(fought[objective]), note)
        head = ("model", "named policy", "its peak MiB", "host bytes", "least named", "planned")
        table(f"Where it fell short, objective {objective}", head, short(fought[objective]))
    head = ("model", "cases", "over the budget", "nothing fitted", "compiles, mean", "most", "over two", "must be")
    note = (
        f"At {', '.join(f'{share:.0%}' for share in SHARES)} of the way from full's peak to none's. No margin at all."
    )
    table("Budgets", head, kept_to(given, "over: 0; compiles: 2; at least 60 cases"), note)
    note = (
        "A named policy's own peak, which nothing below it may miss by a byte: each faster one that is near is tried."
    )
    found = {m: [(d.limit_bytes, d.answer) for o in OBJECTIVES for d in fought[o][m]] for m in models}
    table("Budgets at the peaks of named policies", head, kept_to(found, "over: 0"), note)
    head = ("model", "traced", "rises", "largest, MiB", "planner's line rises", "must be")
    table("Predicted peak along the frontier, as kept bytes fall", head, falling(traced))
    head = ("attention", "programs", "median", "median size", "most under", "most over")
    table("Traced peak less compiled peak, of the compiled", head, errors(models, peaks))


def table(title: str, head: tuple[str, ...], rows: Iterable[tuple[Any, ...]], note: str = "") -> None:
    rows = list(rows)
    if rows:
        print(f"\n## {title}\n{f'{chr(10)}{note}{chr(10)}' if note else ''}")
        print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
        for row in rows:
            print(f"| {' | '.join(str(cell) for cell in row)} |", flush=True)


def clocked(run: Callable[[], Any]) -> tuple[Any, float]:
    """Its result and the processor seconds that it took."""
    started = time.process_time()
    return run(), time.process_time() - started


def random_problem(rng: np.random.Generator, size: int) -> Problem:
    """Every value can be kept, reads the last few, and has one of four sizes."""
    nodes = []
    for place in range(size):
        reads = tuple({max(place - int(back), 0) for back in rng.integers(1, 6, 2)}) if place else ()
        nbytes = int(rng.choice([256, 1024, 4096, 16384]))
        nodes.append(Node(reads, nbytes, float(rng.random()), needed=bool(rng.random() < 0.15), mark=f"m{place}"))
    return Problem(tuple(nodes))


def solved(models: tuple[Model, ...]) -> Iterator[tuple[Any, ...]]:
    rng = np.random.default_rng(5)
    problems = [(f"random, {size} values", [random_problem(rng, size) for _ in range(3)]) for size in (100, 200, 300)]
    problems += [(m.title, [m.stack("seconds").block.problem]) for m in models]
    for title, some in problems:
        took, frontier_seconds = [], []
        for problem in some:
            most = problem.outcome(problem.marks).kept_bytes
            for share in np.linspace(0, 1, 40):
                took.append(clocked(lambda p=problem, b=int(share * most): best(p, Budget(b)))[1])
            frontier_seconds.append(clocked(lambda p=problem: convex_frontier(p))[1])
        yield (
            *(title, len(some[0].nodes), len(some[0].marks), f"{1e3 * statistics.median(took):.0f}"),
            *(f"{sum(took) / len(some):.2f}", f"{statistics.median(frontier_seconds):.2f}"),
            "< 100 ms" if title.startswith("random") else "< 100 ms; < 2 s",
        )


def joint(models: tuple[Model, ...]) -> Iterator[tuple[Any, ...]]:
    """32 layers in one program, cycling through the blocks of the models: one budget for all of them."""
    blocks = [m.stack("seconds").block.problem for m in models]
    for title, cycle in (("of all models, in turn", blocks), ("of the first two, in turn", blocks[:2])):
        nodes: list[Node] = []
        for layer in range(32):
            start = len(nodes)
            for n in cycle[layer % len(cycle)].nodes:
                mark = f"{layer}/{n.mark}" if n.mark else None
                nodes.append(replace(n, reads=tuple(start + r for r in n.reads), mark=mark))
        whole = Problem(tuple(nodes))
        most = whole.outcome(whole.marks).kept_bytes
        tenths = [Budget(share * most // 10) for share in (2, 5, 8)]
        seconds = [clocked(lambda b=budget, p=whole: best(p, b))[1] for budget in tenths]
        yield title, len(nodes), len(whole.marks), ", ".join(f"{s:.2f}" for s in seconds), "< 5 s"


def beside(models: tuple[Model, ...]) -> Iterator[tuple[Any, ...]]:
    for attention, called in ATTENTION.items():
        pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in BASELINES}
        for model in models:
            problem = model.stack("seconds").block.problem
            most = problem.outcome(problem.marks).kept_bytes
            for share in np.linspace(0, 1, 13) if model.attention == attention else ():
                budget = Budget(int(share * most))
                exact = best(problem, budget)
                assert exact is not None, "nothing must be kept here, so full remat always fits"
                for name, baseline in BASELINES.items():
                    found = baseline(problem, budget)
                    pairs[name].append((exact.recompute_seconds, found.recompute_seconds if found else np.inf))
        for name, both in pairs.items():
            better = sum(theirs > ours * (1 + 1e-9) for ours, theirs in both)
            worse = sum(theirs < ours * (1 - 1e-9) for ours, theirs in both)
            ratios = [theirs / ours for ours, theirs in both if ours] or [np.nan]
            figures = f"{statistics.median(ratios):.3f}", f"{max(ratios):.2f}"
            yield called, f"`{name}`", len(both), better, worse, *figures, "never worse"


def named(fought: dict[Model, list[Duel]]) -> Iterator[tuple[Any, ...]]:
    for attention, called in ATTENTION.items():
        mine = {m: ds for m, ds in fought.items() if m.attention == attention and ds}
        groups = {m.title: ds for m, ds in mine.items()}
        for title, ds in {**groups, f"**{called}, all**": [d for some in mine.values() for d in some]}.items():
            at_full = next((d for d in ds if d.rival.spec == "full"), None) if title in groups else None
            beside_full = ("", "")
            if at_full is not None:
                own = at_full.rival.time
                beside_full = f"{at_full.answer.peak_bytes / at_full.limit_bytes:.3f}", f"{at_full.planned / own:.2f}"
            yield (
                *(title, len(ds), sum(d.no_worse for d in ds), sum(d.better for d in ds)),
                sum(d.named > 0 for d in ds),
                sum(d.compiles > ALLOWED[0] and d.no_worse for d in ds),
                sum(d.itself for d in ds),
                *beside_full,
                "no worse: all; strictly better: half",
            )


def short(fought: dict[Model, list[Duel]]) -> Iterator[tuple[Any, ...]]:
    for model, ds in fought.items():
        for d in ds:
            if not d.no_worse:
                host = f"{d.rival.figures.host_bytes / MIB:.0f} MiB"
                planned = f"{d.planned:.4g}" if np.isfinite(d.planned) else "nothing fits"
                yield model.title, f"`{d.rival.spec}`", d.limit_bytes // MIB, host, f"{d.named:.4g}", planned


def kept_to(found: dict[Model, list[tuple[int, Found]]], must: str) -> Iterator[tuple[Any, ...]]:
    every = [case for cases in found.values() for case in cases]
    for title, cases in [*((m.title, cases) for m, cases in found.items() if cases), ("**all**", every)]:
        over = sum(answer.fits and (answer.peak_bytes or 0) > limit for limit, answer in cases)
        compiles = [answer.compiles for _, answer in cases]
        nothing, beyond = sum(not answer.fits for _, answer in cases), sum(n > ALLOWED[0] for n in compiles)
        yield title, len(cases), over, nothing, f"{statistics.mean(compiles):.1f}", max(compiles), beyond, must


def frontier(model: Model, peaks: Peaks, points: int = 6) -> list[int]:
    """Traced peaks of choices along the frontier, the fastest first; those that there was time for."""
    choices = model.stack("seconds").choices()
    chosen = [choices[k].plan for k in sorted({round(i) for i in np.linspace(0, len(choices) - 1, points)})]
    try:
        return [peaks.traced(model, plan) for plan in chosen]
    except OutOfTime:
        return []


def falling(traced: dict[Model, list[int]]) -> Iterator[tuple[Any, ...]]:
    for model, along in traced.items():
        if along:
            rises = [max(0, later - earlier) for earlier, later in pairwise(along)]
            largest = f"{max(rises) / MIB:.1f}"
            yield (
                model.title,
                len(along),
                sum(r > 0 for r in rises),
                largest,
                "never: points that don't fall are left out",
                "0",
            )


def errors(models: tuple[Model, ...], peaks: Peaks) -> Iterator[tuple[Any, ...]]:
    for attention, called in ATTENTION.items():
        rows = [r for m in models if m.attention == attention for r in peaks.rows.get(m.title, {}).values()]
        shares = [r["traced"] / r["compiled"] - 1 for r in rows if "traced" in r and "compiled" in r]
        if shares:
            sizes = [abs(share) for share in shares]
            middle = statistics.median(shares), statistics.median(sizes)
            yield called, len(shares), *(f"{share:+.1%}" for share in (*middle, min(shares), max(shares)))


if __name__ == "__main__":
    run(lambda: tyro.cli(main) or 0, "planner")
