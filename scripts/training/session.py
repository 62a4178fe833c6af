"""One run from its flags to its summary: check, compile, train, sum up."""

import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from statistics import median
from typing import Any

import jax
from rich.console import Console

from jremat.measure import PeakFlops
from jremat.policy.files import write_json
from jremat.terminal.command_line import fail, say, warn
from jremat.terminal.tables import human
from scripts.flags import asks_planner
from scripts.training.config import Run
from scripts.training.cost import ModelFlops, StepBytes, matmul_peak, model_flops, step_bytes
from scripts.training.files import make_folder, rewind, write_description
from scripts.training.loop import Diverged, Outcome, StopSignal, train
from scripts.training.own import Own, to_json
from scripts.training.prepare import Job, prepare
from scripts.training.processes import is_first, together, wait_for_word_of_the_end, watch
from scripts.training.progress import Reporter, aligned
from scripts.training.snapshots import SnapshotError, Writer, newest_name


def session(run: Run, program: str, own: Own) -> int:
    """Run it; returns the exit code. Whatever a user can meet is one line on stderr.

    Args:
        run: the flags.
        program: its name, for these lines.
        own: the flags of the run that is resumed.
    """
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: warn(program, message)
        try:
            if asks_planner(run.policy):
                say(program, f"planning {run.policy} …")
            job = prepare(run, own)
        except ValueError as error:
            return fail(program, error)
        except OSError as error:
            return fail(program, _unread(error))
        for warning in job.warnings:
            warn(program, warning)
        lost = lambda: fail(
            program,
            f"another process of this run has ended; {newest_name(job.files.snapshots)}; start them all with --resume "
            f"--out {job.files.out} to go on",
            1,
        )
        leave = watch(run.processes, lost)
        try:
            code = _run(job, program)
            leave()
            return code
        except SnapshotError as error:
            wait_for_word_of_the_end()
            return fail(program, error)
        except OSError as error:
            return fail(program, _unread(error))
        except Diverged as error:
            return fail(program, error, 1)
        except KeyboardInterrupt:
            return fail(program, "stopped at once; nothing was saved after the last snapshot", 130)
        except jax.errors.JaxRuntimeError as error:
            wait_for_word_of_the_end()
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return fail(program, f"out of device memory under {run.policy}; a policy that keeps less may fit", 1)


def _unread(error: OSError) -> str:
    return f"cannot read or write {error.filename or 'a file'}: {error.strerror or error}"


def _run(job: Job, program: str) -> int:
    run = job.run
    flops = model_flops(job.config, run.batch * run.text.seq, run.text.seq)
    with ThreadPoolExecutor(1) as beside:  # the program that makes the parameters takes its time to compile, too
        made = beside.submit(job.initial)
        began = time.perf_counter()
        compiled = job.step.compile()
        compile_seconds = time.perf_counter() - began
        state = made.result()
    memory, peak = step_bytes(compiled), matmul_peak(job.config.compute_dtype)
    possible = peak.flops_per_second * job.devices

    earlier: list[dict[str, Any]] = []
    if is_first():
        make_folder(job.files.out)
        earlier, damage = rewind(job.files.metrics, job.first)
        described = {"description": job.description, "policy": run.policy, "flags": to_json(run)}
        damage += write_description(job.files.description, described, job.resumed is not None)
        for line in damage:
            warn(program, line)
    together("the run's files are there")
    writer = Writer(job.files.snapshots, run.logging.keep, job.description, job.resumed)
    reporter = Reporter(Console(quiet=not is_first()), job.first, run.steps, memory.peak, run.logging.log_every)
    for line in _opening(job, memory, peak, compile_seconds):
        reporter.say(line)
    try:
        with StopSignal() as stop, reporter:
            outcome = train(job, compiled, state, writer, reporter, flops, possible, stop)
    finally:
        writer.close()
    if outcome.signal is not None:
        reporter.say(f"stopped after step {outcome.step}, saved as {writer.last}")
        reporter.say(f"to go on: --resume --out {job.files.out}")
        return 128 + outcome.signal
    loss = outcome.loss if outcome.loss is not None else _loss_of(job.first, earlier)
    summary = _summary(job, outcome, loss, flops, memory, peak) | {"compile_seconds": compile_seconds}
    for path in (job.files.summary, run.json) if is_first() else ():
        if path is not None:
            write_json(path, summary)
    for line in ["", *aligned(_closing(summary)), *job.notes]:
        reporter.say(line)
    return 0


def _resumed(job: Job) -> str:
    changed = f"; changed: {', '.join(job.changed)}" if job.changed else ""
    return f"after step {job.first} of {job.run.steps}{changed}"


def _vocabulary(job: Job) -> str:
    """Where a folder of tokens decided it."""
    corpus = job.batches.corpus
    if job.run.text.vocab_size or corpus.held_out is None:
        return ""
    unread = "; meta.pkl is not read, since a pickle can run any code" if corpus.pickled else ""
    return f"{job.config.vocab_size:,}, the largest token is {corpus.max_token:,}{unread}"


def _loss_of(step: int, rows: Sequence[Mapping[str, Any]]) -> float | None:
    """As metrics.jsonl has it, or None if it doesn't."""
    return next((row["loss"] for row in reversed(rows) if row["step"] == step and "loss" in row), None)


def _opening(job: Job, memory: StepBytes, peak: PeakFlops, compile_seconds: float) -> list[str]:
    """What the run is, before its first step."""
    c, corpus, text, name = job.config, job.batches.corpus, job.run.text, job.run.model.model
    skipped = f", {corpus.skipped} files that are no text left out" if corpus.skipped else ""
    of_each = f" on each of {job.devices} devices" if job.devices > 1 else ""
    rows = {
        "model": f"{name}: {c.num_params():,} parameters, {c.num_layers} layers, {c.attention} attention",
        "data": f"{corpus.name}: {corpus.num_tokens:,} tokens in {len(corpus.files):,} files{skipped}",
        **({"vocabulary": known} if (known := _vocabulary(job)) else {}),
        **({"resumed": _resumed(job)} if job.run.resume else {}),
        "batch": f"{text.accumulate} × {text.micro_batch} sequences of {text.seq} tokens",
        "policy": f"{job.remat.name}, run by a {job.remat.stack}",
        **({"mesh": _mesh(job)} if job.model.sharding else {}),
        "step": f"compiled in {compile_seconds:.1f} s; peak {human(memory.peak)}{of_each} by the compiler's count, "
        "not measured",
        "MFU": f"against {peak.flops_per_second / 1e9:,.0f} GFLOP/s{of_each}: {peak.source}",
        "files": str(job.files.out),
    }
    return [*aligned(rows), ""]


def _summary(
    job: Job, outcome: Outcome, final_loss: float | None, flops: ModelFlops, memory: StepBytes, peak: PeakFlops
) -> dict[str, Any]:
    """The run in numbers.

    Rates are those of the median step; null where this process did no more than one step. So is the final loss where
    this process did none and metrics.jsonl has lost it.
    """
    run = job.run
    seconds = median(outcome.step_seconds) if outcome.step_seconds else None
    share = lambda count: None if seconds is None else count / seconds / (peak.flops_per_second * job.devices)
    return {
        "policy": run.policy,
        "resolved_policy": job.remat.policy.spec,
        "stack": job.remat.stack,
        "model": run.model.model,
        "num_params": job.config.num_params(),
        "data": job.batches.corpus.name,
        "steps": outcome.step,
        "tokens_per_step": run.batch * run.text.seq,
        "final_loss": final_loss,
        "val_loss": outcome.val_loss,
        "step_seconds": seconds,
        "tokens_per_second": None if seconds is None else run.batch * run.text.seq / seconds,
        "mfu": share(flops.full),
        "mfu_half_causal": share(flops.half),
        "model_flops_per_step": flops.full,
        "model_flops_per_step_half_causal": flops.half,
        "recompute_flops_per_step": job.counted.recompute,
        "hfu": share(job.counted.total),
        "peak_flops_per_second": peak.flops_per_second,
        "peak_flops_source": peak.source,
        "compiled_peak_bytes": memory.peak,
        "compiled_bytes": asdict(memory),
        "notes": list(job.notes),
        "seed": run.seed,
        "out": str(job.files.out),
        "device": jax.local_devices()[0].device_kind,
        "devices": job.devices,
        "mesh": str(job.model.sharding.parallel) if job.model.sharding else None,
        "processes": jax.process_count(),
        "jax": jax.__version__,
    }


def _mesh(job: Job) -> str:
    assert job.model.sharding is not None
    count = jax.process_count()
    return f"{job.model.sharding.parallel}: {job.devices} devices" + (f" of {count} processes" if count > 1 else "")


def _closing(summary: Mapping[str, Any]) -> dict[str, str]:
    """The summary for people."""
    rate = lambda name, form: "too few steps" if summary[name] is None else format(summary[name], form)
    return {
        "policy": f"{summary['policy']}, run by a {summary['stack']}",
        "steps": f"{summary['steps']:,}",
        "final loss": "not in metrics.jsonl" if summary["final_loss"] is None else f"{summary['final_loss']:.4f}",
        "held-out loss": f"{summary['val_loss']:.4f}",
        "tokens/s": rate("tokens_per_second", ",.0f"),
        "MFU": f"{rate('mfu', '.1%')}; {rate('mfu_half_causal', '.1%')} with causal attention counted by half",
        "model FLOPs per step": f"{summary['model_flops_per_step']:.3e}; "
        f"{summary['model_flops_per_step_half_causal']:.3e} with causal attention counted by half",
        "recompute": _recompute(summary, rate("hfu", ".1%")),
        "peak bytes": f"{human(summary['compiled_peak_bytes'])} compiled, not measured",
        "files": summary["out"],
    }


def _recompute(summary: Mapping[str, Any], hfu: str) -> str:
    again = summary["recompute_flops_per_step"]
    if not again:
        return "no matmul is recomputed"
    share = again / summary["model_flops_per_step"]
    return f"{again:.3e} FLOPs per step, {share:.1%} of the model FLOPs, counted on the program; HFU {hfu}"
