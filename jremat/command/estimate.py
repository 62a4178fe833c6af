"""``jremat estimate package.module:block``: the training memory of a model of one's own, in formulas and in bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from jremat.command.output import Files
from jremat.policy.files import write_json
from jremat.terminal.command_line import command, fail, parse, warn

if TYPE_CHECKING:
    from jremat.estimator.ledger import Ledger

PROGRAM = "jremat estimate"


Mesh = Annotated[
    str,
    tyro.conf.arg(
        metavar="AXES",
        help="How the step is spread over devices: axis=DEVICES, separated by commas. data: replicas that share the "
        "batch; fsdp: devices that share the batch and hold a shard of the state each; zero=1 or 2: what data replicas "
        "shard (optimizer state; gradients too); tensor: devices that split heads, MLP width and vocabulary; sequence: "
        "these split the sequence elsewhere; context: devices that split the sequence everywhere.",
        help_behavior_hint="(default: one device; where several are named, fsdp)",
    ),
]


@dataclass(frozen=True)
class Estimate:
    """What a training step needs, line by line, each with its formula; nothing is compiled or run.

    The model is a function, named as package.module:function or file.py:function, or a Hugging Face config.json. With
    --layers N the function is one block f(layer_parameters, carry, ...) of N; without, it is a loss f(parameters, ...).
    Describe its arguments by --args, letters for sizes: --args "{'up': f32[h,4*h], 'down': f32[4*h,h]}" 'bf16[b,s,h]',
    and give the numbers by --sizes b=8 s=1024 h=768; or name a function without arguments that returns (f, args).
    """

    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """package.module:function, file.py:function or config.json."""
    policy: str = "full"
    """What each layer keeps; `python -m policies` lists the specs."""
    args: tuple[str, ...] = ()
    """A function's arguments: dtype[shape] for an array, letters in it; `key` for a random key; Python's pytrees."""
    sizes: tuple[str, ...] = ()
    """A number for each letter, such as b=8; of a config.json b and s."""
    layers: int = 0
    """Layers of which the function is one; 0: the function is all, or a config's own number."""
    optimizer: Literal["adamw", "momentum", "sgd"] = "adamw"
    """Two moments a parameter, one, or none."""
    accumulate: int = 1
    """Micro-batches of a step."""
    mesh: Mesh = ""
    """Also pipeline=STAGES and interleave=CHUNKS. In a function's shapes axes split the sizes b, s, and n, m, f, v."""
    json: Files = None
    """Write every figure there."""


@command(PROGRAM)
def main(argv: Sequence[str] | None) -> int:
    """Run the command line ``argv``; returns the exit code."""
    flags = parse(Estimate, PROGRAM, argv)
    sizes = read_sizes(flags.sizes)

    from jremat.terminal.start_jax import start_jax  # what follows imports JAX

    start_jax()
    from jremat.command.target import what
    from jremat.report.ledger import of_ledger
    from jremat.terminal.tables import console, human

    try:
        ledger, remarks = _ledger(flags, sizes)
    except (TypeError, IndexError, KeyError, AttributeError, NotImplementedError) as error:
        hint = "; a size that the code computes with can't be a letter: write a number" if flags.sizes else ""
        return fail(PROGRAM, f"function: tracing {flags.model} raised {what(error)}{hint}")
    if flags.json:
        write_json(flags.json, ledger.to_dict())
    for remark in remarks:
        warn(PROGRAM, remark)
    console().print(of_ledger(ledger, f"{flags.model}, {flags.policy}"))
    print(f"peak {human(ledger.peak_bytes)} in the {ledger.peak_phase}; kept by the layers {human(ledger.kept_bytes)}")
    print("where " + ", ".join(f"{name} = {size:,}" for name, size in ledger.symbols))
    return 0


def _ledger(flags: Estimate, sizes: Mapping[str, int]) -> "tuple[Ledger, tuple[str, ...]]":
    from dataclasses import replace

    import policies
    from jremat.command.target import called, function_at
    from jremat.estimator.huggingface import read
    from jremat.estimator.parallel import Parallel, read_mesh
    from jremat.estimator.transformer import estimate

    policy = policies.get(flags.policy)
    how: dict[str, Any] = {
        "optimizer": flags.optimizer,
        "accumulate": flags.accumulate,
        "parallel": read_mesh(flags.mesh) if flags.mesh else Parallel(),
    }
    if flags.model.endswith(".json"):
        config, remarks = read(Path(flags.model))
        config = replace(config, num_layers=flags.layers or config.num_layers)
        for name in sizes:
            if name not in ("b", "s"):
                raise ValueError(f"sizes: of a config.json b and s alone, got {name!r}")
        seq = sizes.get("s", min(config.max_seq, 1024))
        return estimate(config, policy, batch=sizes.get("b", 1), seq=seq, **how), remarks
    f, args, kwargs = called(function_at(flags.model), flags.model, flags.args, letters=True)
    if kwargs:
        raise ValueError(f"args: expected all arguments by position, got {', '.join(kwargs)}")
    return estimate(f, policy, *args, num_layers=flags.layers or None, sizes=sizes, **how), ()


def read_sizes(texts: Sequence[str]) -> Mapping[str, int]:
    """``b=8`` and the like.

    Raises:
        ValueError: a text that is no letter and number.

    >>> read_sizes(["b=8", "s=1024"])
    {'b': 8, 's': 1024}
    """
    found = {}
    for text in texts:
        name, equals, number = text.partition("=")
        if not name.isidentifier() or not equals or not number.isdecimal():
            raise ValueError(f"sizes: expected a letter and its number, such as b=8, got {text!r}")
        found[name] = int(number)
    return found
