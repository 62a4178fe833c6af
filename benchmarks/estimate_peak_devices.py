"""The ledger of one device of eight against the step that XLA compiles for eight H200s, line by line.

Data parallel, ZeRO-1, ZeRO-2 and ZeRO-3 (FSDP), tensor parallel with and without its sequence: the arrays are cut by
named shardings and XLA puts the collectives in. The lines of the compiled program are read from the buffers that are
alive at its peak.

    python benchmarks/estimate_peak_devices.py             # the table of what was measured
    python benchmarks/estimate_peak_devices.py --measure   # first compile what is missing

Needs no GPU, but the compiler for one (the ``deviceless`` extra). XLA's own remat pass is off. Numbers are compiled,
not run.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import policies
from benchmarks.estimate_peak import Step
from jremat.estimator.ledger import Ledger
from jremat.estimator.parallel import Parallel
from jremat.estimator.transformer import estimate
from jremat.policy.files import write_whole
from jremat.terminal.command_line import run

FILE = Path(__file__).with_name("estimate_peak_devices.json")
LINES = ("weights, optimizer", "gradients of layers", "kept", "else")


@dataclasses.dataclass(frozen=True)
class Case(Step):
    """A step on several devices, how it is spread over them.

    ``held_out`` ones were compiled when the rules of ``jremat.estimator.collectives`` stood.
    """

    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    held_out: bool = False


def cases() -> Iterator[Case]:
    """Every way of spreading, under a policy that keeps little and one that keeps more; then those held out."""
    for name in ("data parallel", "ZeRO-1", "ZeRO-2", "FSDP", "tensor", "tensor, sequence", "FSDP 4, tensor 2"):
        for spec in ("full", "save_only_matmuls"):
            yield Case(name, "llama-1b", _LLAMA, spec, 16, 2048, parallel=_SPREAD[name])
    for name, label, size, changes, spec, batch, seq, chunk, held_out in _MORE:
        yield Case(f"{name}, {label}", size, changes, spec, batch, seq, chunk, _SPREAD[name], held_out)


_SPREAD = {
    "data parallel": Parallel(data=8),
    "ZeRO-1": Parallel(data=8, zero=1),
    "ZeRO-2": Parallel(data=8, zero=2),
    "FSDP": Parallel(fsdp=8),
    "tensor": Parallel(tensor=8),
    "tensor, sequence": Parallel(tensor=8, sequence=True),
    "FSDP 4, tensor 2": Parallel(fsdp=4, tensor=2),
    "data 2, tensor 4": Parallel(data=2, tensor=4),
    "ZeRO-1 4, sequence 2": Parallel(data=4, zero=1, tensor=2, sequence=True),
}
_BF16_FUSED = {"compute_dtype": "bfloat16", "attention": "blockwise", "dropout": 0.0}
_LLAMA = _BF16_FUSED | {"num_layers": 8, "vocab_size": 32000, "max_seq": 2048}
_UNTIED = _LLAMA | {"tied_embeddings": False}
_GPT = _BF16_FUSED | {"num_layers": 8}
_PADDED = _GPT | {"vocab_size": 50304}  # so that eight devices can split it, as Megatron-LM pads it
_ODD = _LLAMA | {"num_layers": 6, "hidden": 1536, "heads": 12, "kv_heads": 4, "head_dim": 128, "mlp_hidden": 4096}
_MORE: tuple[tuple[str, str, str, dict[str, Any], str, int, int, int | None, bool], ...] = (
    ("FSDP", "gpt2-medium", "gpt2-medium", _GPT, "none", 32, 1024, None, False),
    ("FSDP", "untied", "llama-1b", _UNTIED, "full", 16, 2048, None, False),
    ("FSDP", "plan", "llama-1b", _LLAMA, "every_k:4", 16, 2048, None, False),
    ("FSDP", "chunks", "llama-1b", _LLAMA, "full", 16, 2048, 512, False),
    ("tensor", "gpt2-medium", "gpt2-medium", _PADDED, "full", 32, 1024, None, False),
    ("tensor, sequence", "gpt2-medium", "gpt2-medium", _PADDED, "full", 32, 1024, None, False),
    ("tensor, sequence", "gpt2-medium", "gpt2-medium", _PADDED, "save_only_matmuls", 32, 1024, None, False),
    ("FSDP", "odd", "llama-1b", _ODD, "maxtext:minimal", 24, 1024, None, True),
    ("FSDP", "odd untied", "llama-1b", _ODD | {"tied_embeddings": False}, "none", 24, 1024, None, True),
    ("FSDP", "gpt2 f32", "gpt2", {"dropout": 0.0, "attention": "blockwise"}, "full", 32, 1024, None, True),
    ("FSDP", "gpt2 dot", "gpt2", {"dropout": 0.0, "compute_dtype": "bfloat16"}, "full", 32, 1024, None, True),
    ("ZeRO-1", "gpt2-medium", "gpt2-medium", _GPT, "save_only_matmuls", 32, 1024, None, True),
    ("ZeRO-2", "odd", "llama-1b", _ODD, "none", 24, 1024, None, True),
    ("data 2, tensor 4", "odd", "llama-1b", _ODD, "full", 16, 2048, None, True),
    ("ZeRO-1 4, sequence 2", "gpt2-medium", "gpt2-medium", _PADDED, "full", 32, 1024, None, True),
)  # fmt: skip


def step_of(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The train step of a case, jitted, its state donated, and the shapes of its arguments with their shardings."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding

    from models.remat import remat
    from models.sharding import Sharding
    from models.transformer import init_params, mean_loss

    config, optimizer, sharding = case.config, optax.adamw(1e-3), Sharding(case.parallel)
    model = remat(policies.get(case.spec), config).model(config, sharding)
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.eval_shape(lambda: jax.random.key(0)))
    inner = jax.eval_shape(optimizer.init, shapes)
    placed = sharding.tree(shapes), sharding.tree(inner, "optimizer state")
    gradients = sharding.tree(shapes, "gradients")

    def step(params, state, tokens, targets):
        loss, grads = jax.value_and_grad(lambda q: mean_loss(model, q, tokens, targets, None, case.chunk))(params)
        updates, state = optimizer.update(jax.lax.with_sharding_constraint(grads, gradients), state, params)
        return *jax.lax.with_sharding_constraint((optax.apply_updates(params, updates), state), placed), loss

    laid = lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
    rows = NamedSharding(sharding.mesh, sharding.batch)
    tokens = laid(jax.ShapeDtypeStruct((case.batch, case.seq), jnp.int32), rows)
    return jax.jit(step, donate_argnums=(0, 1)), (*jax.tree.map(laid, (shapes, inner), placed), tokens, tokens)


def measure(case: Case) -> dict[str, Any]:
    """Compile one case: its peak on one device, and the lines of it."""
    import jax

    from jremat.measure.memory import compiled_memory

    step, args = step_of(case)
    found = compiled_memory(step, *args, target=f"h200x{case.parallel.devices}", num_buffers=200)
    lines = dict.fromkeys(LINES, 0)
    weights = {leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(args[0])}
    sizes = {math.prod(shape) for shape in weights if shape[0] == case.config.num_layers}
    for buffer in found.buffers:
        if buffer.kind != "temp" or buffer.shape[:1] != (case.config.num_layers,) or "params[" in buffer.what:
            continue
        gradient = buffer.dtype == case.config.param_dtype and math.prod(buffer.shape) in sizes
        lines["gradients of layers" if gradient else "kept"] += buffer.nbytes
    lines["weights, optimizer"] = found.argument_bytes
    lines["else"] = found.peak_bytes - sum(lines[name] for name in LINES[:3])
    return {"peak_bytes": found.peak_bytes, "lines": lines}


def ledger_of(case: Case) -> Ledger:
    """The estimate's."""
    shapes = {"batch": case.batch, "seq": case.seq, "chunk": case.chunk, "parallel": case.parallel}
    return estimate(case.config, policies.get(case.spec), **shapes)


def lines_of(ledger: Ledger) -> dict[str, int]:
    """The ledger's lines at its peak, in the same groups."""
    group = lambda line: (
        "gradients of layers" if line.name == "gradients" else
        "weights, optimizer" if line.name in ("weights", "optimizer moments", "master weights") else
        "kept" if line.part == "kept" else "else"
    )  # fmt: skip
    return {name: sum(line.device_bytes for line in ledger.lines if group(line) == name) for name in LINES}


def main() -> None:
    """Measure what is asked for, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="compile what is not yet measured")
    flags = parser.parse_args()
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    if flags.measure:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        for case in [c for c in cases() if c.key not in found]:
            found[case.key] = measure(case)
            write_whole(FILE, json.dumps(found, indent=1) + "\n")
            print(f"measured {case.key}", file=sys.stderr, flush=True)
    print("MiB of one device, the ledger's and the compiled step's")
    print(f"{'':44} {'peak':>22} " + " ".join(f"{name:>19}" for name in LINES))
    for case in cases():
        if case.key in found:
            print(row(case, found[case.key]))


def row(case: Case, compiled: Mapping[str, Any]) -> str:
    """One case as a line of the table."""
    ledger = ledger_of(case)
    lines, mib = lines_of(ledger), 2**20
    pairs = [f"{lines[name] / mib:9,.0f} {compiled['lines'][name] / mib:9,.0f}" for name in LINES]
    peak, mark = compiled["peak_bytes"], "  held out" if case.held_out else ""
    error = ledger.peak_bytes / peak - 1
    return f"{case.key:44} {ledger.peak_bytes / mib:7,.0f} {peak / mib:7,.0f} {error:+6.1%} " + " ".join(pairs) + mark


if __name__ == "__main__":
    run(lambda: main() or 0, "estimate_peak_devices")
