"""Two predictions of a step's peak against the one that XLA plans for an H200: train steps, AdamW, donated state.

``traced`` reads the program of Flax's model (``jremat.predicted_memory``), ``estimate`` that of the config, traced with
letters for its sizes (``jremat.estimate``);
beside them stand the formulas of other tools.

    python benchmarks/estimate_peak.py                 # the table, of the JAX that the rules were calibrated on
    python benchmarks/estimate_peak.py --jax 0.12.0.1  # of another one that was measured
    python benchmarks/estimate_peak.py --measure 10    # first compile up to ten cases more, with the JAX that is here

Needs no GPU, but the compiler for one (the ``deviceless`` extra). XLA's own remat pass is off. Numbers are compiled,
not run; they are those of the JAX that the results' file is named after.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import policies
from jremat.estimator.config import TransformerConfig
from jremat.estimator.other_calculators import FORMULAS
from jremat.estimator.transformer import estimate
from jremat.policy import Policy
from jremat.policy.files import write_whole
from jremat.terminal.command_line import run
from models.config import get

CALIBRATED = "0.10.2"
BF16 = {"compute_dtype": "bfloat16"}
GPT = {"dropout": 0.0, **BF16}
FUSED = {"attention": "blockwise"}


@dataclasses.dataclass(frozen=True)
class Step:
    """A train step: a size with changes, a policy, and shapes."""

    label: str
    size: str
    changes: dict[str, Any]
    spec: str
    batch: int
    seq: int
    chunk: int | None = None

    @property
    def key(self) -> str:
        """What the results file calls it."""
        return f"{self.label} {self.spec}"

    @property
    def config(self) -> TransformerConfig:
        """The architecture."""
        return dataclasses.replace(get(self.size), **self.changes)


@dataclasses.dataclass(frozen=True)
class Case(Step):
    """A step on one device."""

    @property
    def held_out(self) -> bool:
        """Whether the rules of the traced peak were made without a look at it: every third case, by its name's hash,
        but for one that showed where random bits are made."""
        return zlib.crc32(self.key.encode()) % 3 == 0 and self.key != "gpt2 dropout full"


def cases() -> Iterator[Case]:
    """Sixty steps and more."""
    for label, size, changes, batch, seq, chunk, specs in _TABLE:
        for spec in specs.split():
            yield Case(label, size, changes, spec, batch, seq, chunk)


_ODD = {"hidden": 1536, "heads": 12, "kv_heads": 4, "head_dim": 128, "mlp_hidden": 6144, "max_seq": 3072}
_XL = {"num_layers": 48, "hidden": 1600, "heads": 25, "kv_heads": 25, "mlp_hidden": 6400}
_TABLE: tuple[tuple[str, str, dict[str, Any], int, int, int | None, str], ...] = (
    ("gpt2", "gpt2", GPT, 8, 1024, None, "none full dots_saveable save_only_matmuls selective"),
    ("gpt2 fused", "gpt2", GPT | FUSED, 8, 1024, None, "none full dots_with_no_batch_dims_saveable every_k:4"),
    ("llama 8 layers", "llama-1b", BF16 | FUSED | {"num_layers": 8, "max_seq": 4096}, 2, 4096, None,
     "none full save_only_matmuls"),
    ("llama 8 layers, chunks", "llama-1b", BF16 | FUSED | {"num_layers": 8, "max_seq": 4096}, 2, 4096, 512,
     "full save_only_matmuls"),
    ("odd", "gpt2", GPT | _ODD | {"num_layers": 8}, 3, 3072, None, "full dots_saveable"),
    ("gpt2 f32", "gpt2", {"dropout": 0.0}, 8, 1024, None, "none full"),
    ("gpt2 dropout", "gpt2", BF16, 8, 1024, None, "full none"),
    ("gpt2, 512 tokens", "gpt2", GPT | {"vocab_size": 512}, 8, 1024, None,
     "full none alternate:2 mix:6*full,6*none revolve:4"),
    ("gpt2-xl fused", "gpt2", GPT | FUSED | _XL, 2, 1024, None, "full save_only_matmuls"),
    ("gpt2 2 layers fused", "gpt2", GPT | FUSED | {"num_layers": 2}, 16, 512, None, "none"),
    ("odd fused", "gpt2", GPT | FUSED | _ODD | {"num_layers": 8}, 3, 3072, None,
     "none full save_only_matmuls maxtext:minimal every_k:3"),
    ("odd llama", "llama-1b", BF16 | {"num_layers": 6, "hidden": 1536, "heads": 12, "kv_heads": 4,
     "head_dim": 128, "mlp_hidden": 4096, "vocab_size": 32000}, 4, 2048, None, "none full selective save_only_matmuls"),
    ("llama 16 layers", "llama-1b", BF16 | FUSED, 4, 2048, None, "full torchtitan_selective_op maxtext:minimal"),
    ("llama 16 layers, chunks", "llama-1b", BF16 | FUSED, 8, 2048, 256, "full save:attn_out,mlp_up but:mlp_act"),
    ("llama untied", "llama-1b", BF16 | FUSED | {"num_layers": 4, "tied_embeddings": False}, 4, 2048, None,
     "none full"),
    ("gpt2-medium", "gpt2-medium", GPT, 4, 1024, None,
     "full megatron:layernorm,mlp save_only_matmuls alternate:2"),
    ("gpt2-medium fused dropout", "gpt2-medium", BF16 | FUSED, 4, 1024, None, "none full every_k:5 block:12"),
    ("gpt2-large fused f32", "gpt2-large", {"dropout": 0.0} | FUSED, 4, 1024, None,
     "full save_only_matmuls none"),
    ("gpt2 fused, 512 tokens", "gpt2", GPT | FUSED | {"vocab_size": 512}, 8, 1024, None,
     "none full save_only_matmuls every_k:3 mix:10*full,2*none revolve:3 save:attn_fused,attn_lse"),
    ("gpt2 f32 dot, 1000 tokens", "gpt2", {"dropout": 0.0, "vocab_size": 1000}, 4, 1024, None,
     "full selective megatron:mlp"),
    ("bf16 parameters", "llama-1b", BF16 | FUSED | {"num_layers": 8, "param_dtype": "bfloat16"}, 4, 2048, None,
     "full none"),
    ("48 narrow layers", "gpt2", GPT | FUSED | {"num_layers": 48, "hidden": 512, "heads": 8, "kv_heads": 8,
     "mlp_hidden": 2048, "vocab_size": 32000}, 8, 1024, None, "full none every_k:7 torchtitan:2"),
    ("2 wide layers", "llama-1b", BF16 | FUSED | {"num_layers": 2, "hidden": 4096, "heads": 32, "head_dim": 128,
     "mlp_hidden": 14336, "vocab_size": 32000}, 2, 4096, None, "full none dots_saveable"),
    ("long", "llama-1b", BF16 | FUSED | {"num_layers": 4, "max_seq": 16384, "vocab_size": 32000}, 1, 16384, 1024,
     "full save_only_matmuls"),
)  # fmt: skip


def results(version: str) -> Path:
    """The file of what was measured with one JAX."""
    return Path(__file__).with_name(f"estimate_peak-{version}.json")


def step_of(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The train step of a case, jitted, its state donated, and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp
    import optax

    from models.remat import remat
    from models.transformer import init_params, mean_loss

    config, optimizer = case.config, optax.adamw(1e-3)
    model = remat(policies.get(case.spec), config).model(config)

    def step(params, state, tokens, targets, key):
        loss, grads = jax.value_and_grad(
            lambda p: mean_loss(model, p, tokens, targets, key if config.dropout else None, case.chunk)
        )(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(functools.partial(init_params, config), key)
    tokens = jax.ShapeDtypeStruct((case.batch, case.seq), jnp.int32)
    return jax.jit(step, donate_argnums=(0, 1)), (params, jax.eval_shape(optimizer.init, params), tokens, tokens, key)


def measure(case: Case) -> dict[str, Any]:
    """Compile one case; its peak and the arguments' share of it."""
    from jremat.measure.memory import compiled_memory

    step, args = step_of(case)
    found = compiled_memory(step, *args, target="h200", num_buffers=0)
    return {"peak_bytes": found.peak_bytes, "argument_bytes": found.argument_bytes}


def traced(case: Case, version: str) -> int:
    """The peak predicted from the step's program, by the rules of one JAX."""
    from jremat.graph.peak import predicted_memory

    step, args = step_of(case)
    return predicted_memory(step, *args, jax_version=version).peak_bytes


def ours(case: Case, version: str = CALIBRATED) -> int:
    """The estimate's peak, by the rules of one JAX."""
    policy, shapes = policies.get(case.spec), {"batch": case.batch, "seq": case.seq, "chunk": case.chunk}
    return estimate(case.config, policy, jax_version=version, **shapes).peak_bytes


def main() -> None:
    """Measure what is asked for, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jax", default=CALIBRATED, metavar="VERSION", help="whose table to print")
    parser.add_argument("--measure", type=int, default=0, metavar="N", help="compile up to N cases not yet measured")
    parser.add_argument("--stride", type=int, default=1, metavar="K", help="of the cases every K-th")
    flags = parser.parse_args()
    if flags.measure:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        import jax

        flags.jax = jax.__version__
    path = results(flags.jax)
    found = json.loads(path.read_text()) if path.exists() else {}
    for case in [c for c in list(cases())[:: flags.stride] if c.key not in found][: flags.measure]:
        found[case.key] = measure(case)
        write_whole(path, json.dumps(found, indent=1) + "\n")
        print(f"measured {case.key}", file=sys.stderr, flush=True)
    rows = [
        Row(case, found[case.key], traced(case, flags.jax), ours(case, flags.jax))
        for case in cases()
        if case.key in found
    ]
    print(f"jax {flags.jax}, compiled for an H200, not run")
    print(f"{'':30} {'':30} {'compiled':>12} " + " ".join(f"{tool:>12}" for tool in TOOLS))
    for row in rows:
        errors = " ".join(f"{row.errors[tool]:+12.1%}" for tool in TOOLS)
        mark = "" if row.case.held_out else "  read for the traced rules"
        print(f"{row.case.label:30} {row.case.spec:30} {row.peak_bytes / 2**20:8,.0f} MiB {errors}{mark}")
    for name, chosen in (("looked at", False), ("held out", True)):
        part = [row for row in rows if row.case.held_out is chosen]
        print(f"\ntraced, {name}: " + summary([row.errors["traced"] for row in part]))
        print(f"  of the peak less arguments: {summary([row.beyond_arguments for row in part])}")
    print("\nby class, median and worst; other tools' formulas under whichever of their settings comes nearest")
    print(f"{'':42}  " + " ".join(f"{tool:>12.12}" for tool in TOOLS))
    for name, part in classes(rows).items():
        errors = {tool: [abs(row.errors[tool]) for row in part] for tool in TOOLS}
        columns = " ".join(f"{statistics.median(e):5.1%}{max(e):7.1%}" for e in errors.values())
        best = min(TOOLS, key=lambda tool: statistics.median(errors[tool]))
        print(f"{name:32} {len(part):3} cases  {columns}  best: {best}")


TOOLS = ("traced", "estimate", *FORMULAS)
KINDS = ("none", "full", "one policy", "plan over layers")


@dataclasses.dataclass(frozen=True)
class Row:
    """One case with what was compiled and what was predicted."""

    case: Case
    compiled: Mapping[str, int]
    traced_bytes: int
    estimated_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Compiled."""
        return self.compiled["peak_bytes"]

    @functools.cached_property
    def errors(self) -> dict[str, float]:
        """Of each prediction, as a share of the compiled peak; of other tools' formulas the smallest, unsigned."""
        predicted = {"traced": self.traced_bytes, "estimate": self.estimated_bytes}
        own = {tool: nbytes / self.peak_bytes - 1 for tool, nbytes in predicted.items()}
        return own | {tool: nearest(self.case, self.peak_bytes, formula) for tool, formula in FORMULAS.items()}

    @property
    def beyond_arguments(self) -> float:
        """The traced error as a share of the peak less arguments."""
        return (self.traced_bytes - self.peak_bytes) / (self.peak_bytes - self.compiled["argument_bytes"])


def classes(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by kind of policy and by kind of attention."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        for name in (kind_of(row.case), f"{row.case.config.attention} attention"):
            found.setdefault(name, []).append(row)
    return dict(sorted(found.items()))


def kind_of(case: Case) -> str:
    """The class of policies that a case belongs to."""
    if case.spec in KINDS:
        return case.spec
    return "one policy" if isinstance(policies.get(case.spec), Policy) else "plan over layers"


def nearest(case: Case, peak: int, formula: Callable[..., Mapping[str, float]]) -> float:
    """The error of a formula's activations on top of the state that the program does hold, at its best setting."""
    config = case.config
    state = 4 * config.num_params() * (4 if config.param_dtype == "float32" else 2)
    totals = [state + activations for activations in formula(config, case.batch, case.seq).values()]
    return min(abs(total / peak - 1) for total in totals)


def summary(errors: Sequence[float]) -> str:
    """A list of errors in one line."""
    if not errors:
        return "no cases"
    sizes = [abs(error) for error in errors]
    return f"{len(errors)} cases, median {statistics.median(sizes):.1%}, worst {min(errors):+.1%} {max(errors):+.1%}"


if __name__ == "__main__":
    run(lambda: main() or 0, "estimate_peak")
