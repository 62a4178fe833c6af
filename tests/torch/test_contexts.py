"""The zoo's policies running in PyTorch, against counts on paper and beside JAX's; a GPT of the reference's size.

Units: 4·b·s·h bytes a layer, the stack's input counted; FLOPs as a share of the forward's.
"""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")

import policies
from jremat.estimator.config import TransformerConfig
from models.torch_twin import one_by_one
from policies.torch_contexts import stack_run
from policies.torch_expression import NotExpressible
from scripts.compare import jax_side, torch_side
from scripts.compare.rows import differences
from tests.models.test_block_bytes import BIG, BIG_LLAMA, GPT_DOT

SIZES = {
    "gpt": replace(BIG, hidden=64, head_dim=16, mlp_hidden=256, max_seq=32, num_layers=2),
    "llama": replace(BIG_LLAMA, hidden=64, head_dim=16, mlp_hidden=176, max_seq=32, num_layers=2),
}
B, S, H = 2, 32, 64
UNIT = 4 * B * S * H * 2  # of both layers
PROBS = 4 * S / H
SCORES = (4 * B * S * S * H) / (24 * B * S * H * H + 4 * B * S * S * H)  # both bmm, of a GPT's forward
STATS = 4 / H


@pytest.fixture(scope="module")
def sides():
    def make(family: str, **changes):
        config: TransformerConfig = replace(SIZES[family], **changes)
        size = jax_side.Size(config, B, S)
        random = np.random.default_rng(0)
        import jax

        params = jax.tree.map(lambda p: (0.05 * random.standard_normal(p.shape)).astype(p.dtype), size.params)
        tokens = random.integers(0, config.vocab_size, (B, S + 1), np.int32)
        return size, torch_side.twin(config, params, tokens[:, :-1], tokens[:, 1:])

    made: dict = {}
    return lambda family, **changes: made.setdefault((family, *changes.items()), make(family, **changes))


def run_of(spec, size):
    plan = jax_side.plan_of(spec, size)
    return plan, stack_run(plan, size.config.num_layers, torch_side.calls(size.config))


NONE = 16 + PROBS + STATS
# values kept, and FLOPs recomputed, in PyTorch
GPT = {
    "none": (NONE, 0.0),
    "full": (1, None),
    "dots_saveable": (11 + PROBS, 0.0),  # input, query, key, value, scores, context, projection, up, out
    "dots_with_no_batch_dims_saveable": (10, SCORES),
    "selective": (NONE - PROBS, SCORES / 2),
    "megatron:mlp": (NONE - 8, None),
    "maxtext:save_qkv_proj": (4, None),
    "save:mlp_up": (5, None),
    "alternate:2": ((1 + NONE) / 2, None),
    "block:1,dots_with_no_batch_dims_saveable": ((10 + NONE) / 2, SCORES / 2),
    "offload_inputs": (1, None),
}


@pytest.mark.parametrize("spec", GPT)
def test_what_a_gpt_keeps_and_does_again(spec, sides):
    size, twin = sides("gpt")
    assert pytest.approx(16 + 4 * 128 / 256 + 4 / 256) == GPT_DOT  # the same count at the reference's size
    plan, run = run_of(spec, size)
    found, work = torch_side.kept_bytes(twin, run), torch_side.stack_work(twin, run)
    values, share = GPT[spec]
    assert sum(found.values()) == values * UNIT
    ours = jax_side.measured_stack(plan, size)
    assert ours.kept_bytes <= sum(found.values())
    assert work.forward_flops == ours.forward_flops == 2 * (24 * B * S * H * H + 4 * B * S * S * H)
    if share is not None:
        assert work.recomputed_flops / work.forward_flops == pytest.approx(share, rel=1e-9)
    assert ours.recomputed_flops <= work.recomputed_flops


@pytest.mark.parametrize("spec", ["every_k:2", "every_k:2,full"])
def test_a_group_is_replayed_with_no_more_flops_than_in_pytorch(spec, sides):
    size, twin = sides("gpt")
    plan, run = run_of(spec, size)
    assert jax_side.measured_stack(plan, size).recomputed_flops <= torch_side.stack_work(twin, run).recomputed_flops


@pytest.mark.parametrize(("spec", "layers"), [("every_k:2", 1), ("every_k:2,full", 1)])
def test_a_group_keeps_its_input_alone(spec, layers, sides):
    size, twin = sides("gpt")
    plan, run = run_of(spec, size)
    ours = jax_side.measured_stack(plan, size).kept_bytes
    assert ours == sum(torch_side.kept_bytes(twin, run).values()) == layers * UNIT // 2


@pytest.mark.parametrize("spec", ["none", "full", "dots_saveable", "torchtitan_selective_op", "save:query,mlp_gate"])
@pytest.mark.parametrize("attention", ["dot", "blockwise"])
def test_a_llama_keeps_and_does_again_no_more_in_jax(spec, attention, sides):
    size, twin = sides("llama", attention=attention)
    plan, run = run_of(spec, size)
    theirs, ours = torch_side.kept_bytes(twin, run), jax_side.measured_stack(plan, size)
    assert ours.kept_bytes <= sum(theirs.values())
    assert ours.recomputed_flops <= torch_side.stack_work(twin, run).recomputed_flops
    differing = {row["tensor"] for row in differences(ours.kept, theirs, ours.kept, listed=False)}
    if spec == "none":  # each RMSNorm's product before its scale, and SiLU's output: PyTorch's derivatives read them
        assert differing == {"(silu)", "(mul)"}
        assert theirs["(silu)"] == 2 * 4 * B * S * 176


def test_sac_keeps_the_blocks_last_matmul_which_jax_does_not(sides):
    size, twin = sides("gpt")
    plan, run = run_of("dots_with_no_batch_dims_saveable", size)
    theirs, ours = torch_side.kept_bytes(twin, run), jax_side.measured_stack(plan, size).kept
    assert set(theirs) - set(ours) == {"mlp_out"}
    assert {name: theirs[name] for name in ours} == ours


@pytest.mark.parametrize(
    "spec", ["full", "dots_saveable", "selective", "megatron:layernorm", "save:mlp_up", "every_k:2"]
)
@pytest.mark.parametrize("family", SIZES)
def test_gradients_and_dropouts_masks_are_those_without_checkpointing(spec, family, sides):
    size, twin = sides(family, dropout=0.1)
    same, other = torch_side.dropout_error(twin, run_of(spec, size)[1])
    assert same <= 1e-6 < 1e-2 < other


def test_bytes_under_a_budget_grow_with_it_and_start_at_the_stacks_input(sides):
    _, twin = sides("gpt")
    found = [torch_side.budgeted_bytes(twin, budget) for budget in (0.0, 0.5, 1.0)]
    assert found[0] == UNIT // 2
    assert found == sorted(found)
    assert found[-1] == sum(torch_side.kept_bytes(twin, one_by_one).values())


def test_a_name_that_no_call_makes_is_refused(sides):
    size, _ = sides("gpt")
    with pytest.raises(NotExpressible, match="no call of this block makes 'mlp_gate'"):
        run_of("save:mlp_gate", size)


def test_the_peak_with_full_remat_is_below_that_without():
    config = replace(SIZES["gpt"], num_layers=4, max_seq=64)
    random = np.random.default_rng(0)
    size = jax_side.Size(config, 8, 64)
    import jax

    params = jax.tree.map(lambda p: (0.05 * random.standard_normal(p.shape)).astype(p.dtype), size.params)
    tokens = random.integers(0, config.vocab_size, (8, 64), np.int32)
    twin = torch_side.twin(config, params, tokens, tokens)
    none, full = (torch_side.peak(twin, run) for run in (one_by_one, run_of("full", size)[1]))
    kept = [sum(torch_side.kept_bytes(twin, run).values()) for run in (one_by_one, run_of("full", size)[1])]
    assert 0.5 * (kept[0] - kept[1]) < none - full <= kept[0] - kept[1]
    assert policies.get("full").spec == "full"
