"""What is found out about one case: compiled for its target, and run where the target is here."""

import dataclasses
import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

import jax

from jremat.measure import (
    CompileError,
    Memory,
    Target,
    TargetError,
    collectives_of,
    device_memory,
    devices,
    peak_of,
    program,
    target,
    throughput,
    time_step,
)
from jremat.measure.compile import explained, place
from scripts.benchmark.build import Built, build, flops_of, initial
from scripts.benchmark.config import Case
from scripts.benchmark.search import largest_that_fits


def row(case: Case) -> dict[str, Any]:
    """The figures of a case, and ``status``: ok, does_not_fit, or out_of_memory where it ran out of it while it ran.

    Raises:
        ValueError: the case can't be built.
        CompileError, TargetError: nothing came of its compile.
    """
    kind = target(case.target)
    found: dict[str, Any] = _described(case) if case.described else {}
    if case.largest_batch:
        limit = _limit(case, kind)
        largest = largest_that_fits(
            lambda batch: _compiled(dataclasses.replace(case, batch=batch), kind)[0].peak_bytes,
            int(limit * (1 - case.margin)),
            case.batch,
            kind.num_devices,
        )
        found |= {"largest_batch_found": largest, "limit_bytes": limit}
        case = dataclasses.replace(case, batch=largest or kind.num_devices)
    memory, built, run = _compiled(case, kind)
    found |= _figures(memory) | _facts(built, kind) | flops_of(built, case)
    if kind.num_devices > 1:
        found["collectives"] = [dataclasses.asdict(row) for row in collectives_of(run)]
    room = case.memory_bytes or memory.hbm_bytes
    found["status"] = "ok" if room is None or memory.peak_bytes <= room else "does_not_fit"
    if not kind.described and found["status"] == "ok" and not case.compile_only:
        try:
            found |= timed(case, built, run, kind, found)
        except Exception as error:  # XLA's own types differ by version
            wrong = explained(error, kind)
            if wrong.reason != "out_of_memory":
                raise
            found |= {"status": "out_of_memory", "error": str(wrong)}
    return found


def timed(case: Case, built: Built, run: jax.stages.Compiled, kind: Target, found: dict[str, Any]) -> dict[str, Any]:
    """Time, throughput and the device's own memory figures of a compiled case on the devices that are here."""
    here = devices(kind)
    cut = jax.tree.map(lambda leaf: place(leaf, here).sharding, (built.state, built.tokens))
    args = jax.device_put(initial(built), cut)
    advance = (lambda result, args: (result[0], args[1])) if built.optimizer else (lambda result, args: args)
    start = time.perf_counter()
    timing = time_step(run, *args, steps=case.steps, warmup=case.warmup, advance=advance)
    wall_seconds = time.perf_counter() - start
    speed = throughput(
        timing,
        tokens=case.batch * (built.tokens.shape[1] - 1),
        model_flops=found["model_flops"],
        model_flops_half=found["model_flops_half"],
        total_flops=found["total_flops"],
        peak=peak_of(here[0], built.config.compute_dtype),
        num_devices=kind.num_devices,
    )
    held = device_memory(here[0])
    if case.profile:
        del args
        args = jax.device_put(initial(built), cut)
        with jax.profiler.trace(case.profile):
            jax.block_until_ready(run(*args))
    return {
        **{name: value for name, value in dataclasses.asdict(speed).items() if name != "peak"},
        "peak_flops_per_second": speed.peak.flops_per_second,
        "peak_source": speed.peak.source,
        "first_step_seconds": timing.first_seconds,
        "seconds_each": list(timing.seconds),
        "wall_seconds": wall_seconds,
        "device_memory": dataclasses.asdict(held) if held else None,
    }


def _described(case: Case) -> dict[str, Any]:
    """The peak that a compile without the device gives, to stand beside the one with it."""
    try:
        memory = _compiled(dataclasses.replace(case, target=case.described), target(case.described))[0]
    except (CompileError, TargetError) as error:
        return {"described_error": str(error)}
    return {"described_target": memory.target, "described_peak_bytes": memory.peak_bytes}


def _compiled(case: Case, kind: Target) -> tuple[Memory, Built, jax.stages.Compiled]:
    built = build(case)
    memory, run = program(built.step, built.state, built.tokens, target=kind, xla_remat=case.xla_remat, num_buffers=8)
    return memory, built, run


def _limit(case: Case, kind: Target) -> int:
    if case.memory_bytes:
        return case.memory_bytes
    limit = kind.hbm_bytes if kind.described else (devices(kind)[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        raise ValueError(f"hbm: {kind.name} has no memory size to search in; give one, as --hbm 8GiB")
    return limit


def _figures(memory: Memory) -> dict[str, Any]:
    figures = memory.to_dict()
    del figures["target"]
    return figures


def _facts(built: Built, kind: Target) -> dict[str, Any]:
    device = devices(kind)[0]
    versions = {"python": platform.python_version()}
    for name in ("flax", "optax", "numpy"):
        versions[name] = importlib.metadata.version(name)
    return {
        "resolved_policy": built.policy,
        "resolved_stack": built.stack,
        "batch": built.tokens.shape[0],
        "seq": built.tokens.shape[1] - 1,
        "config": built.config.to_dict(),
        "parameters": built.config.num_params(),
        "hardware": {
            "device_kind": device.device_kind,
            "platform": device.platform,
            "host": f"{platform.machine()}, {os.cpu_count()} cores, {_processor()}",
        },
        "software": versions,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
