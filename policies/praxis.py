"""praxis' checkpoint types, in our tensors' names."""

from jremat.policy import FULL, NONE, Policy
from policies.builtin import DOTS, WEIGHT_DOTS
from policies.entry import Entry
from policies.maxtext import CONTEXT

_QKV = ("query", "key", "value")
_PROJECTIONS = (*_QKV, "attn_proj", "mlp_gate", "mlp_up")
_DOTS = (*_PROJECTIONS, "attn_scores", "attn_out")
_FFN1 = Policy.save("mlp_gate", "mlp_up").with_optional("mlp_gate")


def _entry(name: str, policy: Policy, kept: str, recomputed: str, *aliases: str) -> Entry:
    spec = f"praxis:{name}"
    return Entry(
        spec,
        policy.labelled(spec),
        kept,
        recomputed,
        f"praxis AutodiffCheckpointType {name}",
        "praxis/layers/checkpoint_policy.py, custom_policy",
        aliases=tuple(f"praxis:{alias}" for alias in aliases),
    )


_MLPERF = Policy.save(*_QKV, "attn_proj") | CONTEXT
_MLP = "the MLP, norms; of a materialised attention the scores and the softmax"

ENTRIES = (
    _entry("save_nothing", FULL, "the block's input", "the whole block, but for its last matmul"),
    _entry("save_everything", NONE, "everything that the backward pass reads", "nothing"),
    _entry(
        "save_dot_only",
        DOTS,
        "what every matmul and convolution makes",
        "norms, activations, softmax; a fused attention",
    ),
    _entry(
        "save_dot_with_no_batch_dims",
        WEIGHT_DOTS,
        "what the weight matmuls make",
        "norms, activations, attention",
    ),
    _entry(
        "offload_dot_with_no_batch_dims",
        WEIGHT_DOTS.to_host(),
        "the block's input; in host memory what the weight matmuls make",
        "norms, activations, attention",
    ),
    _entry(
        "save_qkv_out_proj",
        Policy.save(*_QKV, "attn_proj"),
        "query, key, value, attention's projection",
        "the MLP, attention, norms",
        "save_qkv_out_proj_separate",
    ),
    _entry(
        "save_out_proj",
        Policy.save("attn_proj"),
        "attention's projection",
        "query, key, value, attention, the MLP, norms",
    ),
    _entry(
        "save_context",
        CONTEXT,
        "the context (of a fused attention its log-sum-exp too)",
        "query, key, value, scores and softmax, attention's projection, the MLP, norms",
    ),
    _entry(
        "save_encoded_and_out_proj",
        Policy.save("attn_proj") | CONTEXT,
        "the context (of a fused attention its log-sum-exp too), attention's projection",
        "query, key, value, scores and softmax, the MLP, norms",
    ),
    _entry(
        "save_dot_for_mlperf_200b",
        _MLPERF,
        "query, key, value, the context, attention's projection",
        _MLP,
    ),
    _entry(
        "save_dot_except_logits_ffn1",
        _MLPERF | Policy.save("mlp_out"),
        "query, key, value, the context, attention's projection; the MLP's last matmul too, where anything reads it",
        _MLP,
    ),
    _entry(
        "save_dot_except_logits",
        _MLPERF | Policy.save("mlp_out") | _FFN1,
        "query, key, value, the context, attention's projection, the MLP's projections",
        "norms, activations; of a materialised attention the scores and the softmax",
    ),
    _entry(
        "save_quantized",
        _MLPERF | Policy.save("qlhs", "qrhs", "lhs_scale", "rhs_scale").with_optional(),
        "query, key, value, the context, attention's projection; of quantized matmuls the operands and their scales",
        _MLP,
    ),
    _entry(
        "save_unet_conv",
        Policy.save("conv_out"),
        "a U-Net block's last convolution, on a model so tagged",
        "the rest of the block",
    ),
    _entry(
        "save_unet_all_conv",
        Policy.save("conv_0", "conv_1", "conv_out"),
        "every convolution of a U-Net block, on a model so tagged",
        "norms and activations",
    ),
    _entry(
        "save_iteration_input",
        Policy.save("block_in"),
        "the block's input",
        "the whole block, but for its last matmul",
        "save_transformer_layer_output",
    ),
)
"""Every type of praxis'; the U-Net's and the quantized operands stand under their own names there."""
