"""Memory, FLOPs and time of training steps under remat policies, with a device or without one.

    python scripts/bench.py --target h200 --model gpt2 --policies none full dots_saveable --json bench.json

Every combination of model, policy, batch, sequence and target is a case. A target that is described, not held, is
compiled for, and its rows say so; one that is here also runs. Each case runs in a process of its own, so that one that
fails is a row and not the end. ``--json`` keeps the rows as they land, and a second run continues the file. Exit codes:
0 some case came out and fits; 1 none does; 2 something that the user can put right, named in one line.
"""

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C while modules load needs no traceback
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jremat.terminal import tables
from jremat.terminal.command_line import command, fail, parse, run, say
from jremat.terminal.start_jax import start_jax
from jremat.terminal.text import printable
from scripts.benchmark import pool, suite
from scripts.benchmark.config import Bench, Case, cases
from scripts.benchmark.pool import Rows, commit
from scripts.benchmark.table import label, table
from scripts.flags import asks_planner

PROGRAM = "bench"


@command(PROGRAM)
def main(argv: Sequence[str] | None) -> int:
    """Run the command line ``argv``; returns the exit code."""
    bench = parse(Bench, PROGRAM, argv)
    bench.check()
    chosen = list(suite.gpu(bench.suite_size) if bench.suite == "gpu" else cases(bench))
    if bench.suite == "none":
        _check_names(bench)
    rows, console = Rows(bench.json, commit()), tables.console()
    try:
        _run(bench, chosen, rows, console)
    except KeyboardInterrupt:
        return fail(PROGRAM, "stopped; the rows so far are kept" if bench.json else "stopped", 130)
    found = list(rows.of(chosen))
    _show(found, console)
    if bench.plot:
        from scripts.benchmark.pictures import draw

        for path in draw(found, bench.plot):
            print(printable(f"picture {path}"))
    return 0 if any(row["status"] == "ok" for row in found) else 1


def _check_names(bench: Bench) -> None:
    """Refuse unknown names before the first case runs."""
    start_jax()  # quietly; where there is a GPU this does nothing, and the GPU stays free for the cases
    import policies
    from jremat.measure import target
    from models import config

    for name in bench.model:
        config.get(name)
    for spec in bench.policies:
        policies.get(spec)
    from jremat.measure.targets import TargetError, require_plugin

    targets = [target(spec) for spec in ((str(bench.target_config),) if bench.target_config else bench.target)]
    try:
        for kind in targets:
            require_plugin(kind)
    except TargetError as error:
        raise ValueError(f"target: {error}") from error
    if bench.profile and all(kind.described for kind in targets):
        raise ValueError(f"profile: nothing runs on {', '.join(kind.name for kind in targets)}, which is not here")


def _run(bench: Bench, chosen: Sequence[Case], rows: Rows, console: Console) -> None:
    asked = dict.fromkeys(case.policy for case in chosen if asks_planner(case.policy))
    if asked:
        say(PROGRAM, f"planning {', '.join(asked)} …, each case in its process")
    end = time.monotonic() + 60 * bench.minutes if bench.suite == "gpu" else None
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=printable(case.title))
            left = end - time.monotonic() if end else bench.timeout_seconds
            if rows.done(case) and not case.profile:  # a trace is asked for each time
                tables.show(console, f"{case.title}: in the file already", indent=4)
            elif left <= 0:
                tables.show(console, f"{case.title}: no time left", indent=4)
            else:
                row = pool.run(case, min(left, bench.timeout_seconds))
                rows.add(row)
                tables.show(console, f"{case.title}: {_outcome(row)}", indent=4)
            progress.advance(task)


def _outcome(row: dict[str, Any]) -> str:
    took = f"{row['case_seconds']:.0f} s"
    return f"{row['error']} ({took})" if "error" in row else f"{row['status'].replace('_', ' ')} ({took})"


def _show(rows: list[dict[str, Any]], console: Console) -> None:
    for title in dict.fromkeys(map(label, rows)):
        console.print(table([row for row in rows if label(row) == title], title))
    ran = [row for row in rows if "mfu_full" in row]
    if ran:
        best = max(ran, key=lambda row: row["tokens_per_second"])
        tables.show(
            console,
            f"fastest: {best['policy']}, {best['tokens_per_second']:,.0f} tokens/s, MFU {best['mfu_full']:.1%} full, "
            f"{best['mfu_half']:.1%} half, of {best['peak_flops_per_second'] / 1e12:.4g} TFLOP/s "
            f"({best['peak_source']})",
            indent=4,
        )


if __name__ == "__main__":
    run(main, PROGRAM)
