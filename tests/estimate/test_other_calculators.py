"""Other tools' formulas against their definitions, worked out for one small layer."""

from dataclasses import replace

import pytest

from jremat.estimator.config import TransformerConfig
from jremat.estimator.other_calculators import cookbook, llm_analysis, megatron
from jremat.estimator.textbook import Shape, layer_bytes

CONFIG = TransformerConfig(
    vocab_size=100, num_layers=3, hidden=8, heads=2, kv_heads=2, head_dim=4, mlp_hidden=32, max_seq=4
)
B, S = 2, 4
SBH, SCORES = B * S * 8, B * 2 * S * S  # 64, 64


def test_layers_follow_korthikanti_where_they_say_so():
    shape = Shape(s=S, b=B, h=8, a=2)
    assert cookbook(CONFIG, B, S)["no checkpointing"] == 3 * layer_bytes(shape)
    assert cookbook(CONFIG, B, S)["checkpoint_activations"] == 3 * layer_bytes(shape, "tensor_selective")
    assert megatron(CONFIG, B, S)["any"] == pytest.approx(1.05 * (3 * 34 * SBH + 8 * 8 + SBH + 2 * (800 + SBH)))


def test_llm_analysis_by_hand():
    rest = 800 * 2 + 4 * SBH
    layer = 10 * SBH + SBH + 2 * SBH + 16 * SBH + 8 * SBH
    dot = llm_analysis(CONFIG, B, S)
    assert dot == {
        "none": 3 * (layer + 4 * SCORES) + rest,
        "attention's core": 3 * layer + rest,
        "full": 6 * SBH + rest,
    }
    fused = llm_analysis(replace(CONFIG, attention="blockwise"), B, S)
    assert fused["none"] == 3 * (layer + 2 * (2 * SBH + 4 * 2 * S * B)) + rest
