"""The fastest remat plan that fits: bytes in, plan out, with its proof.

    python scripts/plan.py --model llama3-8b --seq 8192 --attention blockwise --target h100 --devices 8 --hbm 80GiB

The whole training step (AdamW on a donated state) is traced under each plan that is looked at, and compiled for the
target under the one that is chosen; the target need not be here, and times are modelled unless --measure runs it.
Exit codes: 0 a plan that fits; 1 nothing fits; 2 something that the user can put right, named in one line.
"""

import signal
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C while modules load needs no traceback
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jremat.policy.files import write_json
from jremat.terminal.command_line import command, fail, parse, run, say, warn
from jremat.terminal.start_jax import start_jax
from scripts.planning.config import Planning

PROGRAM = "plan"


@command(PROGRAM)
def main(argv: Sequence[str] | None) -> int:
    """Run the command line ``argv``; returns the exit code."""
    flags = parse(Planning, PROGRAM, argv)
    flags.check()
    start_jax()
    from jremat.measure import CompileError, TargetError, target
    from jremat.measure.targets import require_plugin
    from jremat.planner.result import DoesNotFit
    from jremat.terminal.tables import console, show
    from jremat.terminal.text import printable
    from scripts.benchmark.build import config_of
    from scripts.planning.command import how_to_run
    from scripts.planning.question import ask, batches, largest, seqs
    from scripts.planning.tables import of_frontier, of_kept, of_sizes

    out, case = console(), flags.case
    # Said once, when the flags have proved right and what takes its time begins.
    begin = cache(lambda: say(PROGRAM, f"planning {case.model} for {case.target} …"))
    report: dict[str, Any] = {"begin": begin, "drop": cache(lambda problem: warn(PROGRAM, problem))}
    try:
        kind, config = target(case.target), config_of(case)
        if flags.compiles:
            require_plugin(kind)  # before the search, which takes its time
        if flags.largest_batch:
            answer, tried = largest(
                flags, batches(case, flags.parallel.batch_shards), lambda a: a.tokens_per_second or a.tokens, **report
            )
            sizes = [of_sizes(tried, "batch")]
        elif flags.largest_seq:
            answer, tried = largest(flags, seqs(case, config.max_seq), lambda a: a.tokens, **report)
            sizes = [of_sizes(tried, "seq")]
        else:
            answer, sizes = ask(flags, case, **report), []
    except DoesNotFit as error:
        fail(PROGRAM, error)
        _what_would_help(flags, error, out)
        return 1
    except (CompileError, TargetError) as error:
        return fail(PROGRAM, error)
    if flags.measure:
        from scripts.planning.measured import fastest

        answer = fastest(answer, out)
    # All files first: whoever reads the tables may stop in the middle.
    saved = answer.plan.save(flags.out) if flags.out else None
    if flags.json:
        write_json(flags.json, _figures(answer))
    pictures = _draw(answer, flags.plot) if flags.plot else []
    for table in (*sizes, of_kept(answer), of_frontier(answer)):
        out.print(table)
    show(out, *_summary(flags, answer).splitlines(), indent=4)
    if saved:
        print(printable(f"saved; {how_to_run(answer, saved.spec)}"))
    elif answer.plan.needs_file:
        show(out, "some of its values have no name: --out plan.json saves it, for --policy plan:plan.json")
    for path in pictures:
        print(printable(f"picture {path}"))
    return 0


def _summary(flags: Planning, answer: Any) -> str:
    """The plan in three lines."""
    from jremat.terminal.tables import human

    plan, case = answer.plan, answer.case
    shown = f"{human(plan.peak_bytes)} {plan.target}" if plan.peak_bytes is not None else "not compiled"
    host = f", {human(plan.host_bytes)} on the host" if plan.host_bytes else ""
    step = f", step {plan.step_seconds * 1e3:.1f} ms modelled" if plan.step_seconds else ""
    speed = f", {answer.tokens_per_second:,.0f} tokens/s modelled" if answer.tokens_per_second else ""
    return (
        f"{case.model}, batch {case.batch} × {answer.tokens // case.batch} tokens on {case.target}: "
        f"{plan.policy.spec}\n"
        f"peak {shown}{host}, predicted {human(plan.predicted_peak_bytes)}; of {human(plan.hbm_bytes)} "
        f"less {plan.margin:.0%}; {plan.compiles} compile{'s' * (plan.compiles != 1)}\n"
        f"recomputes {plan.recompute_share:.1%} of the layers' forward matmul FLOPs{step}{speed}"
    )


def _what_would_help(flags: Planning, error: Any, out: Any) -> None:
    """The changes of which an estimate says that they would make it fit."""
    from jremat.estimator.fit import ways_to_fit
    from jremat.estimator.training_step import TrainingStep
    from scripts.benchmark.build import config_of, seq_of
    from scripts.estimating.config import zoo
    from scripts.estimating.tables import of_ways

    case, config = flags.case, config_of(flags.case)
    from jremat.policy import FULL

    run = TrainingStep(
        config=config, policy=FULL, batch=case.batch, seq=seq_of(case, config), chunk=case.loss_chunk or None,
        parallel=flags.parallel,
    )  # fmt: skip
    leanest = error.leanest
    ways = ways_to_fit(run, int(leanest.hbm_bytes * (1 - leanest.margin)), zoo())
    if ways:
        print("in the flags of scripts/estimate.py, by its estimate:")
        out.print(of_ways(ways, "full"))
    else:
        print("no change that is tried makes it fit")


def _figures(answer: Any) -> dict[str, Any]:
    import dataclasses

    case = {k: v for k, v in dataclasses.asdict(answer.case).items() if v not in ("", 0, False)}
    return {
        "case": case,
        "tokens": answer.tokens,
        "tokens_per_second": answer.tokens_per_second,
        **answer.plan.to_dict(),
    }


def _draw(answer: Any, folder: Path) -> list[Path]:
    from jremat.report.plots import frontier  # Matplotlib takes a second to load

    plan, case = answer.plan, answer.case
    seconds = plan.objective == "seconds"
    unit = (lambda p: p.recompute_seconds / answer.devices) if seconds else (lambda p: p.recompute_flops / 1e12)
    return frontier(
        [(p.spec, p.predicted_peak_bytes, unit(p)) for p in plan.beside],
        [(p.predicted_peak_bytes, unit(p)) for p in plan.frontier],
        folder=folder,
        title=f"{case.model}, batch {case.batch} on {case.target}, predicted",
        cost="modelled recompute in a step, s" if seconds else "recompute in a step, TFLOP",
        hbm_bytes=plan.hbm_bytes,
    )


if __name__ == "__main__":
    run(main, PROGRAM)
