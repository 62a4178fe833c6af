"""Hugging Face's and torchtitan's checkpoint settings as policies."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from jremat.policy import Policy, PolicyLike
from policies.near import did_you_mean
from policies.registry import get
from policies.translation import Translation

# torch.utils.checkpoint's own settings, which both hand on.
_TORCH = {
    "preserve_rng_state": (True, "random keys are inputs in JAX, so a replay draws the same masks whatever this says"),
    "determinism_check": ("default", "not carried over: jremat.replay compares a replay with the first run"),
    "debug": (False, "not carried over: jremat explain shows what is recomputed and why"),
    "early_stop": (True, "JAX never recomputes what the backward pass doesn't read, whatever this says"),
}
"""Each with its default and what becomes of another value."""


def from_huggingface(
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, *, gradient_checkpointing: bool = True
) -> Translation:
    """The policy of ``TrainingArguments(gradient_checkpointing=…, gradient_checkpointing_kwargs=…)``.

    Args:
        gradient_checkpointing_kwargs: as in Transformers, which hands them to ``torch.utils.checkpoint``; and
            ``every_n_layers``.
        gradient_checkpointing: as in Transformers.

    Returns:
        ``full``, ``alternate:N`` or ``none``, with notes on the settings that have no counterpart.

    Raises:
        ValueError: ``every_n_layers`` is not a positive whole number.

    >>> from_huggingface({"use_reentrant": False}) == Translation(get("full"))
    True
    """
    given = dict(gradient_checkpointing_kwargs or {})
    if not gradient_checkpointing:
        notes = ["gradient_checkpointing_kwargs: without effect, as gradient_checkpointing is off"] * bool(given)
        return Translation(get("none"), tuple(notes))
    notes = []
    every = given.pop("every_n_layers", None)
    if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
        raise ValueError(f"every_n_layers: expected a whole number of at least 1, got {every!r}")
    if given.pop("use_reentrant", False):
        notes.append(
            "use_reentrant: there is one kind here; inputs without a gradient don't stop those of the parameters"
        )
    if given.pop("context_fn", None) is not None:
        notes.append(
            "context_fn: a function can't be carried over, so all is recomputed; a SAC list of ops is sac:OP,OP…"
        )
    return Translation(get("full" if every in (None, 1) else f"alternate:{every}"), (*notes, *_leftovers(given)))


# A Llama block's bias-free matmuls in the order in which torchtitan counts them: its module, our tensor.
_COUNTED = {
    "wq": "query",
    "wk": "key",
    "wv": "value",
    "wo": "attn_proj",
    "w1": "mlp_gate",
    "w3": "mlp_up",
    "w2": "mlp_out",
}
_FORCED = ("per_op_sac_force_recompute_mm_shapes_by_fqns", "force_recompute_mm_shapes_by_fqns")
_OWN = ("mode", "selective_ac_option", "memory_budget", *_FORCED)


def from_torchtitan(config: Mapping[str, Any]) -> Translation:
    """The policy of torchtitan's ``[activation_checkpoint]`` table.

    Args:
        config: that table, or a whole config that has it.

    Returns:
        ``none``, ``full``, ``torchtitan:K``, ``budget:B`` or the selective list, with notes on what differs.

    Raises:
        ValueError: a mode or option that torchtitan doesn't know.

    >>> from_torchtitan({"mode": "selective", "selective_ac_option": "2"}).policy.spec
    'torchtitan:2'
    """
    table = config.get("activation_checkpoint", config)
    if not isinstance(table, Mapping):
        raise ValueError(f"activation_checkpoint: expected a table, got {table!r}")
    mode, notes = table.get("mode", "selective"), _leftovers({k: v for k, v in table.items() if k not in _OWN})
    if mode in ("none", "full"):
        return Translation(get(mode), notes)
    if mode == "memory_budget":
        return Translation(get(f"budget:{table.get('memory_budget', 0.5)}"), notes)
    if mode != "selective":
        raise ValueError(
            did_you_mean("mode: torchtitan has no", str(mode), ("none", "full", "selective", "memory_budget"))
        )
    option = str(table.get("selective_ac_option", "2"))
    if option == "op":
        policy, more = _by_op([name for key in _FORCED for name in table.get(key, ())])
        return Translation(cast(PolicyLike, policy), (*more, *notes))
    if not (option.isascii() and option.isdigit()):
        raise ValueError(f"selective_ac_option: expected 'op' or a whole number, got {option!r}")
    if int(option) == 0:
        return Translation(get("full"), ("selective_ac_option 0 checkpoints every layer there", *notes))
    return Translation(get(f"torchtitan:{option}"), notes)


def _by_op(forced: list[str]) -> tuple[Policy, list[str]]:
    """The selective list: matmuls forced to recompute drop out of the count, which moves the others' parity."""
    selective = cast(Policy, get("torchtitan_selective_op"))
    modules = [name.rpartition(".")[2] for name in forced]
    known = {module for module in modules if module in _COUNTED}
    notes = ["every second matmul is kept by name here, in the order of a gated MLP; torchtitan counts at run time"]
    if "moe.router.gate" in forced:
        notes.append(
            "moe.router.gate: a router's logits, tagged router, and its choice are kept here, lest a replay choose anew"
        )
    pairs = zip(forced, modules, strict=True)
    lost = [name for name, module in pairs if module not in _COUNTED and name != "moe.router.gate"]
    notes += [f"forced recompute of {name!r}: unknown here, not carried over" for name in lost]
    if not known:
        return selective, notes
    notes.append("forced recompute matches by weight shape there, by name here")
    counted = [tensor for module, tensor in _COUNTED.items() if module not in known]
    kept = Policy.save(*counted[::2])
    optional = {"mlp_gate"} & set(counted[::2])
    listed = Policy.ops(*(family for family, _ in selective.families))
    return replace(kept.with_optional(*optional) if optional else kept, label=None) | listed, notes


def _leftovers(settings: Mapping[str, Any]) -> tuple[str, ...]:
    set_here = {key: value for key, value in settings.items() if key in _TORCH and value != _TORCH[key][0]}
    notes = [f"{key}: {_TORCH[key][1]}" for key in set_here]
    lost = [f"{key}: unknown here, not carried over" for key in settings if key not in _TORCH]
    return (*notes, *lost)
