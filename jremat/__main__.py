"""``jremat``, the installed command, which is also ``python -m jremat``."""

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from jremat.policy.shown import filled
from jremat.terminal.command_line import exit_code, fail


def _explain(argv: Sequence[str]) -> int:
    from jremat.command.explain import main  # loads for a while: a Ctrl-C meanwhile needs no traceback

    return main(argv)


def _estimate(argv: Sequence[str]) -> int:
    from jremat.command.estimate import main

    return main(argv)


def _fit(argv: Sequence[str]) -> int:
    from jremat.command.fit import main

    return main(argv)


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {"explain": _explain, "estimate": _estimate, "fit": _fit}
USAGE = """usage: jremat explain FUNCTION [flags]
       jremat estimate MODEL [flags]
       jremat fit FUNCTION [flags]

estimate  what a training step needs, in formulas and in bytes; `jremat estimate --help`
explain   what a function keeps, moves and recomputes for its gradient, and why; `jremat explain --help`
fit       a plan under which a loss fits the memory, confirmed by compiling; `jremat fit --help`
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: _run(argv), f"jremat {argv[0]}" if argv and argv[0] in COMMANDS else "jremat")


def _run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("\n".join(filled(line, " " * 10) for line in USAGE.splitlines()))
        return 0
    if argv[0] == "--version":
        print(_version())
        return 0
    if argv[0] not in COMMANDS:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return fail("jremat", f"no command {argv[0]!r}; it has: {', '.join(COMMANDS)}{hint}")
    return COMMANDS[argv[0]](argv[1:])


def _version() -> str:
    try:
        return f"jremat {version('jremat')}"
    except PackageNotFoundError:
        return "jremat, not installed"


if __name__ == "__main__":
    sys.exit(main())
