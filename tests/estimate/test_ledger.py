"""The ledger against numbers worked out by hand: state, parallelism, phases, and what is refused."""

import json
from dataclasses import replace

import pytest

import jremat
import policies
from benchmarks import estimate_peak as benchmark
from jremat.estimator.config import TransformerConfig
from jremat.estimator.ledger import PHASES
from jremat.estimator.parallel import Parallel, read_mesh
from jremat.estimator.transformer import estimate
from jremat.graph.letters import Polynomial
from jremat.planner.request import Request
from jremat.policy import FULL, NONE, Policy

CONFIG = TransformerConfig(
    vocab_size=96, num_layers=8, hidden=32, heads=4, kv_heads=4, head_dim=8, mlp_hidden=128, max_seq=16,
    compute_dtype="bfloat16",
)  # fmt: skip
B, S, H, L = 8, 16, 32, 8
UNIT = 2 * B * S * H  # bytes of one bfloat16 [b, s, h]
# A block: query, key, value and projection 4 h² + 4 h, the MLP 8 h² + 5 h, two norms 4 h
BLOCK = 12 * H * H + 13 * H
PARAMS = L * BLOCK + 96 * H + 16 * H + 2 * H


def ledger(policy: Policy = FULL, config: TransformerConfig = CONFIG, parallel: Parallel | None = None, **how):
    return estimate(config, policy, batch=B, seq=S, parallel=parallel, **how)


def bytes_of(found, name: str, whole: bool = False) -> int:
    lines = [line for line in (*found.kept, *found.lines) if line.name == name]
    assert lines, f"no line {name!r} in {sorted({line.name for line in (*found.kept, *found.lines)})}"
    return sum(line.total_bytes if whole else line.device_bytes for line in lines)


@pytest.mark.parametrize(
    ("config", "how", "a_parameter"),
    [
        (CONFIG, {}, 16),  # float32: weight, gradient, two moments
        (CONFIG, {"optimizer": "momentum"}, 12),
        (CONFIG, {"optimizer": "sgd"}, 8),
        (CONFIG, {"accumulate": 4}, 20),
        (replace(CONFIG, param_dtype="bfloat16"), {}, 8),  # optax's moments have the weights' dtype
        (replace(CONFIG, param_dtype="bfloat16"), {"master_weights": True}, 16),  # the textbook's
    ],
)
def test_bytes_a_parameter(config, how, a_parameter):
    assert config.num_params() == PARAMS
    counter = 0 if how.get("optimizer") else 4  # of steps
    assert ledger(config=config, **how).state_bytes == a_parameter * PARAMS + counter


def test_kept_of_the_stack_by_hand():
    assert ledger().kept_bytes == L * UNIT
    none = ledger(NONE, stack="chain")
    scores, stats = 2 * B * 4 * S * S, 4 * 4 * B * S
    positions, casts = 4 * S, 2 * 12 * H * H  # the executor holds positions; a scan keeps the kernels' casts
    assert none.kept_bytes == L * (16 * UNIT + scores + stats) + positions
    assert ledger(NONE, stack="scan").kept_bytes == L * (16 * UNIT + scores + stats + casts)
    assert bytes_of(none, "attn_probs") == L * scores


def test_chunks_of_the_loss_keep_no_logits():
    config = replace(CONFIG, vocab_size=96_000)
    whole, chunked = ledger(config=config), ledger(config=config, chunk=4)
    logits = 2 * B * S * 96_000
    assert whole.phase_bytes[1][1] - chunked.phase_bytes[1][1] > 0.25 * logits  # a sum of the head's gradient is there
    assert whole.kept == chunked.kept


@pytest.mark.parametrize(
    ("mesh", "weights", "grads", "moments"),
    [("data=4", 1, 1, 1), ("data=4,zero=1", 1, 1, 4), ("data=4,zero=2", 1, 4, 4), ("fsdp=4", 4, 4, 4),
     ("data=2,fsdp=2,zero=1", 2, 2, 4)],
)  # fmt: skip
def test_the_state_is_sharded(mesh, weights, grads, moments):
    found = ledger(parallel=read_mesh(mesh))
    assert bytes_of(found, "weights") == pytest.approx(4 * PARAMS / weights, abs=4)
    assert found.state_bytes == pytest.approx(4 * PARAMS * (1 / weights + 1 / grads + 2 / moments), abs=8)
    assert bytes_of(found, "optimizer moments", whole=True) == 8 * PARAMS + 4
    assert bytes_of(found, "weights", whole=True) == 4 * PARAMS
    assert bytes_of(found, "block input") == L * UNIT // 4  # the batch is shared out at any stage
    assert found.devices == 4


def test_tensor_and_sequence_parallelism_divide_what_korthikanti_divides():
    """Table 2: of a layer's tensors those along heads and MLP width by t, and with sequence parallelism all."""
    bf16 = replace(CONFIG, param_dtype="bfloat16", dropout=0.1)
    one, tensor = ledger(NONE, bf16), ledger(NONE, bf16, Parallel(tensor=4))
    both = ledger(NONE, bf16, Parallel(tensor=4, sequence=True))
    for name, ways, ways_both in (
        *((n, 4, 4) for n in ("query", "key", "value", "attn_probs", "attn_out", "mlp_up", "mlp_act")),
        *((n, 1, 4) for n in ("block_in", "attn_norm", "add", "mlp_norm", "norm_stats")),
    ):
        assert bytes_of(tensor, name) * ways == bytes_of(both, name) * ways_both == bytes_of(one, name), name
    split = L * 12 * H * H + L * (3 * H + 4 * H) + 96 * H  # kernels, the biases along heads and width, the table
    assert bytes_of(tensor, "weights") == 2 * (split // 4 + PARAMS - split)


def test_context_parallelism_divides_the_sequence_everywhere():
    one, found = ledger(NONE), ledger(NONE, parallel=Parallel(context=2))
    for name in ("query", "attn_probs", "block_in", "mlp_act"):
        assert 2 * bytes_of(found, name) == bytes_of(one, name)
    assert bytes_of(found, "weights") == bytes_of(one, "weights")


def test_pipeline_stages_hold_layers_and_micro_batches():
    found = ledger(parallel=Parallel(pipeline=4))
    assert found.stage == 0  # p micro-batches of L / p layers: as many inputs as without stages
    assert bytes_of(found, "block input") == L * UNIT
    assert bytes_of(found, "block input", whole=True) == L * UNIT
    assert bytes_of(found, "weights") == 4 * (2 * BLOCK + 96 * H + 16 * H)
    last = ledger(config=replace(CONFIG, vocab_size=96_000), parallel=Parallel(pipeline=4))
    assert last.stage == 3 and bytes_of(last, "block input") == 2 * UNIT


def test_stages_need_not_divide_the_layers():
    """28 layers on 8 stages: four on the first, which holds the inputs of 8 micro-batches in flight."""
    config = replace(CONFIG, num_layers=28)
    found = ledger(config=config, parallel=Parallel(pipeline=8))
    assert found.stage == 0
    assert bytes_of(found, "block input") == 8 * 4 * UNIT
    assert bytes_of(found, "block input", whole=True) == 28 * UNIT
    assert bytes_of(found, "weights") == 4 * (4 * BLOCK + 96 * H + 16 * H)
    assert found.recompute_flops == ledger(config=config).recompute_flops


def test_the_interleaved_schedule_is_the_papers():
    found = ledger(parallel=Parallel(pipeline=2, interleave=4))
    factor = 1 + (2 - 1) / (2 * 4)  # 1 + (p - 1) / pm, Korthikanti et al. 2022, section 4.2.3
    assert bytes_of(found, "block input") == factor * L * UNIT


def test_a_plan_of_one_policy_is_that_policy():
    for spec, policy in (("mix:2*full,rest*full", FULL), ("alternate:0", NONE), ("every_k:1", FULL)):
        for stack in ("auto", "scan"):
            assert ledger(policies.get(spec), stack=stack) == ledger(policy)
    assert ledger(policies.get("block:2"), parallel=Parallel(pipeline=4)) == ledger(parallel=Parallel(pipeline=4))


def test_offloaded_values_are_on_the_host_and_not_in_the_peak():
    kept, moved = ledger(Policy.save("mlp_up")), ledger(Policy.offload("mlp_up"))
    assert moved.host_bytes == L * 4 * UNIT and kept.host_bytes == 0
    assert kept.kept_bytes == moved.kept_bytes
    forward = lambda found: dict(found.phase_bytes)["forward"]
    assert forward(kept) - forward(moved) == pytest.approx(L * 4 * UNIT, rel=0.2)  # one layer's is on its way


def test_recomputed_flops_by_hand():
    forward = 24 * B * S * H * H + 4 * B * S * S * H
    assert ledger().forward_flops == L * forward
    assert ledger().recompute_flops == L * (forward - 8 * B * S * H * H)  # all but the last matmul
    assert ledger(NONE).recompute_flops == 0
    assert ledger(policies.get("dots_with_no_batch_dims_saveable")).recompute_flops == L * 4 * B * S * S * H
    assert ledger(policies.get("selective")).recompute_flops == L * 2 * B * S * S * H


def test_a_peak_is_the_sum_of_its_lines_and_that_of_the_traced_step():
    for found in (ledger(NONE), ledger(policies.get("every_k:3")), ledger(chunk=4)):
        assert found.peak_bytes == sum(line.device_bytes for line in found.lines)
        peaks = dict(found.phase_bytes)
        assert list(peaks) == list(PHASES) and found.peak_bytes == max(peaks.values()) == peaks[found.peak_phase]
    case = next(case for case in benchmark.cases() if case.key == "gpt2 none")
    step, args = benchmark.step_of(case)
    predicted = jremat.predicted_memory(step, *args, jax_version=benchmark.CALIBRATED)
    assert benchmark.ours(case) == pytest.approx(predicted.peak_bytes, rel=0.001)  # of Flax's own program


def test_every_formula_gives_its_bytes():
    for found in (ledger(NONE), ledger(policies.get("every_k:3")), ledger(chunk=4)):
        symbols = dict(found.symbols)
        for line in (*found.lines, *found.kept):
            formula = line.formula.replace("·", "*").replace("²", "^2").replace("floor", "FLOOR")
            assert Polynomial.of_text(formula).at(symbols) == pytest.approx(line.total_bytes, abs=8), line
        assert json.loads(json.dumps(found.to_dict()))["peak_bytes"] == found.peak_bytes


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"batch": 0}, "batch: expected a whole number of at least 1, got 0"),
        ({"seq": 0}, "seq: expected a whole number of at least 1"),
        ({"seq": 17}, "seq: expected at most max_seq=16"),
        ({"chunk": 0}, "chunk: expected"),
        ({"accumulate": 1.5}, "accumulate: expected"),
        ({"optimizer": "adam"}, "optimizer: expected 'adamw' or 'momentum' or 'sgd', got 'adam'"),
        ({"master_weights": True}, "master_weights: the weights are float32"),
        ({"stack": "loop"}, "stack: expected"),
        ({"policy": "full"}, "policy: expected a Policy or a LayerPlan"),
        ({"policy": Request("auto", label="auto")}, "policy: 'auto' needs shapes"),
        ({"policy": policies.get("every_k:2"), "stack": "scan"}, "stack: a scan runs one policy"),
        ({"policy": policies.get("block:9")}, "names 9 layers, the stack has 8"),
        ({"policy": policies.get("save:mlp_upp")}, "did you mean 'mlp_up'"),
        ({"config": 3}, "model: expected a TransformerConfig or a function"),
        ({"parallel": Parallel(data=3)}, "data: expected a divisor of batch=8, got 3"),
        ({"parallel": Parallel(tensor=8)}, "tensor: expected a divisor of heads=4, got 8"),
        ({"parallel": Parallel(context=5)}, "context: expected a divisor of seq=16, got 5"),
        ({"parallel": Parallel(pipeline=16)}, "pipeline: expected at most num_layers=8"),
    ],
)
def test_nonsense_is_refused(how, message):
    with pytest.raises(ValueError, match=message):
        how = {"config": CONFIG, "policy": FULL, "batch": B, "seq": S} | how
        estimate(how.pop("config"), **how)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"data": 0}, "data: expected a whole number of at least 1"),
        ({"zero": 3, "data": 2}, "zero: expected 0, 1 or 2"),
        ({"zero": 1}, "zero=1 shards among data replicas"),
        ({"sequence": True}, "sequence: it splits among the tensor devices"),
        ({"interleave": 2}, "interleave: chunks of a pipeline's stage"),
    ],
)
def test_degrees_that_would_do_nothing_are_refused(degrees, message):
    with pytest.raises(ValueError, match=message):
        Parallel(**degrees)


def test_a_trillion_parameters():
    config = TransformerConfig(
        vocab_size=51200, num_layers=128, hidden=25600, heads=160, kv_heads=160, head_dim=160, mlp_hidden=102400,
        max_seq=2048, param_dtype="bfloat16", compute_dtype="bfloat16",
    )  # fmt: skip
    spread = Parallel(tensor=8, sequence=True, pipeline=64)
    found = estimate(config, policies.get("selective"), batch=1, seq=2048, master_weights=True, parallel=spread)
    assert config.num_params() > 1e12
    assert 16 * 1.008e12 / 512 < found.peak_bytes < 80e9  # the paper trained it on 512 GPUs of 80 GB


def test_the_function_is_exported_whatever_is_imported_first():
    assert jremat.estimate is estimate
