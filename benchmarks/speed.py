"""How long the answers take: of the engine beside JAX's own trace, of the lint, and of an estimate's layouts.

    python benchmarks/speed.py [engine] [lint] [layouts]

engine: traces and residuals of scanned layers beside one trace of their gradient, in turn and on fresh functions, so
that no trace is found again; depth costs nothing. lint: 32 layers of Llama's 1B shapes, batch 1, 2048 tokens, traced
and never compiled, in seconds of one core. layouts: the peak of one step, traced once, under every way of spreading it
over up to 4,096 devices; a layout is a substitution in the polynomials of the traced step's buffers.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jremat.terminal.command_line import run
from jremat.terminal.start_jax import start_jax

start_jax()

import jax
import jax.numpy as jnp

import jremat
import policies
from jremat.estimator.parallel import Parallel
from jremat.estimator.training_step import TrainingStep
from jremat.estimator.transformer import estimate, runs
from models.config import get
from models.remat import remat
from models.transformer import Block, Transformer, init_params, mean_loss

ROUNDS = 7


def engine() -> None:
    """Median seconds of one trace of the gradient, and of the engine's trace and residuals."""
    print(f"jax {jax.__version__}; {ROUNDS} rounds; tiny-llama, scanned")
    print("| layers | make_jaxpr of the gradient, ms | trace + residuals, ms | ratio |\n|---|---|---|---|")
    tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    for num_layers in (6, 24, 96):
        config = replace(get("tiny-llama"), num_layers=num_layers)
        args = jax.eval_shape(lambda config=config: init_params(config, jax.random.key(0))), tokens, tokens
        seconds: tuple[list[float], list[float]] = [], []
        for _ in range(ROUNDS):
            for took, work in zip(seconds, (trace_gradient, trace_and_count)):
                took.append(clocked(work, loss_of(config), args))
        gradient, ours = map(statistics.median, seconds)
        print(f"| {num_layers} | {gradient * 1e3:.0f} | {ours * 1e3:.0f} | {ours / gradient:.2f} |")


def loss_of(config: Any) -> Callable[..., Any]:
    """A fresh loss."""
    model = Transformer(config)
    return lambda params, tokens, targets: mean_loss(model, params, tokens, targets)


def trace_gradient(f: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """JAX's own."""
    jax.make_jaxpr(jax.value_and_grad(f))(*args)


def trace_and_count(f: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Ours."""
    jremat.trace(f, *args)
    jremat.residuals(f, *args)


def clocked(work: Callable[..., None], *subject: Any) -> float:
    """Seconds of the work on its subject."""
    start = time.perf_counter()
    work(*subject)
    return time.perf_counter() - start


def lint() -> None:
    """A stack under a scan, under the chain, in groups, and unrolled with a remat a layer."""
    config = replace(get("llama-1b"), num_layers=32)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    block = Block(config)
    layer = jremat.checkpoint(lambda params, x: block.apply({"params": params}, x), policies.get("save_only_matmuls"))

    def unrolled(blocks: Any, x: jax.Array) -> jax.Array:
        for i in range(config.num_layers):
            x = layer(jax.tree.map(lambda leaf, i=i: leaf[i], blocks), x)
        return x.astype(jnp.float32).sum()

    def report(name: str, f: Any, *args: Any) -> None:
        began = time.process_time()
        rules = ", ".join(finding.rule for finding in jremat.lint(f, *args)) or "nothing found"
        print(f"{name:<28} {time.process_time() - began:6.2f} s  {rules}", flush=True)

    for spec, stack in (("save_only_matmuls", "scan"), ("save_only_matmuls", "chain"), ("every_k:4", "chain")):
        model = remat(policies.get(spec), config, stack).model(config)
        loss = lambda params, tokens, model=model: mean_loss(model, params, tokens, tokens)
        report(f"{spec}, {stack}", loss, params, jax.ShapeDtypeStruct((1, 2048), jnp.int32))
    x = jax.ShapeDtypeStruct((1, 2048, config.hidden), config.compute_dtype)
    report("save_only_matmuls, unrolled", unrolled, params["blocks"], x)


def every_layout() -> Iterator[Parallel]:
    """Data parallelism with ZeRO, tensor, sequence and context parallelism, each a power of two."""
    powers = [2**k for k in range(13)]
    for data, zero, tensor, sequence, context in itertools.product(powers, range(4), powers[:4], (0, 1), powers[:4]):
        if data * tensor * context <= 4096 and not (zero and data == 1) and not (sequence and tensor == 1):
            replicas = {"fsdp": data} if zero == 3 else {"data": data, "zero": zero}
            yield Parallel(**replicas, tensor=tensor, sequence=bool(sequence), context=context)


def layouts() -> None:
    """Trace, then count layouts."""
    config = replace(get("llama3-8b"), compute_dtype="bfloat16", attention="blockwise")
    policy, shapes, start = policies.get("save_only_matmuls"), {"batch": 4096, "seq": 4096}, time.perf_counter()
    (base,) = runs(TrainingStep(config=config, policy=policy, **shapes, parallel=Parallel(data=64)))
    base.ledger()
    print(f"traced in {time.perf_counter() - start:.2f} s")
    every, start = list(every_layout()), time.perf_counter()
    peaks = {parallel: base.peak_bytes(parallel) for parallel in every}
    seconds = time.perf_counter() - start
    print(f"{len(every):,} layouts in {seconds:.2f} s: {len(every) / seconds:,.0f} a second")
    least = min(every, key=peaks.__getitem__)
    own = estimate(config, policy, **shapes, parallel=least).peak_bytes / 2**30
    print(f"least: {least}, {peaks[least] / 2**30:.2f} GiB; in its own order of kernels {own:.2f}")


def main() -> int:
    """Run those that are named, or all."""
    every = {"engine": engine, "lint": lint, "layouts": layouts}
    for name in sys.argv[1:] or every:
        if name not in every:
            raise SystemExit(f"speed: expected {', '.join(every)}, got {name!r}")
        every[name]()
    return 0


if __name__ == "__main__":
    run(main, "speed")
