"""axlearn's remat patterns, in our tensors' names.

axlearn keeps by regular expression over its tensor names and may send what it keeps to the host. The sets below are
those of its models; any other is a ``save:`` and an ``offload:`` of our own names (a name in both is refused there and
here).
"""

from jremat.policy import Policy
from jremat.policy.ops import ATTENTION
from policies.entry import Entry
from policies.maxtext import CONTEXT

_QKV = ("query", "key", "value")
_FFN1 = Policy.save("mlp_gate", "mlp_up").with_optional("mlp_gate")


def _entry(name: str, policy: Policy, kept: str, recomputed: str, pattern: str) -> Entry:
    spec = f"axlearn:{name}"
    return Entry(
        spec,
        policy.labelled(spec),
        kept,
        recomputed,
        f"axlearn {pattern}",
        "axlearn/common/attention.py, RematRegexSavePatterns and build_remat_spec; flash_attention/remat.py",
    )


ENTRIES = (
    _entry(
        "qkv_proj",
        Policy.save(*_QKV),
        "query, key, value",
        "attention and its projection, the MLP, norms",
        "[qkv]_proj",
    ),
    _entry(
        "self_attention",
        Policy.save(*_QKV, "attn_proj") | CONTEXT,
        "query, key, value, the context, attention's projection",
        "the MLP, norms; of a materialised attention the scores and the softmax",
        "[qkvo]_proj and context",
    ),
    _entry(
        "flash_attention",
        Policy.ops(ATTENTION),
        "a fused attention's output and log-sum-exp; nothing where attention is materialised",
        "query, key, value, attention's projection, the MLP, norms",
        "save_or_offload_flash_attention_policy()",
    ),
    _entry(
        "feed_forward",
        Policy.save("mlp_out") | _FFN1,
        "the MLP's projections",
        "attention and its projections, norms, activations",
        "linear1_.*|linear2_.*",
    ),
    _entry(
        "qkv_proj_offloaded",
        Policy.offload(*_QKV),
        "the block's input; in host memory query, key, value",
        "attention and its projection, the MLP, norms",
        "save_and_offload_only_these_names_regex(offload [qkv]_proj)",
    ),
)
"""The sets that axlearn's own models use."""
