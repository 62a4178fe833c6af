"""A run's own flags, with which ``--resume`` goes on: written into run.json and read from there. No JAX here."""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from jremat.policy.files import read_json
from jremat.policy.messages import shown
from scripts.training.config import Processes, Run
from scripts.training.files import Files, flat


@dataclass(frozen=True)
class Own:
    """What the folder of a resumed run says of its flags.

    Args:
        flags: the run's own; None where nothing is resumed or they can't be read.
        fault: why they can't, or None.
    """

    flags: Run | None = None
    fault: str | None = None


def to_json(run: Run) -> dict[str, Any]:
    """The flags as JSON: paths absolute, and the schedule's steps as numbers, so that --steps may be raised."""
    text = replace(run.text, data=run.text.data and run.text.data.absolute())
    schedule = replace(run.optimizer, warmup_steps=run.warmup_steps, decay_steps=run.decay_steps)
    whole = replace(
        run, text=text, optimizer=schedule, json=run.json and run.json.absolute(), processes=Processes()
    )  # how processes find each other is of one start
    return json.loads(json.dumps(dataclasses.asdict(whole), default=str))


def read(files: Files) -> Own:
    """The flags in run.json, each of its own type and in its range; a flag that it doesn't have is the default."""
    if not files.description.is_file():
        return Own(None, f"{files.description} is missing" if files.holds_a_run else None)
    try:
        content = read_json(files.description)
    except ValueError as error:
        return Own(None, str(error))
    try:
        run = replace(_read(Run, _object(content, "the file").get("flags"), "flags"), out=files.out, resume=False)
        run.check()
    except ValueError as error:
        return Own(None, f"{files.description}: {error}")
    return Own(run)


def changes(before: Run, now: Run) -> list[str]:
    """The flags that differ from the run's own.

    >>> changes(Run(), Run(policy="full", steps=300))
    ['policy full (was dots_saveable)', 'steps 300 (was 200)']
    """
    old, new = flat(to_json(before)), flat(to_json(now))
    skipped = ("out", "resume", "json", "optimizer.warmup_steps", "optimizer.decay_steps")
    changed = [path for path in new if old[path] != new[path] and path not in skipped]
    return [f"{path.rpartition('.')[2]} {new[path]} (was {old[path]})" for path in changed]


def _read(kind: Any, value: Any, name: str) -> Any:
    """``value`` from JSON as a dataclass, a path or a plain value of the type ``kind``."""
    if dataclasses.is_dataclass(kind):
        given, hints = _object(value, name), typing.get_type_hints(kind)
        for key in given:
            if key not in hints:
                raise ValueError(f"{name}: expected {', '.join(hints)}, got {shown(key)}")
        return cast(Any, kind)(**{key: _read(hints[key], given[key], f"{name}.{key}") for key in given})
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    for option in options:
        if typing.get_origin(option) is Literal:
            if isinstance(value, str) and value in typing.get_args(option):
                return value
        elif option is Path:
            if isinstance(value, str) and "\0" not in value:
                return Path(value)
        elif type(value) is option or (option is float and type(value) is int):
            return value
    raise ValueError(f"{name}: expected {getattr(kind, '__name__', kind)}, got {shown(value)}")


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: expected an object, got {shown(value)}")
    return value
