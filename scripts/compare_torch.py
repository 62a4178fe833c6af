"""The same model under the same remat policy in JAX and in PyTorch, every number side by side.

    python scripts/compare_torch.py --json compare.json

Bytes kept and matmuls done again are those of the stack of blocks; loss, gradients, peak and time those of the whole
step. Needs PyTorch 2.13. Exit codes: 0 all that must hold does; 1 something doesn't; 2 something that the user can put
right, said in one line.
"""

import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C while modules load needs no traceback
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.markup import escape
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from jremat.command.line import fail, parse, run, unwritten
from jremat.policy.files import write_whole
from jremat.report.tables import console
from scripts.compare.config import Compare
from scripts.compare.table import table

PROGRAM = "compare_torch"
PIP = "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``; returns the exit code."""
    try:
        compare = parse(Compare, PROGRAM, argv)
        compare.check()
        if importlib.util.find_spec("torch") is None:
            raise ValueError(f"PyTorch is not installed; {PIP}")
    except ValueError as error:
        return fail(PROGRAM, error)

    os.environ["JAX_PLATFORMS"] = "cpu"  # also beside a GPU: both sides are compared on one device, in float32
    from scripts.startup import start_jax  # what follows imports JAX

    start_jax()
    try:
        if compare.device == "cuda":
            from scripts.compare.torch_cuda import check_gpu

            check_gpu()
        import policies

        for spec in compare.policies:
            policies.get(spec)  # a name that is wrong is told before anything runs
        rows = _compared(compare)
        if compare.device == "cuda":
            from scripts.compare.torch_cuda import rows as on_the_gpu

            rows += on_the_gpu(compare.minutes)
    except ValueError as error:
        return fail(PROGRAM, error)
    return _report(compare, rows)


def _compared(compare: Compare) -> list[dict[str, Any]]:
    from scripts.compare.session import Case, Session
    from scripts.compare.timing import timed

    session = Session(compare)
    rows: list[dict[str, Any]] = []
    cases: list[Case] = []
    with Progress(TextColumn("{task.description}"), TimeElapsedColumn(), transient=True) as progress:
        task = progress.add_task("", total=None)
        for case in session.cases():
            if not isinstance(case, Case):
                rows.append(case)
                continue
            progress.update(task, description=escape(f"{case.name}: {case.line}"))
            start = time.monotonic()
            rows.append(session.row(case))
            cases.append(case)
            took = f"{case.name}: {case.line} ({time.monotonic() - start:.0f} s)"
            progress.console.print(took, highlight=False, markup=False)
        if compare.steps:
            progress.update(task, description="time, interleaved")
            times = timed(session, cases, compare.steps)
            rows = [row | times.get(row["pytorch"], {}) for row in rows]
    if compare.dropout:
        rows.append(session.frequencies())
    return rows


def _report(compare: Compare, rows: list[dict[str, Any]]) -> int:
    from scripts.compare.rows import failed
    from scripts.compare.timing import said as times
    from scripts.compare.versions import versions

    said = {**versions(), "config": compare.config().to_dict(), "batch": compare.batch, "seq": compare.seq}
    wrong = failed(rows)
    title = f"JAX | PyTorch, {compare.family}, {compare.layers} layers, b={compare.batch} s={compare.seq}"
    console().print(table(rows, title))
    for note in dict.fromkeys(row["differs"] for row in rows if "jax_spec" in row):
        console().print(note, highlight=False)
    if compare.steps:
        console().print(times(rows), highlight=False)
    if compare.json:
        text = json.dumps({**said, "failed": wrong, "rows": rows}, indent=1)
        try:
            write_whole(compare.json, text + "\n")
        except OSError as error:
            return fail(PROGRAM, unwritten(error))
    for line in wrong:
        print(f"{PROGRAM}: must hold and doesn't: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    run(main, PROGRAM)
