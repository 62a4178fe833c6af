"""The loop: step, look, write, evaluate, save; until the end, a signal or a loss that is no number."""

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import jax
import numpy as np

from scripts.training.cost import ModelFlops
from scripts.training.optimizer import schedule
from scripts.training.prepare import Job
from scripts.training.processes import any_of, is_first
from scripts.training.progress import Reporter
from scripts.training.snapshots import Writer
from scripts.training.step import State, eval_loss


class Diverged(Exception):
    """The loss or the gradient is not a finite number."""


@dataclass(frozen=True)
class Outcome:
    """What came of the loop.

    Args:
        step: steps done in all.
        loss, val_loss: of the last step and the last evaluation in this process; None where there was none.
        step_seconds: of every step of this process but the first, which may still be warming up.
        signal: the one that stopped it, or None.
    """

    step: int
    loss: float | None
    val_loss: float | None
    step_seconds: tuple[float, ...]
    signal: int | None


@dataclass
class StopSignal:
    """While it is entered, the first SIGINT or SIGTERM is noted and the second one ends the program at once."""

    number: int | None = None
    _before: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._note) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number


class MetricsLog:
    """metrics.jsonl, a line at a time."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("a", buffering=1)

    def write(self, row: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what can't be written now has been reported already
            self._file.close()


def train(
    job: Job,
    step_fn: jax.stages.Compiled,
    state: State,
    writer: Writer,
    reporter: Reporter,
    flops: ModelFlops,
    peak_flops_per_second: float,
    stop: StopSignal,
) -> Outcome:
    """Run the steps that are left.

    Args:
        job: the run.
        step_fn: its compiled train step; takes over the state that it is given.
        state: to start from.
        writer: of snapshots.
        reporter: of progress.
        flops: of one step.
        peak_flops_per_second: for MFU.
        stop: entered; a signal that it noted ends the loop after the step in progress, with a snapshot.

    Raises:
        Diverged: the loss or the gradient's norm is not finite; no snapshot was made of what came of it.
        SnapshotError: a snapshot could not be written.
        OSError: the metrics could not be written.
    """
    run, first, log = job.run, job.first, MetricsLog(job.files.metrics if is_first() else Path(os.devnull))
    rate, evaluate = schedule(run), jax.jit(eval_loss(job.config, job.model.sharding))
    held_out = _micro_batches(job, run.text.eval_batches * run.text.micro_batch, job.batches.held_out)
    tokens_per_step = run.batch * run.text.seq
    seconds: list[float] = []
    loss = val_loss = signalled = None
    done = first
    batch = _batch(job, first)
    try:
        while done < run.steps and (signalled := any_of(stop.number)) is None:
            began = time.perf_counter()
            state, metrics = step_fn(state, batch)
            batch = _batch(job, done + 1)  # made while the device works
            loss, grad_norm = float(metrics.loss), float(metrics.grad_norm)
            took = time.perf_counter() - began
            done += 1
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                writer.wait()
                raise Diverged(f"step {done}: the loss is {loss}, the gradient's norm {grad_norm}; {writer.last_good}")
            seconds.append(took)
            row = {
                "step": done,
                "loss": loss,
                "grad_norm": grad_norm,
                "learning_rate": float(rate(done - 1)),
                "step_seconds": took,
                "tokens_per_second": tokens_per_step / took,
                "mfu": flops.full / took / peak_flops_per_second,
            }
            log.write(row)
            reporter.step(row)
            if done % run.logging.snapshot_every == 0:
                writer.save(state, done)
            writer.poll()
            if done % run.logging.eval_every == 0 and done < run.steps:
                val_loss = float(evaluate(state.params, held_out))
                log.write({"step": done, "val_loss": val_loss})
                reporter.evaluated(done, val_loss)
        writer.save(state, done)
        if signalled is None:
            val_loss = float(evaluate(state.params, held_out))
            log.write({"step": done, "val_loss": val_loss})
            reporter.evaluated(done, val_loss)
        writer.wait()
    finally:
        log.close()
    return Outcome(done, loss, val_loss, tuple(seconds[1:]), signalled)


def _batch(job: Job, step: int) -> Any:
    return _micro_batches(job, job.run.batch, partial(job.batches.train, step))


def _micro_batches(job: Job, count: int, read: Callable[[int, np.ndarray], np.ndarray]) -> Any:
    """``count`` sequences as [n, micro_batch, seq + 1]; on a mesh each process reads the rows of its own devices."""
    each, length = job.run.text.micro_batch, job.run.text.seq + 1
    rows = np.arange(count).reshape(-1, each)
    if job.tokens.sharding is None:
        return read(count, rows.ravel()).reshape(-1, each, length)
    found: dict[tuple[int, int], np.ndarray] = {}  # devices that share a part of the model read the same rows

    def part(index: Any) -> np.ndarray:
        own = rows[index[:2]]
        key = int(own[0, 0]), own.shape[1]
        if key not in found:
            found[key] = read(count, own.ravel()).reshape(*own.shape, length)
        return found[key]

    return jax.make_array_from_callback((len(rows), each, length), job.tokens.sharding, part)
