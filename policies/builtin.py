"""The policies that JAX has under these names, ours beside them, and the forms by name and by operation."""

from jremat.policy import FAMILIES, FULL, NONE, Policy
from jremat.policy.ops import ATTENTION, CONV, MATMUL, SCALED_MATMUL, WEIGHT_MATMUL
from policies.entry import Entry

# Every tensor that a block's backward pass reads, by name; the norms' statistics come beside them.
ALL = (
    *("attn_norm", "query", "key", "value", "attn_probs", "attn_out"),
    *("residual", "mlp_norm", "mlp_gate", "mlp_up", "mlp_act"),
)
# What the weight matmuls make of it; the last, mlp_out, is read by nobody.
_PROJECTIONS = ("query", "key", "value", "attn_proj", "mlp_gate", "mlp_up")
_DOTS = (*_PROJECTIONS, "attn_scores", "attn_out")

DOTS = Policy.ops(MATMUL, CONV, SCALED_MATMUL)
WEIGHT_DOTS = Policy.ops(WEIGHT_MATMUL)
CORE_ATTENTION = Policy.but("attn_scores", "attn_probs", "attn_dropped").with_optional("attn_dropped")

_JAX = "jax/_src/ad_checkpoint.py, checkpoint_policies"
_OPS = " ".join(family.name for family in FAMILIES)


def _entry(
    spec: str,
    policy: Policy,
    kept: str,
    recomputed: str,
    elsewhere: str,
    source: str,
    aliases: tuple[str, ...] = (),
    aten: tuple[str, ...] = (),
) -> Entry:
    return Entry(spec, policy.labelled(spec), kept, recomputed, elsewhere, source, aliases, aten)


ENTRIES = (
    _entry(
        "none",
        NONE,
        "everything that the backward pass reads",
        "nothing",
        "no checkpointing; praxis and jax: everything (beware: MaxText's `none` is `full`)",
        _JAX,
        aliases=("everything_saveable",),
    ),
    _entry(
        "full",
        FULL,
        "the block's input",
        "the whole block, but for its last matmul, which the backward pass never reads",
        "checkpoint(block, use_reentrant=False); HF gradient_checkpointing; Megatron full/uniform/1",
        _JAX + "; Chen et al. 2016, arXiv 1604.06174",
        aliases=("nothing_saveable",),
    ),
    _entry(
        "dots_saveable",
        DOTS,
        "what every matmul and convolution makes, scores included; a fused attention is no matmul here",
        "norms, activations, softmax; a fused attention",
        "SAC list mm, addmm, bmm, convolution",
        _JAX,
        aliases=("checkpoint_dots",),
        aten=(*MATMUL.aten, *CONV.aten, *SCALED_MATMUL.aten),
    ),
    _entry(
        "dots_with_no_batch_dims_saveable",
        WEIGHT_DOTS,
        "what the weight matmuls make",
        "norms, activations, attention (materialised or fused)",
        "SAC list mm, addmm",
        _JAX,
        aliases=("checkpoint_dots_with_no_batch_dims",),
        aten=WEIGHT_MATMUL.aten,
    ),
    _entry(
        "save_only_matmuls",
        Policy.ops(WEIGHT_MATMUL, ATTENTION),
        "what the weight matmuls make, and a fused attention's output and log-sum-exp",
        "norms, activations; materialised attention",
        "SAC list mm, addmm, scaled_dot_product_attention",
        "PyTorch, torch/utils/checkpoint.py, create_selective_checkpoint_contexts",
        aten=(*WEIGHT_MATMUL.aten, *ATTENTION.aten),
    ),
    _entry(
        "selective",
        CORE_ATTENTION,
        "everything but the attention core",
        "scores, softmax and its dropout; no use under fused attention, and refused there by jremat.checkpoint",
        "Megatron --recompute-activations, --recompute-granularity selective",
        "Korthikanti et al. 2022, arXiv 2205.05198, section 5 (there the context is recomputed too)",
        aliases=("core_attn",),
    ),
    _entry(
        "offload_dots",
        DOTS.to_host(),
        "the block's input; in host memory what dots_saveable keeps",
        "norms, activations, softmax; a fused attention",
        "no peer in eager PyTorch: save_on_cpu around a SAC list doesn't see what the list keeps",
        "torch/autograd/graph.py, save_on_cpu, beside torch/utils/checkpoint.py, whose own hooks stand inside it",
    ),
    _entry(
        "offload_dots_with_no_batch_dims",
        WEIGHT_DOTS.to_host(),
        "the block's input; in host memory what the weight matmuls make",
        "norms, activations, attention",
        "jax offload_dot_with_no_batch_dims; praxis offload_dot_with_no_batch_dims",
        _JAX,
    ),
    _entry(
        "offload_inputs",
        Policy.offload("block_in"),
        "in host memory the block's input",
        "the whole block, but for its last matmul",
        "DeepSpeed cpu_checkpointing; save_on_cpu around checkpoint",
        "DeepSpeed, runtime/activation_checkpointing/checkpointing.py",
    ),
    Entry(
        "save:NAME[,NAME…]",
        Policy.save("attn_out", "mlp_up"),
        "the block's input and the tensors named; NAME? need not exist",
        "the rest",
        "jax save_only_these_names; MUST_SAVE by hand",
        _JAX,
    ),
    Entry(
        "offload:NAME[,NAME…]",
        Policy.offload("attn_out", "mlp_up"),
        "the block's input; in host memory the tensors named",
        "the rest",
        "jax save_and_offload_only_these_names; MUST_CPU_OFFLOAD",
        _JAX,
    ),
    Entry(
        "but:NAME[,NAME…]",
        Policy.but("attn_norm", "mlp_norm"),
        "everything but the tensors named",
        "the tensors named, from what is kept",
        "Megatron's output-discarding modules (jax save_anything_except_these_names keeps all)",
        "Megatron, core/tensor_parallel/random.py, CheckpointWithoutOutput",
    ),
    Entry(
        "ops:FAMILY[+FAMILY…]",
        Policy.ops(MATMUL, ATTENTION),
        f"the block's input and what the families' operations make; families: {_OPS} matmul",
        "the rest",
        "a SAC list",
        "jremat/policy/ops.py",
        aten=(*MATMUL.aten, *ATTENTION.aten),
    ),
    Entry(
        "RULE;RULE…",
        Policy.save("attn_out") | Policy.offload("mlp_up"),
        "what any rule keeps; rules: save offload but ops offload_ops but_ops, after none or offload_all if that is "
        "the default; a rule by name goes before one by family",
        "the rest",
        "jax save_from_both_policies, which refuses offloads",
        _JAX,
    ),
)
"""JAX's own policies, the text's, and the forms by name and by operation."""
