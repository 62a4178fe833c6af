"""``jremat``, the installed command, which is also ``python -m jremat``."""

import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from jremat.policy.shown import filled
from jremat.terminal.command_line import exit_code, fail

COMMANDS: Mapping[str, tuple[str, str]] = {
    "check": ("FUNCTION", "whether a training step will launch on a device, with an exit code for CI"),
    "estimate": ("MODEL", "what a training step needs, in formulas and in bytes"),
    "explain": ("FUNCTION", "what a function keeps, moves and recomputes for its gradient, and why"),
    "fit": ("FUNCTION", "a plan under which a loss fits the memory, confirmed by compiling"),
    "oom": ("REPORT", "why a program ran out of memory, and what would fix it"),
}
"""Name -> what it takes, and what it shows; each is a module of ``jremat.command``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: _run(argv), f"jremat {argv[0]}" if argv and argv[0] in COMMANDS else "jremat")


def _run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("\n".join(f"usage: jremat {name} {subject} [flags]" for name, (subject, _) in COMMANDS.items()))
        for name, (_, purpose) in COMMANDS.items():
            print(filled(f"{name:8}  {purpose}; `jremat {name} --help`", " " * 10))
        return 0
    if argv[0] == "--version":
        print(_version())
        return 0
    if argv[0] not in COMMANDS:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return fail("jremat", f"no command {argv[0]!r}; it has: {', '.join(COMMANDS)}{hint}")
    command = importlib.import_module(f"jremat.command.{argv[0]}")  # loads for a while: a Ctrl-C needs no traceback
    return command.main(argv[1:])


def _version() -> str:
    try:
        return f"jremat {version('jremat')}"
    except PackageNotFoundError:
        return "jremat, not installed"


if __name__ == "__main__":
    sys.exit(main())
