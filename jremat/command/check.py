"""``jremat check package.module:step --target h100x8``: whether a training step will launch, before a cluster tries."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from jremat.command.output import Json
from jremat.policy.files import check_file, write_json
from jremat.terminal.command_line import command, fail, parse

PROGRAM = "jremat check"


@dataclass(frozen=True)
class Check:
    """Whether a training step will launch on a target: what the allocator reserves, and what XLA recomputes by itself.

    Nothing is run and no device is needed. The exit code is 0 where the step fits, 1 where it does not, 2 where it
    cannot be told, so that CI can refuse a change that makes a model too big.
    """

    step: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="FUNCTION")]]
    """package.module:function or file.py:function: the step, or a function without arguments that returns (step,
    args)."""
    target: str = "local"
    """What the step is compiled for, such as h100, h200x8 or v5e."""
    args: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ARG …", help_behavior_hint="(optional)")] = ()
    """The step's arguments: dtype[shape] for an array, `key` for a random key, Python's spelling for pytrees."""
    memory_fraction: float = 0.75
    """Share of a GPU that is reserved at the start, XLA_PYTHON_CLIENT_MEM_FRACTION."""
    slop: int = 95
    """xla_gpu_memory_limit_slop_factor, a percentage: a lower one lets XLA recompute earlier."""
    json: Json = None


@command(PROGRAM)
def main(argv: Sequence[str] | None) -> int:
    """Run the command line ``argv``; returns the exit code."""
    flags = parse(Check, PROGRAM, argv)
    check_file("json", flags.json)

    from jremat.terminal.start_jax import start_jax  # what follows imports JAX

    start_jax()
    from jremat.command.target import called, function_at, what
    from jremat.oom.launch import check_launch

    step, args, kwargs = called(function_at(flags.step), flags.step, flags.args)
    if kwargs:
        raise ValueError(f"args: expected all arguments by position, got {', '.join(kwargs)}")
    try:
        found = check_launch(
            step, *args, target=flags.target, memory_fraction=flags.memory_fraction, slop_percent=flags.slop
        )
    except (TypeError, IndexError, KeyError, AttributeError, NotImplementedError) as error:
        return fail(PROGRAM, f"step: tracing {flags.step} raised {what(error)}")
    print(found)
    if flags.json:
        write_json(flags.json, asdict(found) | {"fits": found.fits, "needed_bytes": found.needed_bytes})
    return 0 if found.fits else 1
