"""What ``torch.compile`` keeps under ``activation_memory_budget``: AOTAutograd's partitioner, run on the CPU."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config as functorch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor


def budget_bytes(forward: Callable[..., Tensor], inputs: tuple[Tensor, ...], budget: float) -> int:
    """Bytes that the compiled forward keeps for the backward, what it is given left out; storages counted once.

    Args:
        forward: of tensors alone; parameters among them.
        inputs: its arguments; those that are differentiated require gradients.
        budget: 0 keeps the inputs alone, 1 what min-cut finds fastest.
    """
    found: list[int] = []

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        parts = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        found.append(_kept_bytes(parts[0], num_fwd_outputs))
        return parts

    as_it_is = lambda module, inputs: make_boxed_func(module.forward)
    with _set(budget):
        compiled = aot_function(forward, fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition)
        compiled(*inputs)
    return found[0]


def _kept_bytes(module: Any, num_fwd_outputs: int) -> int:
    """What the forward graph hands on beside its own outputs, less views of what it was given."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    handed_on = output.args[0]
    skipped = {_storage(node) for node in module.graph.nodes if node.op == "placeholder"}
    skipped |= {_storage(node) for node in handed_on[:num_fwd_outputs]}
    sizes = {
        _storage(node): node.meta["val"].untyped_storage().nbytes()
        for node in handed_on[num_fwd_outputs:]
        if isinstance(node.meta.get("val"), Tensor)
    }
    return sum(size for key, size in sizes.items() if key not in skipped)


def _storage(node: Any) -> Any:
    value = node.meta.get("val") if hasattr(node, "meta") else None
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else node


@contextmanager
def _set(budget: float) -> Any:
    with functorch.patch(activation_memory_budget=budget, activation_memory_budget_runtime_estimator="flops"):
        torch._dynamo.reset()
        yield
