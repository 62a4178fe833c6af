"""The PyTorch twin under one way of running its stack: what it keeps, does again, needs at its peak, and the step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from jremat.estimator.config import TransformerConfig
from models.torch_twin import Run, Shared, Transformer, one_by_one, shared_of
from models.torch_weights import from_flax, to_flax
from policies.torch_contexts import Calls, calls_of, every_second
from scripts.compare.torch_budget import budget_bytes
from scripts.compare.torch_kept import Work, kept, peak_bytes, work


@dataclass(frozen=True)
class Twin:
    """The model with the weights of its Flax twin, and one batch."""

    model: Transformer
    tokens: Tensor
    targets: Tensor

    @property
    def config(self) -> TransformerConfig:
        """Of both models."""
        return self.model.config


def twin(config: TransformerConfig, params: Any, tokens: np.ndarray, targets: np.ndarray) -> Twin:
    """The twin of a Flax model with these parameters."""
    return Twin(from_flax(config, params), torch.tensor(tokens).long(), torch.tensor(targets).long())


def calls(config: TransformerConfig) -> Calls:
    """The aten calls of a block, dropout's among them."""
    small = replace(config, num_layers=1, max_seq=8)
    return calls_of(Transformer(small).layers(8)[0], torch.randn(1, 8, config.hidden, requires_grad=True))


def step(of: Twin, run: Run) -> tuple[float, dict[str, Tensor | None]]:
    """One loss and gradient."""
    of.model.zero_grad(set_to_none=True)
    loss = of.model.mean_loss(of.tokens, of.targets, run)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in of.model.named_parameters()}


def gradient(of: Twin, run: Run) -> tuple[float, dict[str, Any]]:
    """Loss, and the gradient as the Flax model's tree."""
    loss, grads = step(of, run)
    return loss, to_flax(of.config, grads)


def kept_bytes(of: Twin, run: Run) -> dict[str, int]:
    """What the stack keeps, its input counted: bytes by tensor."""
    x = of.model.embed(of.tokens).detach().requires_grad_()
    layers = of.model.layers(x.shape[1])

    def forward(tag: Callable[[str, Tensor], Tensor]) -> Tensor:
        return run([partial(layer, tag=tag) for layer in layers], x + 0)

    found: dict[str, int] = {}
    for row in kept(forward):
        found[row.name] = found.get(row.name, 0) + row.bytes
    return found


def stack_work(of: Twin, run: Run) -> Work:
    """Matmuls of the stack's forward and backward."""
    x = of.model.embed(of.tokens).detach().requires_grad_()
    return work(lambda: run(of.model.layers(x.shape[1]), x).square())


def peak(of: Twin, run: Run) -> int:
    """Most bytes alive in a step, parameters and gradients included."""
    of.model.zero_grad(set_to_none=True)
    return peak_bytes(lambda: of.model.mean_loss(of.tokens, of.targets, run).backward(), of.model)


def budgeted_bytes(of: Twin, budget: float) -> int:
    """What ``torch.compile`` keeps of the stack under a memory budget, its input counted wherever it is read."""
    x = of.model.embed(of.tokens).detach().requires_grad_()
    shared = shared_of(of.config, x.shape[1])
    given = {name: value for name, value in vars(shared).items() if value is not None}
    parameters = dict(of.model.blocks.named_parameters())

    def forward(x: Tensor, *tensors: Tensor) -> Tensor:
        own = dict(zip(parameters, tensors))
        common = replace(Shared(None, None, None), **dict(zip(given, tensors[len(own) :])))
        for i, block in enumerate(of.model.blocks):
            of_block = {n.removeprefix(f"{i}."): t for n, t in own.items() if n.startswith(f"{i}.")}
            x = torch.func.functional_call(block, of_block, (x, common))
        return x

    made = budget_bytes(forward, (x, *parameters.values(), *given.values()), budget)
    return made + x.nbytes


def dropout_error(of: Twin, run: Run) -> tuple[float, float]:
    """How far the gradient is from that without checkpointing under the same seed, and under another one."""
    trees = []
    for way, seed in ((one_by_one, 0), (run, 0), (run, 1)):
        torch.manual_seed(seed)
        trees.append(step(of, way)[1])
    same, other = (_distance(tree, trees[0]) for tree in trees[1:])
    return same, other


def _distance(tree: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None]) -> float:
    pairs = [(tree[name], grad) for name, grad in reference.items()]
    difference = sum(float((a - b).square().sum()) for a, b in pairs if a is not None and b is not None)
    return (difference / sum(float(b.square().sum()) for _, b in pairs if b is not None)) ** 0.5


def zero_share(rate: float, count: int) -> float:
    """The share of ones that a dropout zeroes."""
    torch.manual_seed(0)
    return float((torch.nn.functional.dropout(torch.ones(count), rate) == 0).float().mean())


@dataclass(frozen=True)
class Own:
    """One of PyTorch's own ways, beside the spec here that does the same.

    Args:
        line: what a PyTorch user writes.
        spec: a policy's.
        run: it.
        few: whether it is among the few that are compared by default.
    """

    line: str
    spec: str
    run: Run
    few: bool = False


def own_ways(config: TransformerConfig) -> tuple[Own, ...]:
    """PyTorch's own ways of running a stack of L layers."""
    aten, layers = torch.ops.aten, config.num_layers
    mm, bmm = [aten.mm.default, aten.addmm.default], [aten.bmm.default]
    fused = [aten._scaled_dot_product_flash_attention_for_cpu.default]
    names = ("mm", "addmm"), ("bmm", "_scaled_dot_product_flash_attention_for_cpu")
    second = "torchtitan_selective_op" if config.mlp == "swiglu" else "torchtitan_selective_op_gpt"
    listed = lambda ops: partial(_each, context_fn=partial(create_selective_checkpoint_contexts, ops))
    every = (
        Own("checkpoint(block, x, use_reentrant=False)", "full", _each),
        Own("checkpoint(block, x, use_reentrant=True)", "full", partial(_each, use_reentrant=True), few=True),
        Own("SAC [mm, addmm]", "sac:mm,addmm", listed(mm), few=True),
        Own("SAC [mm, addmm, bmm]", "sac:mm,addmm,bmm", listed(mm + bmm)),
        Own("SAC [mm, addmm, SDPA]", "save_only_matmuls", listed(mm + fused)),
        Own("SAC every second mm, and bmm, SDPA", second, partial(_each, context_fn=every_second(*names))),
    )
    if layers < 2:
        return every
    chunk = layers // 2  # the first of two chunks is checkpointed, the last, with the remainder, is bare
    first = f"{chunk}*every_k:{chunk}" if chunk > 1 else "1*full"
    return (*every, Own("checkpoint_sequential(layers, 2, x)", f"mix:{first},rest*none", _sequential, few=True))


def _each(layers: Any, x: Tensor, use_reentrant: bool = False, **how: Any) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=use_reentrant, **how)
    return x


def _sequential(layers: Any, x: Tensor) -> Tensor:
    return checkpoint_sequential(list(layers), 2, x, use_reentrant=False)
