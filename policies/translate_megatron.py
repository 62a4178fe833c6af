"""Megatron-LM's command line as a policy."""

import shlex
from collections.abc import Mapping, Sequence
from typing import cast

from jremat.policy import OFFLOAD, SAVE, Policy, PolicyLike
from policies.entry import Spec
from policies.near import did_you_mean
from policies.registry import get
from policies.translation import Translation

# The input of each module that Megatron can offload, in our names; None: our models don't tag it.
OFFLOAD_INPUTS: Mapping[str, tuple[str, ...] | None] = {
    "attn_norm": ("block_in",),
    "qkv_linear": ("attn_norm",),
    "core_attn": ("query", "key", "value"),
    "attn_proj": ("attn_out",),
    "mlp_norm": None,
    "expert_fc1": None,
    "moe_act": None,
}

_READ = (
    *(
        "recompute-granularity",
        "recompute-method",
        "recompute-num-layers",
        "recompute-modules",
        "recompute-activations",
    ),
    *("pipeline-model-parallel-size", "num-layers", "fine-grained-activation-offloading", "offload-modules"),
)
_NOTED = {
    "distribute-saved-activations": "kept inputs are not sharded over tensor ranks; that is the model's sharding",
    "cpu-offloading": "not carried over: offloading whole layers; by name: offload:NAME, or offload_inputs",
    "cpu-offloading-num-layers": "not carried over with --cpu-offloading",
    "num-layers-per-virtual-pipeline-stage": "virtual stages are not carried over; Megatron counts layers in each",
    "num-virtual-stages-per-pipeline-rank": "virtual stages are not carried over; Megatron counts layers in each",
}
_FUSED = {"use-flash-attn": (), "attention-backend": ("flash", "fused")}


def from_megatron(arguments: str | Sequence[str]) -> Translation:
    """The policy that a Megatron command line asks for.

    Args:
        arguments: the flags, as one string or a list; those that don't concern activations are named in a note.

    Returns:
        The policy or plan, and notes on what differs.

    Raises:
        ValueError: a value that Megatron doesn't know, or flags that contradict each other.

    >>> print(from_megatron("--recompute-granularity full --recompute-method block --recompute-num-layers 12").policy)
    block:12
    >>> from_megatron("--recompute-activations").policy.spec
    'megatron:core_attn'
    """
    flags = _flags(shlex.split(arguments) if isinstance(arguments, str) else list(arguments))
    notes = [f"--{flag}: {_NOTED[flag]}" for flag in flags if flag in _NOTED]
    policy, more = _recompute(flags)
    policy, still_more = _offloaded(policy, flags)
    notes += [*more, *still_more]
    fused = [f for f, values in _FUSED.items() if f in flags and (not values or set(values) & set(flags[f]))]
    if fused and isinstance(policy, Policy) and "attn_probs" in dict(policy.names):
        notes.append(
            f"--{fused[0]}: a fused attention has no scores, so core_attn has no effect; jremat.checkpoint raises"
        )
    unknown = [flag for flag in flags if flag not in (*_READ, *_NOTED, *_FUSED)]
    lost = [flag for flag in unknown if "recompute" in flag or "offload" in flag]
    notes += [f"--{flag}: unknown here, not carried over" for flag in lost]
    other = [f"--{flag}" for flag in unknown if flag not in lost]
    if other:
        notes.append(f"left out, as not about activations: {' '.join(other)}")
    return Translation(cast(PolicyLike, policy), tuple(notes))


def _flags(words: list[str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].replace("_", "-").partition("=")
            if equals:  # only the flag's own name changes its underscores
                value = word.partition("=")[2]
            values = flags[flag] = [value] if equals else []
        elif values is None:
            raise ValueError(f"arguments: expected flags such as --recompute-granularity, got {word!r}")
        else:
            values.append(word)
    return flags


def _recompute(flags: Mapping[str, list[str]]) -> tuple[Spec, list[str]]:
    granularity = _choice(flags, "recompute-granularity", ("full", "selective"))
    if "recompute-activations" in flags:
        if granularity == "full":
            raise ValueError("arguments: expected one of --recompute-activations and --recompute-granularity full")
        granularity = "selective"
    unused = {"full": ("recompute-modules",), "selective": ("recompute-method", "recompute-num-layers")}
    read_by_none = ("recompute-method", "recompute-num-layers", "recompute-modules")
    idle = [f for f in unused.get(granularity or "", read_by_none) if f in flags]
    notes = [f"--{flag}: without effect under --recompute-granularity {granularity or 'unset'}" for flag in idle]
    if granularity is None:
        return get("none"), notes
    if granularity == "selective":
        given = flags.get("recompute-modules", [])
        modules = tuple(module for value in given for module in value.split(",") if module) or ("core_attn",)
        return get(f"megatron:{','.join(dict.fromkeys(modules))}"), notes
    plan, more = _full(flags)
    return plan, notes + more


def _full(flags: Mapping[str, list[str]]) -> tuple[Spec, list[str]]:
    method = _choice(flags, "recompute-method", ("uniform", "block"))
    if method is None:
        raise ValueError("arguments: expected --recompute-method uniform or block beside --recompute-granularity full")
    layers = _number(flags, "recompute-num-layers")
    notes = [] if layers else ["--recompute-num-layers is not given: 1 is taken"]
    layers = layers or 1
    stages = _number(flags, "pipeline-model-parallel-size") or 1
    if method == "uniform":
        notes += [f"groups count from each stage's first layer: give this plan to each of {stages} stages"] * (
            stages > 1
        )
        return get("full" if layers == 1 else f"every_k:{layers}"), notes
    total = _number(flags, "num-layers")
    if stages == 1:
        return get(f"block:{layers}"), notes
    if total is None:
        return get(f"block:{layers}"), [
            *notes,
            f"of one pipeline stage: give it to each of {stages}, or add --num-layers",
        ]
    each, rest = divmod(total, stages)
    if rest:
        raise ValueError(f"arguments: expected --num-layers to divide by {stages} stages, got {total}")
    one = f"{min(layers, each)}*full" + f",{each - layers}*none" * (each > layers)
    return get("mix:" + ",".join([one] * stages)), [*notes, f"the first {layers} layers of each of {stages} stages"]


def _offloaded(policy: Spec, flags: Mapping[str, list[str]]) -> tuple[Spec, list[str]]:
    on = "fine-grained-activation-offloading" in flags
    given = [module for value in flags.get("offload-modules", []) for module in value.split(",") if module]
    if not on:
        return policy, ["--offload-modules: without effect unless --fine-grained-activation-offloading"] * bool(given)
    unknown = [module for module in given if module not in OFFLOAD_INPUTS]
    if unknown:
        raise ValueError(did_you_mean("arguments: no module to offload", unknown[0], OFFLOAD_INPUTS))
    untagged = [module for module in given if OFFLOAD_INPUTS[module] is None]
    notes = [f"--offload-modules {module}: its input has no tag in our models; not carried over" for module in untagged]
    if not isinstance(policy, Policy):
        return policy, [*notes, f"--offload-modules: not carried over beside {policy.spec!r}"]
    tensors = [name for module in given for name in OFFLOAD_INPUTS[module] or ()]
    if policy.default is not SAVE or not tensors:
        return policy, [*notes, *[f"--offload-modules: not carried over beside {policy.spec!r}"] * bool(tensors)]
    names = dict(policy.names) | dict.fromkeys(tensors, OFFLOAD)
    notes += [f"{n}: to be recomputed and offloaded; offloaded here" for n, _ in policy.names if n in tensors]
    return Policy(names=tuple(names.items()), default=SAVE, optional=policy.optional), notes


def _choice(flags: Mapping[str, list[str]], flag: str, choices: Sequence[str]) -> str | None:
    if flag not in flags:
        return None
    value = " ".join(flags[flag])
    if value not in choices:
        raise ValueError(did_you_mean(f"arguments: --{flag} has no value", value, choices))
    return value


def _number(flags: Mapping[str, list[str]], flag: str) -> int | None:
    if flag not in flags:
        return None
    value = " ".join(flags[flag])
    if not (value.isascii() and value.isdigit()) or len(value) > 9 or not int(value):
        raise ValueError(f"arguments: expected --{flag} with a whole number of at least 1, got {value!r}")
    return int(value)
