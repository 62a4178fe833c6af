"""PyTorch measured anew: bytes kept and FLOPs recomputed, against figures measured with torch 2.13.0, CPU build.

Bytes in units of 4·b·s·h a layer, the stack's input and output left out.
"""

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")

from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from policies.torch_contexts import every_second
from scripts.compare.torch_budget import budget_bytes
from scripts.compare.torch_kept import kept, work
from tests.torch.reference_stack import LAYERS, B, H, S, U, stack

ATEN = torch.ops.aten
MM, BMM = [ATEN.mm.default, ATEN.addmm.default], [ATEN.bmm.default]
SDPA = [ATEN._scaled_dot_product_flash_attention_for_cpu.default]
FORWARD_FLOPS = LAYERS * (24 * B * S * H**2 + 4 * B * S**2 * H)


def each(layers, x, **how):
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False, **how)
    return x


def bare(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def listed(ops):
    return partial(each, context_fn=partial(create_selective_checkpoint_contexts, ops))


def nested(layers, x):
    pair = lambda first, x: each(layers[first : first + 2], x)
    for first in range(0, LAYERS, 2):
        x = checkpoint(pair, first, x, use_reentrant=False)
    return x


def pairs(layers, x):
    pair = lambda first, x: bare(layers[first : first + 2], x)
    for first in range(0, LAYERS, 2):
        x = checkpoint(pair, first, x, use_reentrant=False)
    return x


WAYS = {
    "none": bare,
    "checkpoint": each,
    "mm": listed(MM),
    "mm bmm": listed(MM + BMM),
    "mm sdpa": listed(MM + SDPA),
    "every second mm": partial(
        each, context_fn=every_second(("mm", "addmm"), ("bmm", "_scaled_dot_product_flash_attention_for_cpu"))
    ),
    "sequential": lambda layers, x: checkpoint_sequential(layers, 2, x, use_reentrant=False),
    "pairs": pairs,
    "nested pairs": nested,
    "whole": partial(each, early_stop=False),
    "reentrant": lambda layers, x: [x := checkpoint(layer, x, use_reentrant=True) for layer in layers][-1],
}
# (written-out attention, fused attention)
KEPT = {
    "none": (17.765625, 15.78125),
    "checkpoint": (0.75, 0.75),
    "mm": (9.75, 9.75),
    "mm bmm": (12.75, 9.75),
    "mm sdpa": (9.75, 10.765625),
    "every second mm": (10.75, 8.765625),
    "sequential": (9.0078125, 8.015625),
}
RECOMPUTED = {
    "none": 0.0,
    "checkpoint": 0.6923,
    "whole": 1.0,
    "reentrant": 1.0,
    "mm": 0.0769,
    "mm bmm": 0.0,
    "sequential": 0.4231,
    "pairs": 0.8462,
    "nested pairs": 1.1923,
}
BUDGETS = {0.0: 0, 0.25: 17, 0.5: 35, 0.75: 47, 1.0: 71.0625}


@pytest.mark.parametrize("fused", [False, True], ids=["written out", "fused"])
@pytest.mark.parametrize("way", KEPT)
def test_bytes_kept(way, fused):
    layers, x = stack(fused)
    rows = kept(lambda tag: WAYS[way](layers, x))
    assert sum(row.bytes for row in rows) / U / LAYERS == KEPT[way][fused]


@pytest.mark.parametrize("way", RECOMPUTED)
def test_flops_recomputed(way):
    layers, x = stack(False)
    counted = work(lambda: WAYS[way](layers, x))
    assert counted.forward_flops == FORWARD_FLOPS
    assert counted.recomputed_flops / FORWARD_FLOPS == pytest.approx(RECOMPUTED[way], abs=5e-5)


def test_a_fused_attention_is_counted_as_its_two_matmuls():
    layers, x = stack(True)
    counted = work(lambda: each(layers, x))
    assert counted.forward_flops == FORWARD_FLOPS
    assert counted.recomputed_flops / FORWARD_FLOPS == pytest.approx(0.6923, abs=5e-5)
    assert (counted.forward_matmuls, counted.recomputed_matmuls) == (4 * LAYERS, 3 * LAYERS)


@pytest.mark.parametrize("budget", BUDGETS)
def test_bytes_kept_under_a_memory_budget(budget):
    layers, x = stack(False)
    module = torch.nn.Sequential(*layers)
    state = dict(module.named_parameters()) | dict(module.named_buffers())

    def forward(x, *tensors):
        return torch.func.functional_call(module, dict(zip(state, tensors)), (x,))

    assert budget_bytes(forward, (x, *state.values()), budget) / U == BUDGETS[budget]
