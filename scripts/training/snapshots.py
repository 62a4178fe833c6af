"""Training state on disk by orbax's CheckpointManager: written beside the training, whole or not there at all.

``SNAPSHOTS/step_00000050/`` holds the state's arrays under ``state/`` and, under ``run/``, the step, the run's
description and a checksum of every array. Each process writes the shards that it holds, and reads those of the mesh on
which it goes on. Orbax writes a folder of another name and renames it when it is whole, removes older ones only then,
and finds files that are missing or cut short; a bit that has changed in an array it doesn't find.
"""

import contextlib
import errno
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax import lax

from scripts.training.files import flat, free_name
from scripts.training.processes import is_first, together

_IN_FLIGHT = 0.5  # seconds after a failed write in which the others of it have ended


class SnapshotError(Exception):
    """A snapshot that could not be written or read; the message is one line for people."""


@dataclass(frozen=True)
class Snapshot:
    """A whole snapshot on disk.

    Args:
        path: its folder.
        step: steps done.
        description: of the run that it is of.
        state: what it holds, as the caller's shardings place it; None where it is another run's.
    """

    path: Path
    step: int
    description: Mapping[str, Any]
    state: Any = field(default=None, compare=False, repr=False)


def newest(folder: Path, like: Any, description: Mapping[str, Any]) -> tuple[Snapshot | None, list[str]]:
    """The newest whole snapshot in ``folder``, and a warning for each newer one that is not whole.

    Every array of a candidate is read and compared with its checksum.

    Args:
        folder: may be missing.
        like: a tree of arrays or ShapeDtypeStructs: structure, shapes and shardings of the state.
        description: what the run is. One that describes another run is answered without its state.

    Raises:
        OSError: the folder can't be read.
    """
    warnings: list[str] = []
    for path in sorted(_finished(folder), key=_step_of, reverse=True):
        try:
            saved, checksums = _run_of(path)
            same = not differences(saved, description)
            return Snapshot(path, _step_of(path), saved, _state_of(path, like, checksums) if same else None), warnings
        except SnapshotError as error:
            warnings.append(f"{path} is not whole ({error}); passed over")
    return None, warnings


def newest_name(folder: Path) -> str:
    """For people: the newest snapshot, not read."""
    found = _finished(folder)
    return f"the newest snapshot is {max(found, key=_step_of)}" if found else "there is no snapshot"


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
        if is_first():
            folder.mkdir(parents=True, exist_ok=True)
            for damaged in (path for path in _finished(folder) if resumed is None or _step_of(path) > resumed.step):
                damaged.rename(free_name(damaged.with_name(damaged.name.replace("step_", "damaged_"))))
            self._sweep()
        together("the folder of snapshots is there")
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
        arrays = _leaves(state)
        run = {"step": step, "description": self.description, "checksums": _checksums(arrays)}
        if jax.default_backend() == "cpu":
            # There orbax writes from the buffers themselves, which the step that comes next takes over.
            arrays = jax.block_until_ready(_copied(arrays))
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


def _run_of(path: Path) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    """The description and the checksums of a snapshot; raises SnapshotError where they can't be read."""
    run = _restored(path, run=ocp.args.JsonRestore()).run
    match run:
        case {"step": step, "description": dict(description), "checksums": dict(checksums)} if step == _step_of(path):
            return description, checksums
    raise SnapshotError("its run/metadata is another's")


def _state_of(path: Path, like: Any, checksums: Mapping[str, int]) -> Any:
    """The state of a snapshot, placed as ``like`` is; raises SnapshotError where it is not whole."""
    wanted = _leaves(jax.tree.map(_placed, like))
    arrays = _restored(path, state=ocp.args.StandardRestore(wanted)).state
    if checksums.keys() != arrays.keys():
        raise SnapshotError("its run/metadata is another's")
    changed = [name for name, number in _checksums(arrays).items() if checksums[name] != number]
    if changed:
        raise SnapshotError(f"{', '.join(changed)} differs from its checksum")
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])


def _restored(path: Path, **items: Any) -> Any:
    try:
        with _reported_once(), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as files:
            return files.restore(path.absolute(), args=ocp.args.Composite(**items))
    except Exception as error:  # tensorstore and orbax raise many kinds; all mean the same here
        raise SnapshotError(_reason(error)) from error


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a state by their paths in it."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _checksums(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    return {name: int(number) for name, number in _checksums_of(dict(arrays)).items()}


@jax.jit
def _checksums_of(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """A checksum of each array, whatever the mesh that it lies on: integers add up in any order.

    The sum, modulo 2³², of each item's bits times an odd number of its own: a changed bit always changes it.
    """

    def one(x: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}").astype(jnp.uint32)
        index = jnp.uint32(0)  # of an item, in the order of rows
        for axis, size in enumerate(bits.shape):
            index = index * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        return (bits * (2 * index + 1)).sum(dtype=jnp.uint32)

    return {name: one(x) for name, x in arrays.items()}


@jax.jit
def _copied(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(jnp.copy, arrays)


def _reason(error: BaseException) -> str:
    """The operating system's own words, where they are in the error; tensorstore wraps them in its own."""
    known = (errno.ENOSPC, errno.EROFS, errno.EFBIG, errno.EDQUOT, errno.EACCES, errno.EIO)
    found = [words for words in map(os.strerror, known) if words in str(error)]
    return found[0] if found else (str(error).strip() or type(error).__name__).splitlines()[0][:300]
