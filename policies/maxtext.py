"""MaxText's remat policies, in our tensors' names.

MaxText's ``none`` is missing on purpose: it hands None to JAX, which is full remat on most of its paths, so the word
would say the opposite of ours. ``translate("maxtext", "none")`` says so.
"""

from collections.abc import Mapping
from types import MappingProxyType

from jremat.policy import FULL, Policy
from jremat.policy.ops import ATTENTION
from policies.entry import Entry

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

# A plain MLP has no gate, whatever MaxText's list says.
OPTIONAL = ("mlp_gate",)
CONTEXT = Policy.save("attn_out") | Policy.ops(ATTENTION)
"""The context, and of a fused attention what its backward reads beside it, the log-sum-exp."""

_QKV = ("query", "key", "value")
_MINIMAL = (*_QKV, "attn_proj", "mlp_gate", "mlp_up", "mlp_out")
_READ = (*_QKV, "attn_proj", "mlp_gate", "mlp_up")  # nobody reads mlp_out


def save(*names: str) -> Policy:
    """Keep these of our tensors, the gate where there is one."""
    policy = Policy.save(*names)
    return policy.with_optional(*OPTIONAL) if set(OPTIONAL) & set(names) else policy


def _entry(name: str, policy: Policy, kept: str, recomputed: str, *aliases: str) -> Entry:
    spec = f"maxtext:{name}"
    return Entry(
        spec,
        policy.labelled(spec),
        kept,
        recomputed,
        f"MaxText remat_policy={name}",
        "MaxText, layers/decoders.py, get_remat_policy; configs/base.yml",
        aliases=tuple(f"maxtext:{alias}" for alias in aliases),
    )


ENTRIES = (
    _entry("full", FULL, "the block's input", "the whole block, but for its last matmul"),
    _entry(
        "minimal",
        save(*_MINIMAL),
        "query, key, value, attention's projection, the MLP's projections",
        "norms, activations, attention",
    ),
    _entry(
        "minimal_with_context",
        save(*_MINIMAL) | CONTEXT,
        "as minimal, and the context (of a fused attention its log-sum-exp too)",
        "norms, activations; of a materialised attention the scores and the softmax",
        "minimal_flash",
    ),
    _entry(
        "save_dot_with_context_except_mlp",
        save(*_QKV, "attn_proj") | CONTEXT,
        "query, key, value, the context, attention's projection",
        "the MLP, norms; of a materialised attention the scores and the softmax",
    ),
    _entry(
        "save_dot_except_mlpwi",
        save(*_QKV, "attn_proj", "mlp_out"),
        "query, key, value, attention's projection; the MLP's last matmul too, where anything reads it",
        "the MLP's first matmuls, attention, norms",
    ),
    _entry(
        "save_dot_except_mlp",
        save(*_QKV, "attn_proj"),
        "query, key, value, attention's projection",
        "the MLP, attention, norms",
    ),
    _entry(
        "save_qkv_proj",
        save(*_QKV),
        "query, key, value",
        "attention and its projection, the MLP, norms",
    ),
    _entry(
        "save_out_proj",
        save("attn_proj"),
        "attention's projection",
        "query, key, value, attention, the MLP, norms",
    ),
    _entry(
        "qkv_proj_offloaded",
        save(*_QKV).to_host(),
        "the block's input; in host memory query, key, value",
        "attention and its projection, the MLP, norms",
    ),
    _entry(
        "minimal_offloaded",
        save(*_MINIMAL).to_host(),
        "the block's input; in host memory what minimal keeps",
        "norms, activations, attention",
    ),
)
"""MaxText's named policies; its ``custom`` is ``translate("maxtext", "custom", {tensor: place})``."""
