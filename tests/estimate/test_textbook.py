"""The papers' and the texts' numbers, to the digit, and what the program keeps beside them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import policies
from jremat.estimator import textbook
from jremat.estimator.config import TransformerConfig
from jremat.estimator.textbook import Shape, layer_bytes
from jremat.estimator.transformer import estimate
from tests.estimate.traced import block_residuals

DATA = Path(__file__).parent / "data"
PAPER = json.loads((DATA / "korthikanti_2022.json").read_text())
TEXTS = json.loads((DATA / "teaching_texts.json").read_text())
SIZES = ("22B", "175B", "530B", "1T")


def shape_of(size: str) -> Shape:
    row, common = PAPER["table_3"][size], PAPER["table_3"]["common"]
    m = common["interleave_m"].get(size, 1)
    return Shape(s=common["s"], v=common["v"], t=common["t"], m=m, **{k: row[k] for k in ("a", "h", "L", "p", "b")})


@pytest.mark.parametrize("technique", PAPER["table_2_bytes_per_layer"])
@pytest.mark.parametrize("size", SIZES)
def test_table_2(size, technique):
    shape = shape_of(size)
    printed = eval(PAPER["table_2_bytes_per_layer"][technique], {}, vars(shape))
    assert layer_bytes(shape, technique) == pytest.approx(printed, rel=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_percentages_of_the_tensor_parallel_baseline(size):
    shape = shape_of(size)
    techniques = ("tensor_sequence", "tensor_selective", "tensor_sequence_selective", "full")
    mine = [round(100 * layer_bytes(shape, t) / layer_bytes(shape, "tensor"), 1) for t in techniques]
    assert mine == PAPER["percent_of_tensor_parallel_baseline"][size]


def test_what_selective_alone_saves():
    for size, saved in (("175B", 70), ("530B", 65)):
        shape = replace(shape_of(size), t=1)
        assert round(100 * (1 - layer_bytes(shape, "tensor_selective") / layer_bytes(shape))) == saved


def test_the_texts_examples():
    seven = TEXTS["7B at 4K"]
    shape = Shape(**{k: seven[k] for k in ("L", "h", "a", "s", "b")})
    no_scores = layer_bytes(shape, "tensor_selective")
    assert shape.sbh == seven["sbh"]
    assert shape.L * no_scores / 1e9 == pytest.approx(seven["34sbhL_GB"], abs=0.005)
    assert round(shape.L * layer_bytes(shape) / 1e9, 1) == pytest.approx(seven["with_scores_GB"], abs=0.051)
    full = shape.L * layer_bytes(shape, "full") + no_scores
    assert f"{full / 1e9:.2f}" in seven["full_recompute_GB"]
    seventy = TEXTS["70B at 8K"]
    large = Shape(L=seventy["L"], h=seventy["h"], s=seventy["s"], b=seventy["b"], a=64)
    assert round(large.L * layer_bytes(large, "tensor_selective") / 1e9) == seventy["about_GB"]


GPT = TransformerConfig(
    vocab_size=64, num_layers=2, hidden=32, heads=4, kv_heads=4, head_dim=8, mlp_hidden=128, max_seq=16, dropout=0.1,
    compute_dtype="bfloat16", param_dtype="bfloat16",
)  # fmt: skip


@pytest.mark.parametrize("attention", ["dot", "blockwise"])
def test_the_programs_count_beside_the_papers(attention):
    config = replace(GPT, attention=attention)
    rows = textbook.beside(config, 2, 16)
    unit = 2 * 16 * 32
    assert sum(row.textbook_units for row in rows) == pytest.approx(34 + 5 * 4 * 16 / 32)
    assert (
        round(sum(row.program_units for row in rows) * unit) == block_residuals(config, policies.get("none"), 2, 16)[0]
    )
    assert all(bool(row.why) == (row.textbook != row.program) for row in rows)  # what differs says why, nothing else
    masks = [row for row in rows if "mask" in row.tensor]
    assert masks and all(row.program == "0" and row.textbook != "0" and row.why for row in masks)


def test_the_textbooks_sixteen_bytes_a_parameter():
    ledger = estimate(GPT, policies.get("full"), batch=1, seq=16, master_weights=True)
    assert ledger.state_bytes == 16 * GPT.num_params() + 4  # and a counter of steps


@pytest.mark.parametrize(
    ("change", "message"), [({"s": 0}, "s: expected"), ({"h": 1.5}, "h: expected"), ({"v": -1}, "v: expected")]
)
def test_nonsense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Shape(**({"s": 1, "b": 1, "h": 1, "a": 1} | change))
    with pytest.raises(ValueError, match="technique: expected"):
        layer_bytes(Shape(s=1, b=1, h=1, a=1), "tensr")
    with pytest.raises(ValueError, match="GELU MLP of 4h"):
        textbook.beside(replace(GPT, mlp="swiglu"), 1, 4)
