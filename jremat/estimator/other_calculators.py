"""Memory formulas of other tools, each from its published definition, on one device, to compare with.

Each gives the activations of a training step under every setting that the tool has. Its own bytes a parameter stand
beside them: all three count bf16 weights, float32 gradients, masters and two moments.
"""

from collections.abc import Mapping

from jremat.estimator.config import TransformerConfig


def megatron(config: TransformerConfig, batch: int, seq: int) -> Mapping[str, float]:
    """Activation bytes by Megatron-LM's theoretical memory report, for any recompute the same.

    34 sbh a layer, embedding input and dropout, the last norm's output and the logits in 16 bit, and 5% on top.

    Source: NVIDIA Megatron-LM, megatron/training/theoretical_memory_usage.py, compute_activation_memory_without_sp.

    >>> config = TransformerConfig(vocab_size=10, num_layers=2, hidden=4, heads=2, kv_heads=2, head_dim=2,
    ...                            mlp_hidden=16, max_seq=8)
    >>> round(megatron(config, 1, 8)["any"])  # 1.05 (68 · 32 + 8 · 8 + 32 + 2 (80 + 32))
    2621
    """
    sb, sbh = batch * seq, batch * seq * config.hidden
    layers = config.num_layers * 34 * sbh
    return {"any": 1.05 * (layers + 8 * sb + sbh + 2 * (sb * config.vocab_size + sbh))}


def cookbook(config: TransformerConfig, batch: int, seq: int) -> Mapping[str, float]:
    """Activation bytes by EleutherAI's calculator: with checkpointing 34 sbh a layer, without it the scores too.

    Source: EleutherAI cookbook, calc/calc_transformer_mem.py; there from Korthikanti et al. 2022, table 2.
    """
    sbh = batch * seq * config.hidden
    scores = 5 * config.heads * seq / config.hidden
    return {
        "checkpoint_activations": config.num_layers * 34 * sbh,
        "no checkpointing": config.num_layers * (34 + scores) * sbh,
    }


def llm_analysis(config: TransformerConfig, batch: int, seq: int) -> Mapping[str, float]:
    """Activation bytes by llm-analysis, dropout of the residual branches on as it has it, norms' inputs in float32.

    A layer: attention's input, query, key, value and context, and a mask; the MLP's input and its two wide tensors;
    two norms' inputs; attention's core, fused or with two arrays of scores. Selective recompute leaves the core out,
    full recompute all but the layer's input. On top the logits and the last norm's input.

    Source: cli99/llm-analysis, llm_analysis/analysis.py, get_activation_memory_per_layer and training.
    """
    sbh, item = batch * seq * config.hidden, 2
    fused = (2 * sbh + 4 * config.heads * seq * batch) * item
    scores = 2 * config.heads * seq**2 * batch * item
    core = scores if config.attention == "dot" else fused
    layer = 5 * sbh * item + sbh + item * sbh + 2 * item * batch * seq * config.mlp_hidden + 2 * 4 * sbh
    rest = config.vocab_size * batch * seq * item + 4 * sbh
    kept = {"none": layer + core, "attention's core": layer, "full": item * sbh}
    return {name: config.num_layers * value + rest for name, value in kept.items()}


FORMULAS = {"Megatron-LM": megatron, "EleutherAI cookbook": cookbook, "llm-analysis": llm_analysis}
"""Every formula, by the tool's name."""
