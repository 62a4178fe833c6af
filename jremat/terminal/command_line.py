"""The command line's manners, the same for every script: dataclasses through tyro, one line on error, exit 2.

A script ends in ``run(main, PROGRAM)``, which also has the manners of the process: a reader that has enough, a Ctrl-C,
an output that is closed or full.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import os
import re
import signal
import sys
import threading
import typing
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn, TextIO, TypeVar

from jremat.policy.shown import filled
from jremat.terminal.text import printable

T = TypeVar("T")
STDOUT = "standard output"
_DEAF = ("_xla_gc_callback", "cb")  # JAX's and the import locks' callbacks, from which no exception gets out


def run(main: Callable[[], int], program: str) -> NoReturn:
    """Run ``main`` and leave with its exit code, or with that of ``exit_code``."""
    sys.exit(exit_code(main, program))


def command(program: str) -> Callable[[Callable[[Sequence[str] | None], int]], Callable[..., int]]:
    """Makes ``main(argv=None)`` of a function of the arguments: what a user can put right ends it with exit code 2.

    A ``ValueError`` is printed in one line on stderr, and so is a file that can't be written. A closed reader of the
    output is no error: ``exit_code``'s.

    Args:
        program: its name, in front of the line.
    """

    def of(body: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
        @functools.wraps(body)
        def main(argv: Sequence[str] | None = None) -> int:
            try:
                return body(argv)
            except ValueError as error:
                return fail(program, error)
            except BrokenPipeError:
                raise
            except OSError as error:
                return fail(program, unwritten(error))

        return main

    return of


def exit_code(main: Callable[[], int], program: str) -> int:
    """Run ``main`` to its exit code: 141 where nobody reads on, 130 after Ctrl-C, 2 where nothing can be written.

    What was printed is flushed before this returns, so that a full disk is reported, not lost. A stream that is closed
    from the start takes everything and keeps nothing.

    Args:
        main: the command; it reports by itself what a user can put right.
        program: its name, in front of what is reported here.
    """
    _open_streams()
    if signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.default_int_handler):
        with contextlib.suppress(ValueError):  # outside of the main thread, which no Ctrl-C reaches
            signal.signal(signal.SIGINT, _interrupted)
    try:
        code = _ended(main)
        sys.stdout.flush()
    except BrokenPipeError:
        _to_nowhere(sys.stdout)
        return 141
    except OSError as error:
        code = fail(program, unwritten(error))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one, while things are put away, needs no traceback
        code = fail(program, "stopped", 130)
    return code


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Put a Ctrl-C off to the end: an import of native code that it breaks off fails or hides it."""
    before = signal.getsignal(signal.SIGINT)
    if (
        before not in (signal.default_int_handler, _interrupted)
        or threading.current_thread() != threading.main_thread()
    ):
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _interrupted(number: int, frame: FrameType | None) -> None:
    """As Python's own handler, but where what is raised would be dropped, a little later."""
    while frame is not None:
        if frame.f_code.co_name in _DEAF:
            again = threading.Timer(0.05, signal.raise_signal, (number,))
            again.daemon = True
            again.start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _ended(main: Callable[[], int]) -> int:
    try:
        return main()
    except SystemExit as stop:  # after --help
        if isinstance(stop.__context__, BrokenPipeError):  # Rich's way to end where nobody reads on
            raise stop.__context__ from None
        if stop.code is not None and not isinstance(stop.code, int):
            raise
        return stop.code or 0


def unwritten(error: OSError) -> str:
    """What couldn't be written and why; standard output, where it is that, is given up.

    >>> unwritten(OSError(28, "No space left on device", "rows.json"))
    'cannot write rows.json: No space left on device'
    """
    if error.filename == STDOUT:
        _to_nowhere(sys.stdout)
    return f"cannot write {error.filename or 'a file'}: {error.strerror or error}"


class _Stdout(io.FileIO):
    """Descriptor 1, whose errors say that it is."""

    def write(self, data: Any) -> Any:
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, STDOUT) from None


def _open_streams() -> None:
    """Give a stream that is closed from the start a place to go to, so that no file gets its number; let errors of
    standard output name it, and no letter that the terminal doesn't know end a command."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number and not _is_open(number):
                os.dup2(nowhere, number)
                os.close(nowhere)
                nowhere = number
            setattr(sys, name, os.fdopen(nowhere, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False))
    out = sys.stdout
    if out is sys.__stdout__ and isinstance(out, io.TextIOWrapper) and out.fileno() == 1:
        out.flush()
        raw = _Stdout(1, "w", closefd=False)
        buffer = raw if isinstance(out.buffer, io.RawIOBase) else io.BufferedWriter(raw)  # as python -u has it
        sys.stdout = io.TextIOWrapper(
            buffer, out.encoding, "replace", line_buffering=out.line_buffering, write_through=out.write_through
        )


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _to_nowhere(stream: TextIO) -> None:
    """What is left in a stream's buffer must not fail again at exit."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor has nobody behind it
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def parse(config: type[T], program: str, argv: Sequence[str] | None, default: T | None = None) -> T:
    """Read ``argv`` into a dataclass; what it doesn't name is as in ``default``, or the dataclass's own default.

    Raises:
        ValueError: the line that says what is wrong with the arguments.
        SystemExit: with 0, after ``--help``.
    """
    import tyro  # takes a while to load, and nothing else here needs it

    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                config,
                prog=program,
                description=_description(config),
                args=argv,
                default=tyro.MISSING_NONPROP if default is None else default,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(one_line(box.getvalue(), _flags(config))) from None


def _description(config: type) -> str:
    """What a dataclass's docstring says before its arguments, as wide as the terminal: tyro breaks no line of it."""
    text = inspect.cleandoc(config.__doc__ or "").partition("\nArgs:")[0].strip()
    # tyro joins lines, but for those that begin with a space
    return "\n\n".join(filled(" ".join(part.split()), "  ") for part in text.split("\n\n"))


def fail(program: str, message: object, code: int = 2) -> int:
    """Say in one line on stderr what went wrong; returns the exit code."""
    _say(program, "error", message)
    return code


def warn(program: str, message: object) -> None:
    """Say in one line on stderr what the user should know."""
    _say(program, "warning", message)


def say(program: str, message: object) -> None:
    """Say in one line on stderr what takes its time now."""
    _print(f"{program}: {printable(str(message))}")


def _say(program: str, kind: str, message: object) -> None:
    _print(f"{program}: {kind}: {printable(' '.join(str(message).split()))}")


def _print(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:  # nobody reads it any more; the exit code stays
        _to_nowhere(sys.stderr)


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
    hints = typing.get_type_hints(config, include_extras=True)
    found: list[str] = []
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(hints[field.name]):
            found += _flags(hints[field.name])
            continue
        annotations = getattr(hints[field.name], "__metadata__", ())
        names = [name for one in annotations if (name := getattr(one, "name", None))] or [field.name]
        found += ["--" + name.replace("_", "-") for name in names]
        found += [alias for one in annotations for alias in getattr(one, "aliases", None) or ()]
    return found
