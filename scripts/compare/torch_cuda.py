"""Tokens/s and peaks on a GPU, at the size of Llama 3.2 1B: PyTorch eager and compiled, beside JAX's own bench.

JAX runs in a process of its own, first, so that neither framework's allocator holds memory while the other is measured.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from models.config import get
from models.torch_twin import Run, Transformer
from policies.registry import get as policy
from policies.torch_contexts import stack_run
from scripts.compare.torch_side import calls

MODEL, BATCH, SEQ = "llama-1b", 4, 4096
POLICIES = ("none", "full", "dots_with_no_batch_dims_saveable", "save_only_matmuls")
STEPS, WARMUP = 5, 2
SHARE_OF_JAX = 0.5
"""Of the minutes, at most, that JAX's process gets."""
_BENCH = Path(__file__).resolve().parents[1] / "bench.py"


def check_gpu() -> None:
    """Raises ValueError where PyTorch sees no GPU."""
    if not torch.cuda.is_available():
        raise ValueError(
            f"device: expected an NVIDIA GPU for cuda, and torch {torch.__version__} sees none; --device cpu needs none"
        )


def rows(minutes: float) -> list[dict[str, Any]]:
    """One row a policy and framework; once the minutes are over no further case starts."""
    end = time.monotonic() + 60 * minutes
    return [*_jax(60 * minutes * SHARE_OF_JAX), *_pytorch(end)]


def _jax(seconds: float) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        command = [sys.executable, str(_BENCH), "--model", MODEL, "--policies", *POLICIES, "--batch", str(BATCH)]
        command += ["--seq", str(SEQ), "--attention", "cudnn", "--step", "gradient", "--steps", str(STEPS)]
        command += ["--target", "local", "--json", str(file)]
        own = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
        try:
            subprocess.run(command, env=own, timeout=seconds, check=False, stdout=subprocess.DEVNULL)
            status = "not run"
        except subprocess.TimeoutExpired:
            status = f"no time: {seconds:.0f} s were over"
        found = json.loads(file.read_text()) if file.exists() else []
    by_policy = {row["policy"]: row for row in found}
    for spec in POLICIES:
        row = by_policy.get(spec, {"status": status})
        speed = {key: row.get(key) for key in ("step_seconds", "tokens_per_second", "peak_bytes", "device_memory")}
        yield {"policy": spec, "pytorch": "JAX, on the GPU", "status": _status(row, speed), **speed}


def _pytorch(end: float) -> Iterator[dict[str, Any]]:
    config = replace(get(MODEL), compute_dtype="bfloat16", attention="blockwise", max_seq=SEQ)
    torch.manual_seed(0)
    model = Transformer(config).cuda()
    tokens = torch.randint(config.vocab_size, (BATCH, SEQ + 1), device="cuda")
    known = calls(replace(config, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp_hidden=128, vocab_size=64))
    for spec in POLICIES:
        plan: Any = policy(spec)
        run = stack_run(plan, config.num_layers, known)
        for line, compiled in (("PyTorch eager, on the GPU", False), ("torch.compile, on the GPU", True)):
            row = {"policy": spec, "pytorch": line}
            if time.monotonic() > end:
                yield {**row, "status": "no time left"}
                continue
            try:
                speed = _timed(model, tokens, run, compiled)
            except torch.OutOfMemoryError:
                speed = {"error": "out of memory"}
            yield {**row, "status": _status(speed, speed), **speed}
            torch._dynamo.reset()


def _timed(model: Transformer, tokens: torch.Tensor, run: Run, compiled: bool) -> dict[str, Any]:
    def forward(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return model.mean_loss(tokens, targets, run)

    loss = torch.compile(forward) if compiled else forward
    seconds = []
    for i in range(WARMUP + STEPS):
        if i == WARMUP:
            torch.cuda.reset_peak_memory_stats()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss(tokens[:, :-1], tokens[:, 1:]).backward()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[WARMUP:])
    return {
        "step_seconds": median,
        "tokens_per_second": BATCH * SEQ / median,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def _status(row: dict[str, Any], speed: dict[str, Any]) -> str:
    if not speed.get("tokens_per_second"):
        return str(row.get("error") or row.get("status"))
    return f"{speed['tokens_per_second']:,.0f} tokens/s, peak {speed['peak_bytes'] / 2**30:.1f} GiB"
