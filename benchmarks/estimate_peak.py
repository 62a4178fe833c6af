"""The closed form's peak against the peak that XLA plans for an H200: whole train steps, AdamW, donated state.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import policies
from jremat.estimate.config import TransformerConfig
from jremat.estimate.elsewhere import FORMULAS
from jremat.estimate.transformer import estimate
from jremat.policy import Policy
from models.config import get

CALIBRATED = "0.10.2"
BF16 = {"compute_dtype": "bfloat16"}
GPT = {"dropout": 0.0, **BF16}
FUSED = {"attention": "blockwise"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A train step: a size with changes, a policy, and shapes."""

    label: str
    size: str
    changes: dict[str, Any]
    spec: str
    batch: int
    seq: int
    chunk: int | None = None
    tuned: bool = False

    @property
    def key(self) -> str:
        """What the results file calls it."""
        return f"{self.label} {self.spec}"

    @property
    def config(self) -> TransformerConfig:
        """The architecture."""
        return dataclasses.replace(get(self.size), **self.changes)


def cases() -> Iterator[Case]:
    """Sixty steps and more; ``tuned`` are those that the rules of ``jremat.estimate.work`` were read from."""
    for tuned, label, size, changes, batch, seq, chunk, specs in _TABLE:
        for spec in specs.split():
            yield Case(label, size, changes, spec, batch, seq, chunk, tuned)


_ODD = {"hidden": 1536, "heads": 12, "kv_heads": 4, "head_dim": 128, "mlp_hidden": 6144, "max_seq": 3072}
_XL = {"num_layers": 48, "hidden": 1600, "heads": 25, "kv_heads": 25, "mlp_hidden": 6400}
_TABLE: tuple[tuple[bool, str, str, dict[str, Any], int, int, int | None, str], ...] = (
    (True, "gpt2", "gpt2", GPT, 8, 1024, None, "none full dots_saveable save_only_matmuls selective"),
    (True, "gpt2 fused", "gpt2", GPT | FUSED, 8, 1024, None, "none full dots_with_no_batch_dims_saveable every_k:4"),
    (True, "llama 8 layers", "llama-1b", BF16 | FUSED | {"num_layers": 8, "max_seq": 4096}, 2, 4096, None,
     "none full save_only_matmuls"),
    (True, "llama 8 layers, chunks", "llama-1b", BF16 | FUSED | {"num_layers": 8, "max_seq": 4096}, 2, 4096, 512,
     "full save_only_matmuls"),
    (True, "odd", "gpt2", GPT | _ODD | {"num_layers": 8}, 3, 3072, None, "full dots_saveable"),
    (True, "gpt2 f32", "gpt2", {"dropout": 0.0}, 8, 1024, None, "none full"),
    (True, "gpt2 dropout", "gpt2", BF16, 8, 1024, None, "full none"),
    (True, "gpt2, 512 tokens", "gpt2", GPT | {"vocab_size": 512}, 8, 1024, None,
     "full none alternate:2 mix:6*full,6*none revolve:4"),
    (True, "gpt2-xl fused", "gpt2", GPT | FUSED | _XL, 2, 1024, None, "full save_only_matmuls"),
    (True, "gpt2 2 layers fused", "gpt2", GPT | FUSED | {"num_layers": 2}, 16, 512, None, "none"),
    (False, "odd fused", "gpt2", GPT | FUSED | _ODD | {"num_layers": 8}, 3, 3072, None,
     "none full save_only_matmuls maxtext:minimal every_k:3"),
    (False, "odd llama", "llama-1b", BF16 | {"num_layers": 6, "hidden": 1536, "heads": 12, "kv_heads": 4,
     "head_dim": 128, "mlp_hidden": 4096, "vocab_size": 32000}, 4, 2048, None, "none full selective save_only_matmuls"),
    (False, "llama 16 layers", "llama-1b", BF16 | FUSED, 4, 2048, None, "full torchtitan_selective_op maxtext:minimal"),
    (False, "llama 16 layers, chunks", "llama-1b", BF16 | FUSED, 8, 2048, 256, "full save:attn_out,mlp_up but:mlp_act"),
    (False, "llama untied", "llama-1b", BF16 | FUSED | {"num_layers": 4, "tied_embeddings": False}, 4, 2048, None,
     "none full"),
    (False, "gpt2-medium", "gpt2-medium", GPT, 4, 1024, None,
     "full megatron:layernorm,mlp save_only_matmuls alternate:2"),
    (False, "gpt2-medium fused dropout", "gpt2-medium", BF16 | FUSED, 4, 1024, None, "none full every_k:5 block:12"),
    (False, "gpt2-large fused f32", "gpt2-large", {"dropout": 0.0} | FUSED, 4, 1024, None,
     "full save_only_matmuls none"),
    (False, "gpt2 fused, 512 tokens", "gpt2", GPT | FUSED | {"vocab_size": 512}, 8, 1024, None,
     "none full save_only_matmuls every_k:3 mix:10*full,2*none revolve:3 save:attn_fused,attn_lse"),
    (True, "gpt2 f32 dot, 1000 tokens", "gpt2", {"dropout": 0.0, "vocab_size": 1000}, 4, 1024, None,
     "full selective megatron:mlp"),
    (False, "bf16 parameters", "llama-1b", BF16 | FUSED | {"num_layers": 8, "param_dtype": "bfloat16"}, 4, 2048, None,
     "full none"),
    (False, "48 narrow layers", "gpt2", GPT | FUSED | {"num_layers": 48, "hidden": 512, "heads": 8, "kv_heads": 8,
     "mlp_hidden": 2048, "vocab_size": 32000}, 8, 1024, None, "full none every_k:7 torchtitan:2"),
    (False, "2 wide layers", "llama-1b", BF16 | FUSED | {"num_layers": 2, "hidden": 4096, "heads": 32, "head_dim": 128,
     "mlp_hidden": 14336, "vocab_size": 32000}, 2, 4096, None, "full none dots_saveable"),
    (False, "long", "llama-1b", BF16 | FUSED | {"num_layers": 4, "max_seq": 16384, "vocab_size": 32000}, 1, 16384, 1024,
     "full save_only_matmuls"),
)  # fmt: skip


def results(version: str) -> Path:
    """The file of what was measured with one JAX."""
    return Path(__file__).with_name(f"estimate_peak-{version}.json")


def measure(case: Case) -> dict[str, Any]:
    """Compile one case; its peak and the arguments' share of it."""
    import jax
    import jax.numpy as jnp
    import optax

    import jremat
    from jremat.measure.memory import memory
    from jremat.transform import chain
    from models.transformer import Transformer, init_params, mean_loss

    config, policy, optimizer = case.config, policies.get(case.spec), optax.adamw(1e-3)
    if isinstance(policy, Policy):
        model = Transformer(config, remat=lambda block: jremat.remat(block, policy))
    else:
        stack = lambda block, params, carry: chain.stack(block, policy, num_layers=config.num_layers)(params, carry)
        model = Transformer(config, stack=stack)

    def step(params, state, tokens, targets, key):
        loss, grads = jax.value_and_grad(
            lambda p: mean_loss(model, p, tokens, targets, key if config.dropout else None, case.chunk)
        )(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(functools.partial(init_params, config), key)
    tokens = jax.ShapeDtypeStruct((case.batch, case.seq), jnp.int32)
    args = params, jax.eval_shape(optimizer.init, params), tokens, tokens, key
    found = memory(jax.jit(step, donate_argnums=(0, 1)), *args, target="h200")
    return {"peak_bytes": found.peak_bytes, "argument_bytes": found.argument_bytes}


def ours(case: Case) -> int:
    """The closed form's peak."""
    policy = policies.get(case.spec)
    return estimate(case.config, policy, batch=case.batch, seq=case.seq, chunk=case.chunk).peak_bytes


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
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"measured {case.key}", file=sys.stderr, flush=True)
    rows = [(case, found[case.key]["peak_bytes"], ours(case)) for case in cases() if case.key in found]
    for case, peak, own in rows:
        print(
            f"{case.label:28} {case.spec:34} {peak / 2**20:10,.0f} MiB  {own / peak - 1:+7.1%}{'  tuned' * case.tuned}"
        )
    for name, chosen in (("tuned on", True), ("held out", False)):
        summary(name, [abs(own / peak - 1) for case, peak, own in rows if case.tuned is chosen])
    print("\nby kind of policy; other tools' formulas under whichever of their settings comes nearest to the truth")
    for kind in KINDS:
        of_kind = [(case, peak, own) for case, peak, own in rows if kind_of(case) == kind]
        summary(f"{kind}: ours", [abs(own / peak - 1) for _, peak, own in of_kind])
        for tool, formula in FORMULAS.items():
            summary(f"{kind}: {tool}", [nearest(case, peak, formula) for case, peak, _ in of_kind])


KINDS = ("none", "full", "one policy", "plan over layers")


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


def summary(name: str, errors: Sequence[float]) -> None:
    """One line on a list of errors."""
    if errors:
        print(f"{name:40} {len(errors):3} cases, median {statistics.median(errors):6.1%}, worst {max(errors):6.1%}")


if __name__ == "__main__":
    main()
