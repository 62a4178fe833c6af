"""The command line's manners, the same for every script: dataclasses through tyro, one line on error, exit 2."""

import contextlib
import dataclasses
import difflib
import io
import re
import sys
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

T = TypeVar("T")


def parse(config: type[T], program: str, argv: Sequence[str] | None) -> T:
    """Read ``argv`` into a dataclass.

    Raises:
        ValueError: the line that says what is wrong with the arguments.
        SystemExit: with 0, after ``--help``.
    """
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                config,
                prog=program,
                args=argv,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(one_line(box.getvalue(), _flags(config))) from None


def fail(program: str, message: object, code: int = 2) -> int:
    """Say in one line on stderr what went wrong; returns the exit code."""
    _say(program, "error", message)
    return code


def warn(program: str, message: object) -> None:
    """Say in one line on stderr what the user should know."""
    _say(program, "warning", message)


def _say(program: str, kind: str, message: object) -> None:
    text = " ".join(str(message).split())
    print(f"{program}: {kind}: {text}", file=sys.stderr, flush=True)


def one_line(box: str, flags: Sequence[str] = ()) -> str:
    """What a box of tyro's says, in one line: its first part, and near names of a flag that doesn't exist.

    >>> one_line("╭─ Value error ─╮\\n│ Error parsing --steps: not a number │\\n│ ───── │\\n│ more │\\n╰──╯")
    'Error parsing --steps: not a number'
    >>> one_line("╭─╮\\n│ Unrecognized options: --stps, 3 │\\n╰─╯", ["--steps", "--seed"])
    'Unrecognized options: --stps, 3; did you mean --steps?'
    """
    rows = [line.strip("│ ") for line in box.splitlines() if line.startswith("│")]
    part: list[str] = []
    for row in rows:
        if row and not row.strip("─"):
            break
        part.append(row)
    text = " ".join(" ".join(part).split()) or " ".join(box.split())
    near = [
        match for flag in re.findall(r"--[\w-]+", text) if flag not in flags
        for match in difflib.get_close_matches(flag, flags, n=2)
    ]  # fmt: skip
    return f"{text}; did you mean {' or '.join(near)}?" if near else text


def _flags(config: Any) -> list[str]:
    """Every flag of a dataclass, those of its nested dataclasses included."""
    hints = typing.get_type_hints(config)
    found: list[str] = []
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(hints[field.name]):
            found += _flags(hints[field.name])
        else:
            found.append("--" + field.name.replace("_", "-"))
    return found
