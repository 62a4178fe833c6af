"""Blocks under ``torch.compile``'s ``activation_memory_budget``: AOTAutograd's partitioner, on any device.

The partitioner decides what is kept and what is recomputed. Its graphs are run by eager PyTorch's kernels, as what
Inductor would make of them keeps and does again the same.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch._functorch.config as functorch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch.func import functional_call
from torch.fx import Interpreter

from models.torch_twin import Layer, Shared, Tag, untagged
from policies.torch_contexts import Call, Calls, op_of

DRAWN_AGAIN = "https://github.com/pytorch/pytorch/issues/190758"
"""PyTorch's fault, also of 2.13.0: under a budget below 1 the backward may draw a dropout's mask anew."""


class Budgeted:
    """Runs a stack, each block compiled under the budget: ``run(layers, x)``. Equal blocks share one program."""

    def __init__(self, budget: float, calls: Calls) -> None:
        """
        Args:
            budget: 0 keeps the blocks' inputs alone, 1 what min-cut finds fastest.
            calls: of a block, by which a tensor that its program keeps is known.
        """
        self.budget = budget
        self.names = {call: name for name, call in calls.makers.items()}
        self.programs: dict[Any, Callable[..., Tensor]] = {}
        self.tag: Tag = untagged

    def __call__(self, layers: Sequence[Layer], x: Tensor) -> Tensor:
        """x [b, s, h] through the layers of a ``models.torch_twin.Transformer``."""
        for layer in layers:
            x = self._block(layer, x)
        return x

    def _block(self, layer: Any, x: Tensor) -> Tensor:
        block, shared, self.tag = layer.func, layer.keywords["shared"], layer.keywords.get("tag", untagged)
        parameters = dict(block.named_parameters())
        given = {name: value for name, value in vars(shared).items() if value is not None}
        key, inputs = (block.config, x.shape), (self.tag("block_in", x), *parameters.values(), *given.values())
        if key in self.programs:
            return self.programs[key](*inputs)
        self.programs[key] = program = self._compiled(block, tuple(parameters), tuple(given))
        with _set(self.budget):  # the first run compiles
            return program(*inputs)

    def _compiled(self, block: Any, parameters: Sequence[str], given: Sequence[str]) -> Callable[..., Tensor]:
        def forward(x: Tensor, *tensors: Tensor) -> Tensor:
            own, common = dict(zip(parameters, tensors)), dict(zip(given, tensors[len(parameters) :]))
            return functional_call(block, own, (x, replace(Shared(None, None, None), **common)))

        def tagging(module: Any, inputs: Any) -> Any:
            shown = lambda *args: _Tagged(module, self.names, self.tag).run(*args)
            run = lambda *args: (module.forward if self.tag is untagged else shown)(*args)
            return make_boxed_func(run)

        as_it_is = lambda module, inputs: make_boxed_func(module.forward)
        return aot_function(
            forward, fw_compiler=tagging, bw_compiler=as_it_is, partition_fn=min_cut_rematerialization_partition
        )


class _Tagged(Interpreter):
    """Runs a block's forward program and shows each named tensor to a tag."""

    def __init__(self, module: Any, names: Mapping[Call, str], tag: Tag) -> None:
        super().__init__(module)
        self.names, self.tag = names, tag
        self.counts: Counter[str] = Counter()

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        out = super().call_function(target, args, kwargs)
        if hasattr(target, "_schema"):
            op = op_of(target)
            name = self.names.get(Call(op, self.counts[op]))
            self.counts[op] += 1
            if name is not None:
                self.tag(name, out[0] if isinstance(out, tuple) else out)
        return out


def budget_bytes(forward: Callable[..., Tensor], inputs: tuple[Tensor, ...], budget: float) -> int:
    """Bytes that the compiled forward keeps for the backward, what it is given left out; storages counted once.

    Args:
        forward: of tensors alone; parameters among them.
        inputs: its arguments; those that are differentiated require gradients.
        budget: as of ``Budgeted``.
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


def _set(budget: float) -> AbstractContextManager[Any]:
    # Times of ops are modelled by their FLOPs: measuring them takes a GPU.
    return functorch.patch(activation_memory_budget=budget, activation_memory_budget_runtime_estimator="flops")
