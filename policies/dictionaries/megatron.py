"""``python -m policies.dictionaries.megatron`` prints docs/from-megatron.md: Megatron's flags in our words."""

from collections.abc import Iterator

from policies.costs import cost
from policies.dictionaries.markdown import code, printed, table
from policies.entry import Entry
from policies.megatron import ENTRIES, MODULES
from policies.translate_megatron import OFFLOAD_INPUTS, from_megatron

HEAD = """# From Megatron

Megatron-core's recompute and offload flags, the spec here, and what differs. This page is made from the zoo and from
the translation by `python -m policies.dictionaries.megatron > docs/from-megatron.md`. The translation itself takes a
whole command line and says what it could not carry over:

```python
import policies

found = policies.translate("megatron", "--recompute-granularity selective --recompute-modules layernorm mlp --lr 1e-4")
assert found.policy == policies.get("megatron:layernorm,mlp")
assert found.notes == ("left out, as not about activations: --lr",)
```

## What differs everywhere

"""

DIFFERENCES = (
    (
        "a module stands in a checkpoint of its own",
        "a policy of the whole block names the tensors that are left out; what the backward never reads is not kept",
    ),
    (
        "`layernorm`, `moe_act`, `mla_up_proj` discard their output: the next matmul doesn't keep it either",
        "every module is so: a value that is left out is left out for all its readers. `jax.checkpoint` around the "
        "norm alone is not this: the next matmul still keeps the norm's output (see below)",
    ),
    (
        "`core_attn` beside a fused attention reruns the kernel and saves nothing (Megatron-LM issues 464, 1225)",
        "refused, as there are no scores to leave out; `jremat.lint` finds it in programs that are written so",
    ),
    (
        "`uniform N` keeps L/N inputs, and while a chunk is replayed N layers' activations beside them: a larger N "
        "soon needs more, not less (Megatron-LM issue 1226)",
        "`every_k:N` does the same, at the same peak; `every_k:N,full` keeps the inputs in a replay alone, for two "
        "extra forwards; `sqrt` looks for the N of the least peak",
    ),
    (
        "`block N` means the first N layers of each pipeline stage",
        "a plan speaks of one stack: `block:N` for each stage, or a `mix:` that spells the stages out",
    ),
    (
        "`--distribute-saved-activations` shards kept inputs over tensor ranks",
        "no policy: a kept value is sharded as the model says, `jax.lax.with_sharding_constraint` on the block's input",
    ),
    (
        "`--cpu-offloading` moves whole layers, fine-grained offloading the inputs of modules",
        "`offload:NAME` moves a tensor by its own name, so the input of a module is the name of what it reads",
    ),
    (
        "random state is saved and restored around a replay",
        "keys are inputs: a replay draws the same masks",
    ),
    (
        "HFU and MFU count causal attention by half",
        "both ways are printed and labelled; see conventions.md",
    ),
)

LINES = (
    ("", "everything stays"),
    ("--recompute-activations", ""),
    ("--recompute-granularity selective", "core_attn is the default of both"),
    ("--recompute-granularity selective --recompute-modules layernorm mlp", "both leave out their tensors"),
    ("--recompute-activations --use-flash-attn", ""),
    ("--recompute-activations --attention-backend fused", ""),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", ""),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
        "a last group of fewer layers is handled",
    ),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 12", "of one stage"),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 3 "
        "--pipeline-model-parallel-size 2",
        "",
    ),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 3 "
        "--pipeline-model-parallel-size 2 --num-layers 8",
        "",
    ),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1 "
        "--num-layers-per-virtual-pipeline-stage 2",
        "",
    ),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1 "
        "--num-virtual-stages-per-pipeline-rank 2",
        "",
    ),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 "
        "--distribute-saved-activations",
        "",
    ),
    ("--fine-grained-activation-offloading --offload-modules qkv_linear core_attn", "to pinned host memory"),
    (
        "--recompute-granularity selective --recompute-modules mlp --fine-grained-activation-offloading "
        "--offload-modules attn_proj",
        "left out, offloaded and kept stand beside each other in one policy",
    ),
    ("--cpu-offloading --cpu-offloading-num-layers 2", ""),
)
"""Command lines, with what differs beyond the notes of their translation."""

# Megatron-core's CheckpointWithoutOutput; the others are plain checkpoints.
DISCARDS_OUTPUT = frozenset({"layernorm", "moe_act", "mla_up_proj"})

MIDDLE = """

## Modules

`--recompute-modules M` is `megatron:M`, several join with a comma. A tensor with `?` is left out where the model has
it. Costs are per layer of our GPT family in bfloat16 with materialised attention, read off its traced block: bytes
kept, the block's input included, and matmul FLOPs recomputed; b batch, s sequence, h hidden width, f MLP width, n
heads.

"""

OUTPUT = """

That a module's output goes too is what makes the recompute of a norm worth anything:

```python
import functools

import jax
import jax.numpy as jnp
import jremat


def norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)


def block(w, x, norm=norm):
    return x + jnp.tanh(jremat.tag(norm(x), "attn_norm") @ w)


def kept_names(f, **options):
    w, x = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32)
    return {row.name for row in jremat.residuals(f, w, x, **options).kept}


assert "attn_norm" in kept_names(functools.partial(block, norm=jax.checkpoint(norm)))  # the matmul keeps it
assert "attn_norm" not in kept_names(block, policy=policies.get("but:attn_norm"))
```

And what has no effect is refused:

```python
from dataclasses import replace

import models

config = replace(models.get("tiny"), attention="blockwise")  # never has scores
x = jnp.ones((1, 32, config.hidden))
Selective = jremat.remat(models.Block, policies.get("megatron:core_attn"))
try:
    Selective(config).init(jax.random.key(0), x)
except ValueError as error:
    assert "'attn_probs'" in str(error)
else:
    raise AssertionError("expected a refusal")
```

## Offload

`--offload-modules M` moves M's **input**. On its own it is `none;offload:NAME`: everything else stays on the device.
What is moved is the tag of what the module reads.

"""

TAIL = """

Offloaded activations show in `host_bytes` where the program is compiled for a GPU or a TPU, which need not be there:
`jremat.compiled_memory(step, *args, target="h200").host_bytes`. A CPU has one memory, and says so.
"""


def page() -> str:
    """The whole page."""
    lines = table(("your flags there", "here", "what differs"), map(_line, LINES))
    modules = table(
        ("module", "there", "left out here", "stays", "bytes kept", "matmul FLOPs again"),
        [_module(entry) for entry in ENTRIES if not entry.is_form],
    )
    everywhere = table(("Megatron", "here"), DIFFERENCES)
    offload = table(("module", "here", "what differs"), _offloads())
    return f"{HEAD}{everywhere}\n\n## Flags\n\n{lines}{MIDDLE}{modules}{OUTPUT}{offload}{TAIL}"


def _line(said: tuple[str, str]) -> tuple[str, str, str]:
    arguments, differs = said
    found = from_megatron(arguments)
    return (
        code(arguments) or "no flag",
        code(found.policy.spec),
        "; ".join((*found.notes, *filter(None, [differs]))) or "nothing",
    )


def _module(entry: Entry) -> tuple[str, ...]:
    module = entry.spec.removeprefix("megatron:")
    kind = "its output is discarded" if module in DISCARDS_OUTPUT else "a checkpoint around it"
    kept, _, again = cost(entry, "gpt")
    return code(module), kind, ", ".join(map(code, MODULES[module])), entry.kept, kept, again


def _offloads() -> Iterator[tuple[str, str, str]]:
    for module, names in OFFLOAD_INPUTS.items():
        if names is None:
            yield code(module), "", "its input has no tag in our models; tag it in yours, then `none;offload:NAME`"
        else:
            flags = f"--fine-grained-activation-offloading --offload-modules {module}"
            yield code(module), code(from_megatron(flags).policy.spec), "nothing"


if __name__ == "__main__":
    printed(page, "policies.dictionaries.megatron")
