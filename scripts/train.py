"""Train a Flax transformer on real text under a remat policy.

    python scripts/train.py --policy dots_saveable --steps 50 --json out.json

The run itself stands in ``scripts/training/session.py``: check everything, compile, train, sum up. Exit codes: 0 done;
1 the loss diverged or memory ran out; 2 something that the user can put right, named in one line; 130 or 143 stopped by
Ctrl-C or SIGTERM, after saving.
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C while modules load needs no traceback
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jremat.terminal.command_line import fail, parse, run, uninterrupted
from scripts.training.config import Run
from scripts.training.files import Files
from scripts.training.own import Own, read

PROGRAM = "train"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``; returns the exit code."""
    try:
        run, own = parse(Run, PROGRAM, argv), Own()
        if run.resume and run.out is not None:
            own = read(Files(run.out))
            run = parse(Run, PROGRAM, argv, default=own.flags)
        run.check()
    except ValueError as error:
        return fail(PROGRAM, error)
    except OSError as error:
        return fail(PROGRAM, f"cannot read {error.filename or 'a file'}: {error.strerror}")

    from jremat.terminal.start_jax import start_jax  # what follows imports JAX

    with uninterrupted():
        from scripts.training.processes import connect
    try:
        connect(run.processes)
    except ValueError as error:
        return fail(PROGRAM, error)
    start_jax()
    with uninterrupted():
        from scripts.training.session import session

    return session(run, PROGRAM, own)


if __name__ == "__main__":
    run(main, PROGRAM)
