"""``jremat oom REPORT``: why a program ran out of memory, and what would fix it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from jremat.command.output import Json
from jremat.policy.files import write_json
from jremat.terminal.command_line import command, fail, parse

PROGRAM = "jremat oom"


@dataclass(frozen=True)
class Oom:
    """Why a program ran out of memory: what was alive at the peak by kind, what of it need not be there, and the cure.

    The report is a log with XLA's RESOURCE_EXHAUSTED error, *buffer-assignment.txt or *.hlo.pb of --xla_dump_to (or its
    folder), a device memory profile of JAX, or the JSON of XProf's memory viewer. With --step the step itself is
    compiled for --target, never run, and cures that can be applied to it are proved by compiling it with them.
    """

    report: tyro.conf.Positional[
        Annotated[Path | None, tyro.conf.arg(metavar="[REPORT]", help_behavior_hint="(optional)")]
    ] = None
    """The file or folder; may be left out with --step."""
    step: Annotated[str | None, tyro.conf.arg(metavar="FUNCTION", help_behavior_hint="(optional)")] = None
    """package.module:function or file.py:function: the step, or a function that returns (step, args). Where that one
    takes a policy, full remat is tried as a cure."""
    args: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ARG …", help_behavior_hint="(optional)")] = ()
    """The step's arguments: dtype[shape] for an array, `key` for a random key, Python's spelling for pytrees."""
    against: Annotated[Path | None, tyro.conf.arg(metavar="REPORT", help_behavior_hint="(optional)")] = None
    """An earlier report: show what grew since, by name."""
    target: str = "local"
    """What the step is compiled for, such as h100, h200x8 or v5e."""
    json: Json = None


@command(PROGRAM)
def main(argv: Sequence[str] | None) -> int:
    """Run the command line ``argv``; returns the exit code."""
    flags = parse(Oom, PROGRAM, argv)
    if flags.report is None and flags.step is None:
        raise ValueError("report: expected a file, a folder or --step FUNCTION, got nothing")

    from jremat.terminal.start_jax import start_jax  # what follows imports JAX

    start_jax()
    from jremat.command.target import called, function_at, what
    from jremat.oom import diagnose
    from jremat.oom.diagnosis import takes_policy
    from jremat.oom.growth import growth
    from jremat.oom.read import read_dump

    if flags.step:
        step = function_at(flags.step)
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if flags.args or not takes_policy(step):
            step, args, kwargs = called(step, flags.step, flags.args)
        if kwargs:
            raise ValueError(f"args: expected all arguments by position, got {', '.join(kwargs)}")
        try:
            found = diagnose(flags.report, step, *args, target=flags.target)
        except (TypeError, IndexError, KeyError, AttributeError, NotImplementedError) as error:
            return fail(PROGRAM, f"step: tracing {flags.step} raised {what(error)}")
    else:
        found = diagnose(flags.report)
    compared = growth(read_dump(flags.against), found.dump) if flags.against else None
    print(compared or found)
    if flags.json:
        figures = asdict(found) | {"by_kind": found.by_kind}
        write_json(flags.json, figures | ({"changes": [asdict(c) for c in compared.changes]} if compared else {}))
    return 0
