"""Training state on disk: written beside the training, whole or not there at all.

``SNAPSHOTS/step_00000050/`` holds orbax's files under ``state/`` and ``manifest.json``: the step, the run's description
and the size and CRC-32 of every file. A snapshot is built in ``partial_00000050``, its manifest written last, and then
renamed; so one that was cut off, by a kill at any moment or by a disk that lost its end, is known for what it is. Older
snapshots go only once a newer whole one stands.
"""

import contextlib
import json
import logging
import os
import shutil
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from scripts.training.files import free_name

_MANIFEST = "manifest.json"
_READ = 1 << 22  # bytes read at a time for the CRC
_IN_FLIGHT = 0.5  # seconds after a failed write in which the others of it have ended


class SnapshotError(Exception):
    """A snapshot that could not be written or read; the message is one line for people."""


@dataclass(frozen=True)
class Snapshot:
    """A whole snapshot on disk."""

    path: Path
    step: int
    description: Mapping[str, Any]


def newest(folder: Path) -> tuple[Snapshot | None, list[str]]:
    """The newest whole snapshot in ``folder``, and a warning for each newer one that is not whole.

    Every file of a candidate is read and compared with its manifest.

    Raises:
        OSError: the folder can't be read.
    """
    warnings: list[str] = []
    for path in sorted(_finished(folder), key=_step_of, reverse=True):
        fault, manifest = _inspect(path)
        if fault is None:
            return Snapshot(path, _step_of(path), manifest["description"]), warnings
        warnings.append(f"{path} is not whole ({fault}); passed over")
    return None, warnings


def restore(snapshot: Snapshot, like: Any) -> Any:
    """The state of a snapshot on the default device.

    Args:
        snapshot: a whole one.
        like: a tree of arrays or ShapeDtypeStructs, the structure and shapes of the state.

    Raises:
        SnapshotError: the files don't hold that state.
    """
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), like)
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as files:
            return files.restore((snapshot.path / "state").absolute(), args=ocp.args.StandardRestore(target))
    except Exception as error:  # tensorstore and orbax raise many kinds; all mean the same here
        raise SnapshotError(f"cannot read the snapshot {snapshot.path}: {_first_line(error)}") from error


class Writer:
    """Writes snapshots of one run in a thread of its own, one at a time.

    Args:
        folder: where they go; made if it is missing.
        keep: how many whole ones stay.
        description: what the run is, for ``differences`` when somebody resumes.
        resumed: the snapshot that the run went on from. Newer ones are not whole; they are put aside.
    """

    def __init__(self, folder: Path, keep: int, description: Mapping[str, Any], resumed: Snapshot | None) -> None:
        self.folder, self.keep, self.description = folder, keep, description
        self.last = None if resumed is None else resumed.path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._running: Future[Path] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("partial_*"):
            _remove(leftover)
        for damaged in (path for path in _finished(folder) if resumed is None or _step_of(path) > resumed.step):
            damaged.rename(free_name(damaged.with_name(damaged.name.replace("step_", "damaged_"))))

    @property
    def last_good(self) -> str:
        """For people: which snapshot to go back to."""
        return f"the last good snapshot is {self.last}" if self.last else "there is no snapshot before it"

    def save(self, state: Any, step: int) -> None:
        """Copy the state to the host and start writing it; waits only for a snapshot that is still being written.

        A step that has its snapshot is not written again.

        Raises:
            SnapshotError: the snapshot before this one could not be written.
        """
        self.wait()
        if self.last is not None and _step_of(self.last) == step:
            return
        # A copy, since the step that comes next takes over the state's buffers.
        copy = jax.tree.map(lambda x: np.array(x, copy=True), state)
        self._running = self._thread.submit(self._write, copy, step)

    def poll(self) -> None:
        """Take note of a snapshot that is done, or raise the SnapshotError of one that failed."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the snapshot in progress, if there is one; raises its SnapshotError."""
        running, self._running = self._running, None
        if running is not None:
            self.last = running.result()

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=True)

    def _write(self, state: Any, step: int) -> Path:
        partial, final = self.folder / f"partial_{step:08d}", self.folder / f"step_{step:08d}"
        try:
            with _one_voice(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as files:
                files.save((partial / "state").absolute(), args=ocp.args.StandardSave(state))
            manifest = {"step": step, "description": self.description, "files": dict(_digests(partial))}
            _write_durably(partial / _MANIFEST, json.dumps(manifest, indent=1))
            partial.rename(final)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise SnapshotError(
                f"cannot write the snapshot of step {step} in {self.folder}: {_reason(error)}; {self.last_good}"
            ) from error
        for old in sorted(_finished(self.folder), key=_step_of)[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final


@contextlib.contextmanager
def _one_voice() -> Iterator[None]:
    """A write that fails is told once, by the exception.

    Orbax logs it with a traceback from each of its threads, and the writes that tensorstore still has in flight report
    to an event loop that is gone by then.
    """
    log, hook = logging.getLogger("absl"), sys.unraisablehook
    level = log.level

    def unless_late(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            hook(unraisable)

    log.setLevel(logging.CRITICAL)
    sys.unraisablehook = unless_late
    try:
        yield
    except BaseException:
        # Of the writes that failed beside the one raised asyncio tells when they are collected, whenever that is.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        time.sleep(_IN_FLIGHT)
        raise
    finally:
        log.setLevel(level)
        sys.unraisablehook = hook


def differences(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """What two descriptions of a run don't agree on, one ``name: snapshot has …, this run …`` each.

    >>> differences({"seed": 0, "model": {"hidden": 128}}, {"seed": 0, "model": {"hidden": 64}})
    ['model.hidden: the snapshot has 128, this run 64']
    """
    left, right = dict(_flat(saved)), dict(_flat(mine))
    return [
        f"{name}: the snapshot has {left.get(name, 'none')}, this run {right.get(name, 'none')}"
        for name in sorted({*left, *right})
        if left.get(name) != right.get(name)
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _finished(folder: Path) -> list[Path]:
    """Everything that has a snapshot's name; unlike ``glob``, a folder that can't be read is an error."""
    try:
        paths = list(folder.iterdir())
    except FileNotFoundError:
        return []
    return [path for path in paths if path.name.startswith("step_") and path.name[5:].isdecimal()]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _step_of(path: Path) -> int:
    return int(path.name[5:])


def _inspect(path: Path) -> tuple[str | None, dict[str, Any]]:
    """What is wrong with a snapshot, or None; and its manifest."""
    if not path.is_dir():
        return "it is no folder", {}
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        expected = {name: (size, crc) for name, (size, crc) in manifest["files"].items()}
        described = isinstance(manifest["description"], dict) and manifest["step"] == _step_of(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "no readable manifest", {}
    if not described:
        return "its manifest is another's", {}
    if not expected:
        return "its manifest names no file", {}
    for name, (size, crc) in expected.items():
        try:
            fault = _compare(path / name, size, crc)
        except OSError as error:
            fault = f"cannot be read: {error.strerror}"
        if fault is not None:
            return f"{name} {fault}", manifest
    return None, manifest


def _compare(file: Path, size: int, crc: int) -> str | None:
    """What a file of a snapshot differs in from its manifest, or None."""
    if not file.is_file():
        return "is missing"
    if file.stat().st_size != size:
        return f"has {file.stat().st_size} bytes of {size}"
    return None if _crc(file) == crc else "has changed"


def _digests(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        yield file.relative_to(folder).as_posix(), (file.stat().st_size, _crc(file))


def _crc(file: Path) -> int:
    crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_READ):
            crc = zlib.crc32(chunk, crc)
    return crc


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _reason(error: BaseException) -> str:
    """The operating system's own words, where they are in the error; tensorstore wraps them in its own."""
    text = str(error)
    known = ("No space left on device", "Read-only file system", "File too large", "Disk quota exceeded",
             "Permission denied")  # fmt: skip
    found = [words for words in known if words in text]
    return found[0] if found else _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
