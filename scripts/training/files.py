"""Where a run's files stand, and how they are written: whole or not at all."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jremat.policy.files import probe, write_json, write_whole


@dataclass(frozen=True)
class Files:
    """The files of one run, all under one folder."""

    out: Path

    @property
    def description(self) -> Path:
        """What the run is: written first, compared when it is resumed."""
        return self.out / "run.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line: every step, and every evaluation."""
        return self.out / "metrics.jsonl"

    @property
    def snapshots(self) -> Path:
        return self.out / "snapshots"

    @property
    def summary(self) -> Path:
        return self.out / "summary.json"

    @property
    def holds_a_run(self) -> bool:
        return any(path.exists() for path in (self.description, self.metrics, self.snapshots, self.summary))

    def check(self) -> None:
        """Refuse a folder in a file's place, the reverse, and a file that may not be read.

        Raises:
            ValueError: the wrong one of file and folder.
            OSError: a file can't be opened.
        """
        for path in (self.description, self.metrics, self.summary):
            if path.exists() and not path.is_file():
                raise ValueError(
                    f"out: expected a file, got {'a folder' if path.is_dir() else 'something else'}: {path}"
                )
            if path.exists():
                with path.open("rb"):
                    pass
        if self.snapshots.exists() and not self.snapshots.is_dir():
            raise ValueError(f"out: expected a folder, got a file: {self.snapshots}")


def default_out(model: str, policy: str, root: Path = Path("runs")) -> Path:
    """A folder that no run has yet: ``runs/tiny-dots_saveable``, then ``-2``, ``-3`` and so on."""
    name = f"{model}-{re.sub(r'[^A-Za-z0-9_.]+', '_', policy).strip('_')}"
    return free_name(root / name)


def make_folder(path: Path) -> None:
    """Make ``path``, its parents too, and see that files can be written there.

    Raises:
        OSError: the operating system refuses; what was made on the way is gone again.
    """
    missing = [p for p in (path, *path.parents) if not p.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe(path)
    except OSError as error:
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_description(path: Path, data: Mapping[str, Any], resumed: bool) -> list[str]:
    """Write run.json, and return a warning where a resumed run's own is missing or damaged.

    A damaged one is kept beside it.

    Raises:
        OSError: it can't be read or written.
    """
    warnings = []
    if path.exists():
        try:
            read_description(path)
        except ValueError as error:
            warnings.append(f"{error}; it is written anew, and the file as it was is kept as {keep_aside(path)}")
    elif resumed:
        warnings.append(f"{path} is missing; it is written anew")
    write_json(path, data)
    return warnings


def read_description(path: Path) -> Mapping[str, Any]:
    """What run.json says of a run.

    Raises:
        ValueError: it holds no description of a run.
        OSError: it can't be read.
    """
    try:
        description = json.loads(path.read_bytes())["description"]
        if isinstance(description, dict):
            return description
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ValueError(f"{path} holds no description of a run")


def rewind(metrics: Path, step: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Cut ``metrics`` back to what was written up to ``step``.

    A killed run may have gone beyond its last snapshot, and its last line may be cut short: both are no faults. Any
    other line that can't be read is left out and the file as it was kept beside it, as it is where the run starts from
    its first step again.

    Returns:
        the rows that stay, and warnings: which lines were left out, which steps have no row.

    Raises:
        OSError: it can't be read or written; it is as it was.
    """
    raw = metrics.read_bytes() if metrics.exists() else b""
    lines = [(number, line) for number, line in enumerate(raw.split(b"\n"), 1) if line.strip()]
    rows = [(number, line, _row(line)) for number, line in lines]
    unreadable = [number for number, _, row in rows if row is None]
    kept = [(line, row) for _, line, row in rows if row is not None and row["step"] <= step]
    missing = sorted(set(range(1, step + 1)) - {row["step"] for _, row in kept if "loss" in row})
    if not missing and unreadable == [raw.count(b"\n") + 1]:
        unreadable = []  # cut short by a kill

    warnings = []
    if unreadable or (lines and not step):
        aside = keep_aside(metrics)
        why = f"lines that are no metrics ({ranges(unreadable)}) are left out" if unreadable else "starts anew"
        warnings.append(f"{metrics}: {why}; the file as it was is kept as {aside}")
    if missing:
        warnings.append(f"{metrics} has no loss of {len(missing)} of the {step} steps so far: {ranges(missing)}")
    write_whole(metrics, b"".join(line + b"\n" for line, _ in kept))
    return [row for _, row in kept], warnings


def _row(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl, or None if it is no step and no evaluation."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 1:
        return None
    if "loss" in row:
        return row if type(row["loss"]) in (int, float) and abs(row["loss"]) <= sys.float_info.max else None
    return row if type(row.get("val_loss")) in (int, float) else None


def keep_aside(path: Path) -> Path:
    """Copy a damaged file to a name beside it that is free, and return that.

    Raises:
        OSError: it can't be copied.
    """
    aside = free_name(path.with_name(f"{path.name}.damaged"))
    write_whole(aside, path.read_bytes())
    return aside


def free_name(path: Path) -> Path:
    """``path``, or with ``-2``, ``-3`` and so on behind its name: the first that doesn't exist."""
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested objects by their paths.

    >>> flat({"seed": 0, "model": {"hidden": 128}})
    {'seed': 0, 'model.hidden': 128}
    """
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def ranges(numbers: Sequence[int]) -> str:
    """Rising numbers for people, at most five ranges of them.

    >>> ranges([1, 2, 3, 7, 9, 10])
    '1-3, 7, 9-10'
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in found]
    return ", ".join(shown if len(shown) <= 5 else [*shown[:4], "…", shown[-1]])
