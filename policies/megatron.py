"""Megatron-core's selective recompute, module by module.

Megatron wraps a module in a checkpoint (core_attn, mlp, moe, shared_experts), or discards its output too (layernorm,
moe_act, mla_up_proj): the next matmul doesn't keep it either. Both are one thing here: the tensors that are left out.
All else stays, so these policies are for ``jremat.checkpoint`` and ``jremat.remat``; they leave out tagged tensors
only.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from jremat.policy import Policy
from jremat.policy.messages import near

MODULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "core_attn": ("attn_scores", "attn_probs", "attn_dropped?"),
        "mlp": ("mlp_gate?", "mlp_up", "mlp_act"),
        "layernorm": ("attn_norm", "mlp_norm"),
        "moe": ("mlp_gate?", "mlp_up?", "moe_act"),
        "shared_experts": ("shared_gate?", "shared_up", "shared_act"),
        "moe_act": ("moe_act",),
        "mla_up_proj": ("query", "key", "value"),
    }
)
"""The tensors that recompute of a module leaves out; with ? where not every model has it."""


def modules(names: Iterable[str]) -> Policy:
    """The policy of ``--recompute-granularity selective --recompute-modules`` with these modules.

    Raises:
        ValueError: no such module; near names are listed.

    >>> modules(["layernorm", "mlp"]).canonical_spec
    'but:attn_norm,mlp_act,mlp_gate?,mlp_norm,mlp_up'
    """
    left_out = [name for module in names for name in _tensors(module)]
    required = {name for name in left_out if not name.endswith("?")}
    optional = {name[:-1] for name in left_out if name.endswith("?")} - required
    policy = Policy.but(*sorted(required | optional))
    return policy.with_optional(*sorted(optional)) if optional else policy


def _tensors(module: str) -> tuple[str, ...]:
    if module in MODULES:
        return MODULES[module]
    hint = near(module, MODULES) or f"; there are {', '.join(MODULES)}"
    raise ValueError(f"policy: Megatron has no module {module!r} to recompute{hint}")
