"""MaxText's ``remat_policy`` and its knob per tensor as a policy."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

from jremat.policy import FULL, Policy, PolicyLike
from jremat.policy.ops import ATTENTION
from policies.near import did_you_mean
from policies.registry import ZOO, get
from policies.translation import Translation

NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "decoder_layer_input": ("block_in",),
        "query_proj": ("query",),
        "key_proj": ("key",),
        "value_proj": ("value",),
        "qkv_proj": ("query", "key", "value"),
        "kv_proj": ("key", "value"),
        "context": ("attn_out",),
        "out_proj": ("attn_proj",),
        "mlpwi": ("mlp_up",),
        "mlpwi_0": ("mlp_gate",),
        "mlpwi_1": ("mlp_up",),
        "mlpwo": ("mlp_out",),
    }
)
"""MaxText's tensor names in ours. Its query, key, value, kv and qkv projections are three values here."""

CONTEXT = Policy.save("attn_out") | Policy.ops(ATTENTION)
"""The context, and of a fused attention what its backward reads beside it, the log-sum-exp."""
PLACES = ("device", "offload", "remat")


def from_maxtext(remat_policy: str, tensors: Mapping[str, str] | None = None) -> Translation:
    """The policy of MaxText's ``remat_policy``, and under ``custom`` of its knobs.

    Args:
        remat_policy: as in MaxText's config.
        tensors: under ``custom``, where each tensor goes: ``device``, ``offload`` or ``remat`` (the rest's default).

    Returns:
        The policy in our tensors' names, with notes on tensors that our models don't have.

    Raises:
        ValueError: no such policy, no such place, or two knobs of one tensor that contradict each other.

    >>> from_maxtext("custom", {"query_proj": "device", "mlpwo": "offload", "out_proj": "remat"}).policy.spec
    'save:query;offload:mlp_out'
    """
    if remat_policy == "custom":
        return _custom(tensors or {})
    notes = ["tensors: read under remat_policy custom only, so without effect"] * bool(tensors)
    if remat_policy == "none":
        note = "MaxText's 'none' hands None to JAX, which is full remat on most of its paths; to keep everything: none"
        return Translation(get("full"), (note, *notes))
    known = [spec.removeprefix("maxtext:") for spec in ZOO.named if spec.startswith("maxtext:")]
    if remat_policy not in known:
        raise ValueError(did_you_mean("remat_policy: MaxText has no", str(remat_policy), (*known, "custom", "none")))
    return Translation(get(f"maxtext:{remat_policy}"), tuple(notes))


def _custom(tensors: Mapping[str, str]) -> Translation:
    notes, policy = [], FULL
    places: dict[str, tuple[str, str]] = {}
    for tensor, place in tensors.items():
        if place not in PLACES:
            raise ValueError(did_you_mean(f"tensors: {tensor}: MaxText has no place", str(place), PLACES))
        if tensor not in NAMES:
            if place != "remat":
                notes.append(f"{tensor}: our models have no such tensor; not carried over")
            continue
        if tensor == "decoder_layer_input" and place == "remat":
            notes.append("decoder_layer_input: a block's input is where its remat starts; kept all the same")
        for name in NAMES[tensor]:
            before, set_by = places.setdefault(name, (place, tensor))
            if before != place:
                raise ValueError(
                    f"tensors: expected one place for {name} here, got {set_by}: {before} and {tensor}: {place}"
                )
    for name, (place, _) in places.items():
        if place == "remat" or (name, place) == ("block_in", "device"):
            continue
        one = CONTEXT if name == "attn_out" else Policy.save(name)
        one = one.with_optional() if name == "mlp_gate" else one  # a plain MLP has none, whatever the list says
        policy |= one.to_host() if place == "offload" else one
    return Translation(cast(PolicyLike, policy) if policy != FULL else get("full"), tuple(notes))
