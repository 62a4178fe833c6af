"""Cases run one after the other, each in its process; rows kept in a file as they land."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jremat.child_process import last_error, run_logged
from jremat.policy.files import write_json
from scripts.benchmark.config import Case

FINAL = ("ok", "does_not_fit", "out_of_memory")
"""Statuses that would come out the same again; a row with another one is tried anew when a file is continued."""

_ROOT = Path(__file__).resolve().parents[2]


def run(case: Case, timeout_seconds: float) -> dict[str, Any]:
    """The row of one case: its fields, what was found out, ``status`` and where it failed ``error``."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        asked, answered, log = (Path(folder) / name for name in ("case.json", "answer.json", "log"))
        asked.write_text(json.dumps(dataclasses.asdict(case)))
        command = [sys.executable, "-m", "scripts.benchmark.child", str(asked), str(answered)]
        code = run_logged(command, _environment(case), log, timeout_seconds)
        if code is None:
            found: dict[str, Any] = {"status": "timed_out", "error": f"took more than {timeout_seconds:g} s"}
        elif answered.exists():
            found = json.loads(answered.read_text())
        else:
            found = {"status": "crashed", "error": f"exit {code}: {last_error(log)}"}
    return dataclasses.asdict(case) | {"key": case.key} | found | {"case_seconds": time.perf_counter() - start}


def _environment(case: Case) -> dict[str, str]:
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [found.get("PYTHONPATH")])])
    if case.target.split("x")[0] != "local":
        found["JAX_PLATFORMS"] = "cpu"  # compiled for what is described; a GPU that is here stays free
    return found


class Rows:
    """The rows of a benchmark, in a JSON file that is whole after each of them.

    Args:
        path: the file, or None to keep them here alone; one that is there is continued.
        stamp: what every new row carries beside its own, such as the commit.

    Raises:
        ValueError: the file is there and holds no rows.
    """

    def __init__(self, path: Path | None, stamp: dict[str, Any]) -> None:
        self.path, self.stamp = path, stamp
        self.rows: list[dict[str, Any]] = _read(path) if path and path.exists() else []

    def done(self, case: Case) -> bool:
        """Whether the file has a row of the case that would come out the same; one of another commit might not."""
        same = lambda row: row["key"] == case.key and row.get("commit") == self.stamp.get("commit")
        return any(same(row) and row["status"] in FINAL for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, in place of an older one of its case, and write the file."""
        self.rows = [other for other in self.rows if other["key"] != row["key"]] + [row | self.stamp]
        if self.path:
            write_json(self.path, self.rows)

    def of(self, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
        """The rows of these cases, in their order."""
        by_key = {row["key"]: row for row in self.rows}
        return (by_key[case.key] for case in cases if case.key in by_key)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"json: {path} can't be continued: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) and {"key", "status"} <= set(row) for row in rows):
        raise ValueError(f"json: {path} holds no rows of a benchmark; name another file")
    return rows


def commit() -> dict[str, Any]:
    """The commit of the checkout and whether it has changes, or nothing outside one."""
    done = subprocess.run(
        ["git", "-C", str(_ROOT), "status", "--porcelain=v2", "--branch"], capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    head = [line.split()[2] for line in lines if line.startswith("# branch.oid")]
    return {"commit": head[0], "uncommitted_changes": any(line[0] != "#" for line in lines)} if head else {}
