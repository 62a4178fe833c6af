"""What the layer-stack executor costs and saves beside ``lax.scan``: memory, FLOPs, time, gradients.

    python benchmarks/chain.py > benchmarks/chain.md

Memory is XLA's for a described H200, its own remat pass off, nothing run. Step times are of this machine's CPU: chain
and scan take turns, and the ratio is the median over the pairs. Takes about ten minutes on two cores.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX starts: the CUDA plugin may lie there unused

import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import jremat
import policies
from jremat.measure import compiled_memory, mesh
from jremat.measure.memory import program
from jremat.terminal.command_line import run
from jremat.transform.chain import stack
from jremat.transform.groups import gradient_step, group_sizes
from jremat.transform.revolve import binomial_steps
from jremat.transform.scan import scan_stack

MIB = 2**20
STACKS = {"chain": stack, "scan": scan_stack}
DOTS = "dots_with_no_batch_dims_saveable"
UNIFORM = ("full", DOTS, "save:attn_out,mlp_up", "none")
PAIRS = 41


def block(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A GPT block, materialised attention, no biases: params in any dtype, computed in x's. x: [b, s, h]."""
    w = {name: leaf.astype(x.dtype) for name, leaf in params.items()}
    b, s, h = x.shape
    heads = max(h // 128, 1)
    x = jremat.tag(x, "block_in")

    def norm(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        return (centred * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)).astype(x.dtype)

    y = norm(x)
    q, k, v = ((y @ w[n]).reshape(b, s, heads, h // heads) for n in "qkv")  # [b, s, heads, d]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (h // heads) ** 0.5  # [b, heads, s, s]
    probs = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(x.dtype)
    mixed = jremat.tag(jnp.einsum("bhqk,bkhd->bqhd", probs, v), "attn_out")
    x = x + mixed.reshape(b, s, h) @ w["o"]
    return x + jax.nn.gelu(jremat.tag(norm(x) @ w["up"], "mlp_up")) @ w["down"]


def shapes(num_layers: int, b: int, s: int, h: int, dtype: Any, params_dtype: Any = None) -> tuple[Any, Any]:
    """The stacked parameters and the input, as shapes."""

    def leaf(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_layers, *dims), params_dtype or dtype)

    params = {n: leaf(h, h) for n in "qkvo"} | {"up": leaf(h, 4 * h), "down": leaf(4 * h, h)}
    return params, jax.ShapeDtypeStruct((b, s, h), dtype)


def step(kind: str, spec: str, num_layers: int) -> Callable[..., Any]:
    """The gradient step of a stack."""
    return gradient_step(STACKS[kind](block, policies.get(spec), num_layers=num_layers))


BIG = 16, 2, 1024, 2048, jnp.bfloat16
"""16 layers, b=2, s=1024, h=2048: 1536 MiB of bfloat16 parameters."""


def temp(kind: str, spec: str, args: tuple[Any, Any], num_layers: int = 16, target: str = "h200") -> Any:
    return compiled_memory(step(kind, spec, num_layers), *args, target=target, num_buffers=0)


def table(title: str, head: tuple[str, ...], rows: Iterator[tuple[Any, ...]]) -> None:
    print(f"\n## {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(str(cell) for cell in row)} |", flush=True)


def stacks_memory() -> Iterator[tuple[Any, ...]]:
    args = shapes(*BIG)
    found = {}
    for kind, spec in [("scan", "full"), ("chain", "full"), ("scan", DOTS), ("chain", DOTS)]:
        found[kind, spec] = temp(kind, spec, args).temp_bytes
    full, mean = found["scan", "full"], (found["scan", "full"] + found["scan", DOTS]) / 2
    mixed = f"mix:8*full,8*{DOTS}"
    for kind, spec, reference, name, must in [
        ("chain", "full", full, "scan full", "≤ 1.01"),
        ("chain", DOTS, found["scan", DOTS], f"scan {DOTS}", "≤ 1.01"),
        ("chain", "every_k:4,full", full, "scan full", "≤ 0.90"),
        ("scan", "every_k:4,full", full, "scan full", ""),
        ("chain", mixed, mean, "mean of the two", "0.98 to 1.02"),
        ("scan", mixed, mean, "mean of the two", ""),
        ("chain", "revolve:4", full, "scan full", ""),
        ("chain", "alternate:2", full, "scan full", ""),
        ("chain", "every_k:4", full, "scan full", ""),
    ]:
        bytes_ = found.get((kind, spec)) or temp(kind, spec, args).temp_bytes
        yield f"{kind} `{spec}`", f"{bytes_ / MIB:.1f}", name, f"{bytes_ / reference:.3f}", must


def master_weights() -> Iterator[tuple[Any, ...]]:
    """Float32 parameters, bfloat16 compute: what is cast from a parameter is read again."""
    args = shapes(*BIG, jnp.float32)
    for spec in ("full", "none"):
        pair = [temp(kind, spec, args).temp_bytes for kind in ("scan", "chain")]
        yield f"`{spec}`", *(f"{b / MIB:.1f}" for b in pair), f"{round((pair[0] - pair[1]) / MIB, 1) + 0.0:.1f}"


def recomputed() -> Iterator[tuple[Any, ...]]:
    num_layers = 16
    args = shapes(*BIG)
    forward = jremat.flops(lambda p, x: stack(block, policies.get("none"), num_layers=num_layers)(p, x), *args).total
    for spec in (*UNIFORM, "every_k:4", "every_k:4,full", "every_k:5", "alternate:2", f"mix:8*full,8*{DOTS}"):
        counts = [jremat.flops(step(kind, spec, num_layers), *args).recompute / forward for kind in ("scan", "chain")]
        yield f"`{spec}`", *(f"{c:.4f}" for c in counts)
    for slots in (1, 2, 4, 8):
        count = jremat.flops(step("chain", f"revolve:{slots}", num_layers), *args).recompute / forward
        steps = binomial_steps(num_layers, slots) - (num_layers - 1)  # beyond the first forward
        yield f"`revolve:{slots}`", f"no scan; {steps} steps of {num_layers} layers", f"{count:.4f}"


def groups_and_blocks() -> Iterator[tuple[Any, ...]]:
    args = shapes(*BIG)
    for spec in (*(f"every_k:{k},full" for k in group_sizes(16) if k > 1), *(f"block:{n}" for n in (16, 12, 8, 4, 0))):
        if spec == "block:0":
            spec = "none"
        m = temp("chain", spec, args)
        yield f"`{spec}`", f"{m.temp_bytes / MIB:.1f}", f"{m.peak_bytes / MIB:.1f}"


def compile_times() -> Iterator[tuple[Any, ...]]:
    for spec in ("full", "every_k:4", "every_k:5,full", "revolve:4", "mix:6*full,rest*none"):
        seconds = []
        for num_layers in (12, 96):
            args = shapes(num_layers, 2, 128, 256, jnp.bfloat16)
            tries = []
            for _ in range(3):
                start = time.process_time()  # of all threads: a busy machine doesn't lengthen it
                jax.jit(step("chain", spec, num_layers)).lower(*args).compile()
                tries.append(time.process_time() - start)
            seconds.append(min(tries))
        yield f"`{spec}`", *(f"{t:.2f}" for t in seconds), f"{seconds[1] / seconds[0]:.2f}", "≤ 1.3"


def arrays(num_layers: int, b: int, s: int, h: int) -> tuple[Any, Any]:
    leaves, tree = jax.tree.flatten(shapes(num_layers, b, s, h, jnp.float32))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(tree, [jax.random.normal(k, x.shape) * h**-0.5 for k, x in zip(keys, leaves)])


def step_times() -> Iterator[tuple[Any, ...]]:
    num_layers = 12
    args = arrays(num_layers, 2, 128, 256)
    for spec in UNIFORM:
        steps = [jax.jit(step(kind, spec, num_layers)).lower(*args).compile() for kind in ("scan", "chain")]
        wall: list[list[float]] = [[], []]
        busy: list[list[float]] = [[], []]
        for k in range(PAIRS + 2):  # the first two warm the caches
            for which in (0, 1) if k % 2 else (1, 0):
                start, worked = time.perf_counter(), time.process_time()
                jax.block_until_ready(steps[which](*args))
                wall[which].append(time.perf_counter() - start)
                busy[which].append(time.process_time() - worked)
        medians = [f"{1000 * statistics.median(times[2:]):.1f}" for times in wall]
        ratios = [statistics.median(c / s for s, c in zip(*(t[2:] for t in times))) for times in (wall, busy)]
        yield f"`{spec}`", *medians, *(f"{ratio:.3f}" for ratio in ratios), "≤ 1.05"


def gradients() -> Iterator[tuple[Any, ...]]:
    num_layers = 6
    args = arrays(num_layers, 2, 32, 64)
    _, expected = jax.jit(step("scan", "none", num_layers))(*args)
    for spec in (*UNIFORM, "every_k:4", "every_k:4,full", "alternate:2", "block:2", "revolve:2", "mix:2*full,4*none"):
        _, found = jax.jit(step("chain", spec, num_layers))(*args)
        errors = [float(jnp.abs(f - e).max() / jnp.abs(e).max()) for f, e in zip(found, expected)]
        yield f"`{spec}`", f"{max(errors):.1e}", "≤ 1e-6"


def sharded() -> Iterator[tuple[Any, ...]]:
    """8-way FSDP: parameters cut in eight, the batch too."""
    devices = mesh("h200x8", data=8)
    params, x = shapes(16, 16, 1024, 2048, jnp.bfloat16)

    def cut(shape: Any, *spec: Any) -> Any:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(devices, PartitionSpec(*spec)))

    args = {name: cut(leaf, None, "data") for name, leaf in params.items()}, cut(x, "data")
    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(args)]

    def constrained(run: Callable[..., Any]) -> Callable[..., Any]:
        def sharded_step(*args: Any) -> Any:  # a training step's gradients lie as its parameters do
            value, gradients = run(*args)
            return value, [jax.lax.with_sharding_constraint(g, s) for g, s in zip(gradients, specs, strict=True)]

        return sharded_step

    for spec in ("full", DOTS, "every_k:4,full", f"mix:8*full,8*{DOTS}"):
        for kind in ("scan", "chain"):
            if kind == "scan" and ":" in spec:
                continue
            run = constrained(step(kind, spec, 16))
            with jax.sharding.use_abstract_mesh(devices.abstract_mesh):
                found, compiled = program(run, *args, target="h200x8", num_buffers=0)
            counts = executed(compiled.as_text())
            yield f"{kind} `{spec}`", f"{found.temp_bytes / MIB:.1f}", counts["all-gather"], counts["reduce"]


def executed(hlo: str) -> dict[str, int]:
    """How often collectives run in a compiled program, loops multiplied by their trip counts."""
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in hlo.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif name:
            bodies[name].append(line)
    kinds = {"all-gather": r" all-gather(-start)?\(", "reduce": r" (all-reduce|reduce-scatter)(-start)?\("}

    def count(computation: str, kind: str) -> int:
        total = 0
        for line in bodies.get(computation, ()):
            total += bool(re.search(kinds[kind], line))
            times = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            for called in re.findall(r"(?:body|calls|to_apply)=%?([\w.\-]+)", line):
                total += count(called, kind) * (int(times[1]) if times and "body=" in line else 1)
        return total

    return {kind: count(entry, kind) for kind in kinds}


def offloaded() -> Iterator[tuple[Any, ...]]:
    args = shapes(*BIG)
    for spec in ("full", "offload_inputs", "every_k:4,offload_inputs", "offload_dots_with_no_batch_dims"):
        m = temp("chain", spec, args)
        yield f"`{spec}`", f"{m.temp_bytes / MIB:.1f}", f"{m.host_bytes / MIB:.1f}"


def main() -> None:
    print("# The layer-stack executor beside `lax.scan`\n")
    print("    python benchmarks/chain.py > benchmarks/chain.md\n")
    print(
        f"jax {jax.__version__}. Memory: 16 layers, b=2, s=1024, h=2048, bfloat16, materialised attention, "
        "compiled for h200, not run, XLA's own remat pass off; MiB of temporaries."
    )
    of = ("stack", "temp MiB", "beside", "ratio", "must be")
    table("Memory", of, stacks_memory())
    table("Float32 parameters, bfloat16 compute", ("policy", "scan MiB", "chain MiB", "saved MiB"), master_weights())
    table("Forward matmul FLOPs rerun, in forwards", ("policy", "scan", "chain"), recomputed())
    table("Group size and number of remat layers", ("plan", "temp MiB", "peak MiB"), groups_and_blocks())
    head = ("plan", "12 layers", "96 layers", "ratio", "must be")
    table("Trace and compile on CPU, processor seconds, best of three", head, compile_times())
    head = ("policy", "scan ms", "chain ms", "paired ratio, time", "paired ratio, processor time", "must be")
    table(f"Step on CPU, {PAIRS} pairs, 12 layers, b=2, s=128, h=256, f32", head, step_times())
    table("Gradients beside a scan that keeps all, f32", ("plan", "largest error, relative", "must be"), gradients())
    head = ("stack", "temp MiB per device", "all-gathers run, merged ones as one", "reductions run")
    table("8-way FSDP on h200x8, global batch 16", head, sharded())
    table("Offload", ("plan", "temp MiB", "host MiB"), offloaded())


if __name__ == "__main__":
    run(lambda: main() or 0, "chain")
