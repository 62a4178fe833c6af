"""``python -m policies.dictionaries.maxtext`` prints docs/from-maxtext.md: MaxText's config in our words."""

from collections.abc import Iterator

from policies.costs import cost
from policies.dictionaries.markdown import code, printed, table
from policies.entry import Entry
from policies.maxtext import ENTRIES, NAMES
from policies.translate_maxtext import PLACES, from_maxtext

HEAD = """# From MaxText

MaxText's `remat_policy` and its knob per tensor, the spec here, and what differs. This page is made from the zoo and
from the translation by `python -m policies.dictionaries.maxtext > docs/from-maxtext.md`.

```python
import policies

assert policies.translate("maxtext", "minimal").policy == policies.get("maxtext:minimal")
found = policies.translate("maxtext", "custom", {"qkv_proj": "device", "mlpwo": "offload", "out_proj": "remat"})
assert found.policy.spec == "save:key,query,value;offload:mlp_out"
assert found.policy == policies.get(found.policy.spec)
```

## What differs everywhere

"""

DIFFERENCES = (
    (
        "`remat_policy: none` hands None to JAX: full remat on most of its paths",
        '`none` keeps everything; `full` keeps the block input; `translate("maxtext", "none")` is `full`, with a note',
    ),
    (
        "`minimal` keeps no context: attention, all of it, runs again from query, key and value",
        "the same, counted below; `minimal_with_context` keeps the context, and of a fused attention the log-sum-exp, "
        "without which the kernel's forward would run again all the same",
    ),
    (
        "a name that no tensor bears keeps nothing, and `offload` of it is `device` of it",
        "`jremat.checkpoint` and `jremat.remat` raise, with near names; a plain MLP's missing gate may be missing",
    ),
    (
        "`mlpwo` is kept because it is listed",
        "kept where the backward reads it; the last matmul of a block is read by nobody",
    ),
    (
        "a knob per tensor: device, offload or remat",
        "`save:NAME`, `offload:NAME`, and nothing; `save:query;offload:mlp_up` has both",
    ),
    (
        "the policy is one for all layers",
        "plans over layers: `mix:8*maxtext:minimal,rest*full`, `every_k:K`, `alternate:K`, `block:N`",
    ),
    (
        "the estimator walks one fixed order: all tensors on the device, then one after the other on the host, then "
        "one after the other recomputed; a compile a probe",
        "`auto:60GiB` chooses among all values of the block, by bytes and by the time that keeping each one spares, "
        "mixes two choices over the layers, and compiles to confirm, twice at most",
    ),
    (
        "`no_batch_dims` policies under pipeline stages keep nothing: vmap gives each matmul a batch dimension",
        "decided on the block as written, before vmap; the lint finds the plain form",
    ),
    (
        "MFU counts causal attention by half since July 2025",
        "both ways are printed and labelled; see conventions.md",
    ),
)

POLICIES = """

## Policies

Costs are per layer of our Llama family in bfloat16 with a fused attention, read off its traced block: bytes kept, the
block's input included, and matmul FLOPs recomputed; b batch, s sequence, h hidden width, k key and value width, f MLP
width, n heads.

"""

CONTEXT = """

What the context is worth, counted on a block of a small Llama with a fused attention:

```python
from dataclasses import replace

import jax
import jax.numpy as jnp
import jremat
import models

config = replace(models.get("tiny-llama"), attention="blockwise")
block = models.Block(config)
x = jax.ShapeDtypeStruct((1, 128, config.hidden), jnp.float32)
positions = jax.ShapeDtypeStruct((128,), jnp.int32)
variables = jax.eval_shape(lambda x, at: block.init(jax.random.key(0), x, None, at), x, positions)


def recomputed(spec):
    layer = jremat.checkpoint(lambda v, x, at: block.apply(v, x, None, at), policies.get(spec))
    loss = jax.value_and_grad(lambda v, x, at: layer(v, x, at).sum(), (0, 1))
    return jremat.flops(loss, variables, x, positions).recompute


scores_and_context = 2 * 2 * 128 * 128 * config.hidden  # two matmuls of s · s · h
assert recomputed("maxtext:minimal") == scores_and_context
assert recomputed("maxtext:minimal_with_context") == 0
```

## Tensors

Under `remat_policy: custom`, `{tensor}: device` is `save:`, `offload` is `offload:`, and `remat`, the rest's default,
nothing.

"""

TAIL = """

The three projections are three values here; MaxText's combined names stand for all of theirs. Names of a mixture's and
of multi-latent attention's tensors are named in a note, since our models have none: tag yours, and use `save:NAME`.

## The estimator, and `auto`

MaxText's estimator takes tensors in one order, and the first step of the walk that fits. It can be held beside the
exact choice, on one block and under one budget; here neither may use the host:

```python
from jremat.plan.baselines import fixed_order
from jremat.plan.block import Budget, best
from jremat.plan.read_block import read_block
from jremat.plan.roofline import matmul_flops

read = read_block(lambda v, x, at: block.apply(v, x, None, at), variables, x, positions, cost=matmul_flops)
budget = Budget(6 * 128 * config.hidden * 4)  # of the size of six residual streams
exact, walked = best(read.problem, budget), fixed_order(read.problem, budget)
assert max(exact.kept_bytes, walked.kept_bytes) <= budget.device_bytes
assert exact.recompute_seconds < 0.7 * walked.recompute_seconds  # the cost is in matmul FLOPs
```
"""


def page() -> str:
    """The whole page."""
    everywhere = table(("MaxText", "here"), DIFFERENCES)
    policies = table(
        ("`remat_policy`", "here", "kept", "recomputed", "bytes kept", "matmul FLOPs again"),
        [_none(), *map(_policy, ENTRIES), _custom()],
    )
    tensors = table(("tensor there", "here", *map(code, PLACES)), _tensors())
    return f"{HEAD}{everywhere}{POLICIES}{policies}{CONTEXT}{tensors}{TAIL}"


def _policy(entry: Entry) -> tuple[str, ...]:
    names = " or ".join(code(spec.removeprefix("maxtext:")) for spec in (entry.spec, *entry.aliases))
    kept, host, again = cost(entry, "llama", "blockwise")
    in_host = f", of it on the host {host}" if host != "0" else ""
    return names, code(entry.spec), entry.kept, entry.recomputed, kept + in_host, again


def _none() -> tuple[str, ...]:
    found = from_maxtext("none")
    full = next(_policy(entry) for entry in ENTRIES if entry.spec == "maxtext:full")
    return code("none"), code(found.policy.spec), *full[2:]


def _custom() -> tuple[str, ...]:
    return code("custom"), code("save:NAME;offload:NAME"), "what the knobs say", "the rest", "by name", "by name"


def _tensors() -> Iterator[tuple[str, ...]]:
    for tensor, names in NAMES.items():
        found = [from_maxtext("custom", {tensor: place}).policy.spec for place in PLACES]
        yield code(tensor), ", ".join(map(code, names)), *map(code, found)


if __name__ == "__main__":
    printed(page, "policies.dictionaries.maxtext")
