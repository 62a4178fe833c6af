"""A prepared list of cases for one NVIDIA GPU that is lent for minutes.

    python scripts/bench.py --suite gpu --json gpu.json

The most telling cases come first and each row is written as it lands, so a run that is cut short has still measured
what matters: a 1B Llama at 4,096 tokens under four policies, then GPT-2 XL, then two more policies. Attention is
cuDNN's, matmuls are bfloat16; each case is first compiled for the same chip without the device, so that both figures
and the device's own stand side by side.

Beside JAX it needs flax, optax, rich and tyro. ``--suite-size small`` rehearses the same list on any machine.

Published figures to hold the MFU against, as a check that nothing is badly wrong: 41.8% for a 1B model (llm-foundry, 8
H100), 52.9% full or 49.2% half convention for Llama2-7B (JAX-Toolbox's MaxText, 8 H100).
"""

from collections.abc import Iterator
from typing import Any

from scripts.benchmark.config import Case

_FIRST = ("full", "save_only_matmuls", "none", "maxtext:minimal")
_MORE = ("torchtitan_selective_op", "dots_with_no_batch_dims_saveable")


def gpu(size: str) -> Iterator[Case]:
    """The suite's cases in the order in which they run; ``small`` is the same list at a size for any machine."""
    if size == "small":
        shape: dict[str, Any] = {
            "target": "local", "attention": "blockwise", "compute_dtype": "float32", "batch": 2, "seq": 64, "layers": 2,
            "steps": 3, "warmup": 1, "loss_chunk": 32, "described": "cpu",
        }  # fmt: skip
        llama, gpt = ("tiny-llama", shape), ("tiny", shape)
    else:
        shape = {"target": "local", "attention": "cudnn", "compute_dtype": "bfloat16", "steps": 10, "warmup": 2,
                 "described": "h200"}  # fmt: skip
        llama = ("llama-1b", shape | {"batch": 4, "seq": 4096, "loss_chunk": 1024})
        gpt = ("gpt2-xl", shape | {"batch": 8, "seq": 1024, "loss_chunk": 256})
    order = [(llama, policy) for policy in _FIRST] + [(gpt, policy) for policy in _FIRST[:3]]
    order += [(llama, policy) for policy in _MORE]
    for (model, fields), policy in order:
        yield Case(model=model, policy=policy, **fields)
