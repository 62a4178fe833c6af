"""Where a run's files stand, and how they are written: whole or not at all."""

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jremat.policy.files import write_whole


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


def default_out(model: str, policy: str, root: Path = Path("runs")) -> Path:
    """A folder that no run has yet: ``runs/tiny-dots_saveable``, then ``-2``, ``-3`` and so on."""
    name = f"{model}-{re.sub(r'[^A-Za-z0-9_.]+', '_', policy).strip('_')}"
    number = 1
    while (path := root / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


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


def probe(folder: Path) -> None:
    """Write a byte in ``folder`` and take it away again; raises OSError where that can't be done."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0")
        file.flush()


def write_json(path: Path, data: Mapping[str, Any] | list[Any]) -> None:
    """Write ``data`` whole or not at all.

    Raises:
        OSError: nothing is left behind.
    """
    write_whole(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def rewind(metrics: Path, step: int) -> list[dict[str, Any]]:
    """Cut ``metrics`` back to what was written up to ``step``, and return it.

    A killed run may have gone beyond its last snapshot, and its last line may be cut short.
    """
    kept = [line for line in _lines(metrics) if line["step"] <= step]
    text = "".join(json.dumps(line) + "\n" for line in kept)
    write_whole(metrics, text)
    return kept


def _lines(metrics: Path) -> Iterator[dict[str, Any]]:
    if not metrics.exists():
        return
    for line in metrics.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return  # the last line of a killed run
