"""What one of our models keeps, moves and recomputes under a policy, value by value, and why.

    python scripts/explain.py --model gpt2 --policy save_only_matmuls --against full --html gpt2.html

The loss is traced with its gradient; nothing is compiled or run. A function of your own: ``jremat explain --help``.
Exit codes: 0 done; 2 something that the user can put right, named in one line.
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C while modules load needs no traceback
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jremat.command.output import present
from jremat.terminal.command_line import command, parse, run
from scripts.explaining.config import Explain

PROGRAM = "explain"


@command(PROGRAM)
def main(argv: Sequence[str] | None) -> int:
    """Run the command line ``argv``; returns the exit code."""
    flags = parse(Explain, PROGRAM, argv)
    flags.check()

    from jremat.terminal.start_jax import start_jax  # what follows imports JAX

    start_jax()
    from scripts.explaining.subject import subject

    against = subject(flags, flags.against) if flags.against else None
    present(subject(flags, flags.policy), against, flags.output)
    return 0


if __name__ == "__main__":
    run(main, PROGRAM)
