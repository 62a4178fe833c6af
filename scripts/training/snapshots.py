"""Training state on disk by orbax's CheckpointManager: written beside the training, whole or not there at all.

``SNAPSHOTS/step_00000050/`` holds the state's arrays under ``state/`` and, under ``run/``, the step, the run's
description and a CRC-32 of every array. Orbax writes a folder of another name and renames it when it is whole, removes
older ones only then, and finds files that are missing or cut short; a bit that has changed in an array it doesn't find.
"""

import contextlib
import errno
import logging
import os
import shutil
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from scripts.training.files import flat, free_name

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

    Every array of a candidate is read and compared with its CRC.

    Raises:
        OSError: the folder can't be read.
    """
    warnings: list[str] = []
    for path in sorted(_finished(folder), key=_step_of, reverse=True):
        try:
            description, _ = _read(path)
        except SnapshotError as error:
            warnings.append(f"{path} is not whole ({error}); passed over")
        else:
            return Snapshot(path, _step_of(path), description), warnings
    return None, warnings


def restore(snapshot: Snapshot, like: Any) -> Any:
    """The state of a snapshot on the default device.

    Args:
        snapshot: a whole one.
        like: a tree of arrays or ShapeDtypeStructs, the structure and shapes of the state.

    Raises:
        SnapshotError: the files don't hold that state.
    """
    leaves = _leaves(like)
    try:
        _, arrays = _read(snapshot.path)
        kinds = [{name: (x.shape, x.dtype) for name, x in tree.items()} for tree in (arrays, leaves)]
        if kinds[0] != kinds[1]:
            raise SnapshotError("its arrays are another state's")
    except SnapshotError as error:
        raise SnapshotError(f"cannot read the snapshot {snapshot.path}: {error}") from error
    return jax.device_put(jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in leaves]))


class Writer:
    """Writes snapshots of one run beside it, one at a time.

    Args:
        folder: where they go; made if it is missing.
        keep: how many whole ones stay.
        description: what the run is, for ``differences`` when somebody resumes.
        resumed: the snapshot that the run went on from. Newer ones are not whole; they are put aside.
    """

    def __init__(self, folder: Path, keep: int, description: Mapping[str, Any], resumed: Snapshot | None) -> None:
        self.folder, self.description = folder, description
        self.last = None if resumed is None else resumed.path
        self._writing: int | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for damaged in (path for path in _finished(folder) if resumed is None or _step_of(path) > resumed.step):
            damaged.rename(free_name(damaged.with_name(damaged.name.replace("step_", "damaged_"))))
        self._sweep()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, step_prefix="step", step_format_fixed_length=8)
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(_reported_once())
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    @property
    def last_good(self) -> str:
        """For people: which snapshot to go back to."""
        return f"the last good snapshot is {self.last}" if self.last else "there is no snapshot before it"

    def save(self, state: Any, step: int) -> None:
        """Copy the state to the host and start writing it; waits only for a snapshot that is still being written.

        A step that has its snapshot is not written again.

        Raises:
            SnapshotError: this snapshot or the one before it could not be written.
        """
        self.wait()
        # A copy, since the step that comes next takes over the state's buffers.
        arrays = {name: np.array(leaf, copy=True) for name, leaf in _leaves(state).items()}
        run = {"step": step, "description": self.description, "crc": _digests(arrays)}
        items = ocp.args.Composite(state=ocp.args.StandardSave(arrays), run=ocp.args.JsonSave(run))
        self._writing = step
        with self._failing():
            self._manager.save(step, args=items)

    def poll(self) -> None:
        """Take note of a snapshot that is done, or raise the SnapshotError of one that failed."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Wait for the snapshot in progress, if there is one; raises its SnapshotError."""
        with self._failing():
            self._manager.wait_until_finished()
        if self._writing is not None:
            self.last, self._writing = self.folder / f"step_{self._writing:08d}", None

    def close(self) -> None:
        """Let orbax's threads end."""
        with self._quiet, contextlib.suppress(Exception):  # a failed write has raised where it was waited for
            self._manager.close()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of many kinds
            time.sleep(_IN_FLIGHT)
            self._sweep()
            what = f"the snapshot of step {self._writing} in {self.folder}"
            raise SnapshotError(f"cannot write {what}: {_reason(error)}; {self.last_good}") from error

    def _sweep(self) -> None:
        """Remove what a write that failed or was killed has left."""
        for leftover in self.folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _reported_once() -> Iterator[None]:
    """What fails is reported by its exception alone.

    Orbax logs it too, with a traceback from each of its threads, and what tensorstore still has in flight reports to
    an event loop that is gone by then.
    """
    logs = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels, hook = [log.level for log in logs], sys.unraisablehook

    def unless_late(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            hook(unraisable)

    for log in logs:
        log.setLevel(logging.CRITICAL)
    sys.unraisablehook = unless_late
    try:
        yield
    except BaseException:
        time.sleep(_IN_FLIGHT)
        raise
    finally:
        for log, level in zip(logs, levels):
            log.setLevel(level)
        sys.unraisablehook = hook


def differences(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """What two descriptions of a run don't agree on, one ``name: snapshot has …, this run …`` each.

    >>> differences({"seed": 0, "model": {"hidden": 128}}, {"seed": 0, "model": {"hidden": 64}})
    ['model.hidden: the snapshot has 128, this run 64']
    """
    left, right = flat(saved), flat(mine)
    return [
        f"{name}: the snapshot has {left.get(name, 'none')}, this run {right.get(name, 'none')}"
        for name in sorted({*left, *right})
        if left.get(name) != right.get(name)
    ]


def _finished(folder: Path) -> list[Path]:
    """Everything that has a snapshot's name; unlike ``glob``, a folder that can't be read is an error."""
    try:
        paths = list(folder.iterdir())
    except FileNotFoundError:
        return []
    return [path for path in paths if path.name.startswith("step_") and path.name[5:].isdecimal()]


def _step_of(path: Path) -> int:
    return int(path.name[5:])


def _read(path: Path) -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]]:
    """The description and the arrays of a snapshot; raises SnapshotError where it is not whole."""
    items = ocp.args.Composite(state=ocp.args.StandardRestore(), run=ocp.args.JsonRestore())
    try:
        with _reported_once(), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as files:
            found = files.restore(path.absolute(), args=items)
        run, arrays = found.run, found.state
        step, description, digests = run["step"], run["description"], run["crc"]
        changed = [name for name, crc in _digests(arrays).items() if digests[name] != crc]
    except Exception as error:  # tensorstore and orbax raise many kinds; all mean the same here
        raise SnapshotError(_reason(error)) from error
    if step != _step_of(path) or not isinstance(description, dict) or digests.keys() != arrays.keys():
        raise SnapshotError("its run/metadata is another's")
    if changed:
        raise SnapshotError(f"{', '.join(changed)} differs from its CRC")
    return description, arrays


def _leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a state by their paths in it."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _digests(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    return {name: zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data) for name, array in arrays.items()}


def _reason(error: BaseException) -> str:
    """The operating system's own words, where they are in the error; tensorstore wraps them in its own."""
    known = (errno.ENOSPC, errno.EROFS, errno.EFBIG, errno.EDQUOT, errno.EACCES, errno.EIO)
    found = [words for words in map(os.strerror, known) if words in str(error)]
    return found[0] if found else (str(error).strip() or type(error).__name__).splitlines()[0][:300]
