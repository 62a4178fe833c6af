"""The same model under the same remat policy in JAX and in PyTorch, every number side by side.

    python scripts/compare_torch.py --json compare.json

Bytes kept and matmuls recomputed are those of the stack of blocks; loss, gradients, peak and time those of the whole
step. Needs PyTorch 2.13. Exit codes: 0 all that must hold does; 1 something doesn't; 2 something that the user can put
right, named in one line.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C while modules load needs no traceback
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jremat.policy.files import write_whole
from jremat.terminal.command_line import command, fail, parse, run
from jremat.terminal.tables import console, show
from jremat.terminal.text import printable
from scripts.compare.config import Compare
from scripts.compare.table import table

PROGRAM = "compare_torch"
PIP = "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"


@command(PROGRAM)
def main(argv: Sequence[str] | None) -> int:
    """Run the command line ``argv``; returns the exit code."""
    compare = parse(Compare, PROGRAM, argv).chosen()
    compare.check()
    if importlib.util.find_spec("torch") is None:
        raise ValueError(f"PyTorch is not installed; {PIP}")
    os.environ["JAX_PLATFORMS"] = "cpu"  # also beside a GPU: both sides are compared on one device, in float32
    from jremat.terminal.start_jax import start_jax  # what follows imports JAX

    start_jax()
    try:
        if compare.device == "cuda":
            from scripts.compare.torch_cuda import check_gpu

            check_gpu()
        import policies

        for spec in compare.policies:
            policies.get(spec)  # an unknown name is refused before anything runs
        rows = _compared(compare)
        if compare.device == "cuda":
            from scripts.compare.torch_cuda import rows as on_the_gpu

            rows += on_the_gpu(compare.minutes)
        return _report(compare, rows)
    except KeyboardInterrupt:
        return fail(PROGRAM, "stopped; the rows so far are kept" if compare.json else "stopped", 130)


def _compared(compare: Compare) -> list[dict[str, Any]]:
    """The rows, each printed and written as it lands."""
    from scripts.compare.session import Case, Session
    from scripts.compare.timing import timed

    screen = console()
    show(screen, "building the model on both sides …")
    session = Session(compare)
    rows: list[dict[str, Any]] = []
    cases: list[Case] = []
    bar = (TextColumn("{task.description}", markup=False), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bar, console=screen, transient=True) as progress:
        task = progress.add_task("", total=session.count)
        start = time.monotonic()
        for case in session.cases():
            if isinstance(case, Case):
                name = f"{case.name}: {case.line}"
                progress.update(task, description=printable(name))
                rows.append(session.row(case))
                cases.append(case)
            else:
                name = f"{case['policy']}: {case['status']}"
                rows.append(case)
            progress.advance(task)
            took = f"{time.monotonic() - start:.0f} s"
            show(screen, f"{len(rows)}/{session.count}  {name} ({took})", indent=6)
            _write(compare, rows, whole=False)
            start = time.monotonic()
        if compare.steps:
            progress.update(task, description="time, interleaved")
            show(screen, f"timing {compare.steps} steps of each …")
            times = timed(session, cases, compare.steps)
            rows = [row | times.get(row["pytorch"], {}) for row in rows]
    if compare.dropout:
        rows.append(session.frequencies())
    return rows


def _write(compare: Compare, rows: list[dict[str, Any]], *, whole: bool) -> None:
    """The rows so far as JSON, ``whole`` once there are no more to come."""
    from scripts.compare.rows import failed

    if compare.json:
        size = {"config": compare.config().to_dict(), "batch": compare.batch, "seq": compare.seq}
        found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "torch")}
        where = {"versions": found, "python": platform.python_version(), "machine": platform.machine()}
        figures = where | size | {"whole": whole, "failed": failed(rows), "rows": rows}
        write_whole(compare.json, json.dumps(figures, indent=1) + "\n")


def _report(compare: Compare, rows: list[dict[str, Any]]) -> int:
    from scripts.compare.rows import failed
    from scripts.compare.timing import overhead_line as times

    _write(compare, rows, whole=True)
    screen, wrong = console(), failed(rows)
    title = f"JAX | PyTorch, {compare.family}, {compare.layers} layers, b={compare.batch} s={compare.seq}"
    screen.print(table(rows, title))
    show(screen, *dict.fromkeys(row["differs"] for row in rows if row.get("jax_spec")))
    if compare.steps:
        show(screen, times(rows))
    for line in wrong:
        fail(PROGRAM, f"must hold and doesn't: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    run(main, PROGRAM)
