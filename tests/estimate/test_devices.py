"""The ledger of one device of several: its lines by hand, and against what is compiled for eight."""

import dataclasses
import json
import statistics

import pytest

from benchmarks import estimate_peak_devices as benchmark
from jremat.estimate.config import TransformerConfig
from jremat.estimate.parallel import Parallel
from jremat.estimate.transformer import estimate
from jremat.policy import FULL, NONE

B, S, H, F, V, L = 8, 16, 32, 96, 64, 4
LLAMA = TransformerConfig(
    vocab_size=V, num_layers=L, hidden=H, heads=4, kv_heads=4, head_dim=8, mlp_hidden=F, max_seq=S, norm="rmsnorm",
    mlp="swiglu", positions="rope", bias=False, compute_dtype="bfloat16", attention="blockwise",
)  # fmt: skip
STREAM = 2 * B * S * H


def lines(policy=FULL, config=LLAMA, **degrees):
    found = estimate(config, policy, batch=B, seq=S, parallel=Parallel(**degrees))
    return {line.name: line for line in found.lines}


def test_a_share_of_the_weights_is_updated_and_all_are_gathered():
    held = 4 * LLAMA.num_params()
    for zero in (1, 2):
        found = lines(data=4, zero=zero)
        assert found["weights updated, gathered"].device_bytes == held
        assert found["updates, this device's share"].device_bytes == held // 4
        assert found["weights updated, gathered"].alive == ("update",)
    assert "weights updated, gathered" not in lines(data=4, zero=3) | lines(data=4)
    sgd = estimate(LLAMA, FULL, batch=B, seq=S, parallel=Parallel(data=4, zero=1), optimizer="sgd")
    assert "weights updated, gathered" not in {line.name for line in sgd.lines}  # nothing is shared out


def test_under_zero_1_whole_gradients_end_where_shares_begin():
    found = lines(data=4, zero=1)
    assert "update" not in found["gradients of the layers"].alive
    assert found["gradients, this device's share"].device_bytes == 4 * LLAMA.num_params() // 4


def test_weights_are_gathered_in_the_compute_dtype_and_kept_as_shares():
    layer = LLAMA.block_params()
    none, full = lines(NONE, data=4, zero=3), lines(data=4, zero=3)
    assert none["weights of one layer, gathered"].device_bytes == 2 * layer
    assert "weights of one layer, gathered" not in full  # the casts that are made again are they
    assert full["made again: mlp_up kernel"].device_bytes == 2 * H * F
    assert none["mlp_up kernel"].device_bytes * 4 == lines(NONE, data=4)["mlp_up kernel"].device_bytes == L * 2 * H * F


def test_weights_cut_across_are_laid_out_anew():
    # of gate and up [h, f] the longest axis is the second, of attention's output [n, d, h] the last
    across = 4 * L * (2 * H * F + H * H)
    assert lines(data=4, zero=3)["weights laid out for the gather"].device_bytes == across // 4
    # where tensor parallelism has taken f, gate and up are cut along h, their first
    both = lines(data=2, zero=3, tensor=2)["weights laid out for the gather"]
    assert both.device_bytes == 4 * L * H * H // 4
    square = lines(config=dataclasses.replace(LLAMA, mlp_hidden=H), data=4, zero=3)
    assert square["weights laid out for the gather"].device_bytes == 4 * L * H * H // 4


def test_the_logits_gradient_waits_where_the_heads_is_shared_out():
    untied = dataclasses.replace(LLAMA, tied_embeddings=False)
    for degrees, waits in (({"data": 4, "zero": 3}, True), ({"data": 4}, False), ({"tensor": 4}, False)):
        found = lines(config=untied, **degrees)
        assert ("attention" in found["head: logits"].alive) is waits
        assert ("attention" in found["gradient of the head"].alive) is not waits
    tied = lines(data=4, zero=3)["gradient of the tied table, whole"]
    assert tied.device_bytes == 4 * V * H - 2 * (B // 4) * S * V  # beyond the logits that wait for it


def test_tensor_parallelism_holds_partial_sums_and_gathers_the_sequence():
    name = "stream, gathered or in partial sums"
    assert lines(tensor=4)[name].device_bytes == 2 * STREAM
    assert lines(tensor=4, sequence=True)[name].device_bytes == (2 + 2 + 3) * STREAM
    assert lines(NONE, tensor=4, sequence=True)[name].device_bytes == (2 + 2) * STREAM
    assert lines(data=2, tensor=4)[name].device_bytes == 2 * STREAM // 2


@pytest.fixture(scope="module")
def recorded():
    found = json.loads(benchmark.FILE.read_text())
    assert {case.key for case in benchmark.cases()} == found.keys() and len(found) > 25
    return [(case, benchmark.ledger_of(case), found[case.key]) for case in benchmark.cases()]


def test_state_of_one_device_is_what_is_compiled(recorded):
    for case, ledger, compiled in recorded:
        own = sum(x.device_bytes for x in ledger.lines if x.name in ("weights", "optimizer moments"))
        # beside them the tokens; biases and norms of a size that eight don't divide stay whole
        assert own == pytest.approx(compiled["lines"]["weights, optimizer"], rel=0.005), case.key


def test_every_recorded_peak_of_one_device_is_met(recorded):
    errors = {case.key: ledger.peak_bytes / compiled["peak_bytes"] - 1 for case, ledger, compiled in recorded}
    assert {key: error for key, error in errors.items() if abs(error) > 0.11} == {}
    assert statistics.median(map(abs, errors.values())) < 0.03


def test_a_step_compiled_for_eight_devices():
    fsdp = next(case for case in benchmark.cases() if case.key == "FSDP full")
    case = dataclasses.replace(fsdp, changes=fsdp.changes | {"num_layers": 4, "kv_heads": 32})
    compiled, ledger = benchmark.measure(case), benchmark.ledger_of(case)
    lines = benchmark.lines_of(ledger)
    assert ledger.peak_bytes == pytest.approx(compiled["peak_bytes"], rel=0.10)
    for name, share in (("weights, optimizer", 0.01), ("gradients of layers", 0.01), ("kept", 0.05)):
        assert lines[name] == pytest.approx(compiled["lines"][name], rel=share), name
