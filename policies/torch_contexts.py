"""The zoo's policies running in PyTorch: ``run = stack_run(policy, L, calls)``, then ``run(layers, x)``.

A layer is ``layer(x, tag=…, region=…)``: ``tag`` is shown each named tensor, ``region`` runs each part of the block
that a policy may checkpoint alone. The model knows no policy, the policies no model; ``calls_of`` finds, for each name,
the aten call that makes it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from jremat.policy import SAVE, LayerPlan, Policy
from policies.torch_expression import Expression, NotExpressible, express_plan

Layer = Callable[..., Tensor]
Run = Callable[[Sequence[Layer], Tensor], Tensor]
keeping_inputs = partial(checkpoint, use_reentrant=False)


@dataclass(frozen=True)
class Call:
    """One call of an aten op in a block.

    Args:
        op: without overload, e.g. ``addmm``.
        nth: how many calls of it came before.
    """

    op: str
    nth: int


@dataclass(frozen=True)
class Calls:
    """The calls of a block that matter to SAC.

    Args:
        makers: for each tagged name, the call that makes it.
        written_over: calls whose result another op overwrites, as dropout does with the mask that it allocates and
            RMSNorm with its mean square: SAC raises where such a value is kept.
    """

    makers: Mapping[str, Call]
    written_over: frozenset[Call]


def calls_of(layer: Layer, x: Tensor) -> Calls:
    """What SAC has to know of a layer; one run of it.

    Args:
        layer: of any stack.
        x: its input, which must require a gradient, as kernels depend on it.
    """
    recorder, calls = _Recorder(), dict[str, Call]()

    def note(name: str, value: Tensor) -> Tensor:
        made = recorder.makers.get(value.untyped_storage()._cdata)
        if made is not None:
            calls.setdefault(name, made)  # a projection turned by RoPE is tagged twice: the matmul is meant
        return value

    with recorder:
        layer(x, tag=note)
    return Calls(calls, frozenset(recorder.written_over))


def op_of(func: Any) -> str:
    """An op's name without namespace and overload."""
    return func._schema.name.rpartition("::")[2]


class _Recorder(TorchDispatchMode):
    """The call that made each storage; keeps the tensors, so that no address is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.makers: dict[int, Call] = {}
        self.written_over: set[Call] = set()
        self.alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        op = op_of(func)
        if func._schema.is_mutable:
            self.written_over |= {self.makers[key] for key in given if key in self.makers}
        for value in torch.utils._pytree.tree_leaves(out):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in given:
                self.makers.setdefault(value.untyped_storage()._cdata, Call(op, self.counts[op]))
                self.alive.append(value)
        self.counts[op] += 1
        return out


def stack_run(plan: Policy | LayerPlan, num_layers: int, calls: Calls) -> Run:
    """A policy or plan as the way to run a stack of PyTorch layers.

    Args:
        plan: not a request.
        num_layers: of the stack.
        calls: from ``calls_of`` a layer, for policies by name.

    Returns:
        ``run(layers, x)``.

    Raises:
        NotExpressible: PyTorch has no such call, or no call of the block makes a tensor that the policy insists on.
    """
    groups = express_plan(plan, num_layers)
    for group in groups:
        _check(group.expression, calls)

    def run(layers: Sequence[Layer], x: Tensor) -> Tensor:
        start = 0
        for group in groups:
            own = [_one(group.expression, calls, layer) for layer in layers[start : start + group.layers]]
            x = keeping_inputs(_in_a_row, own, x) if group.replayed else _in_a_row(own, x)
            start += group.layers
        return x

    return run


def selective(policy: Policy, calls: Calls) -> Callable[[], Any]:
    """``context_fn`` of a selective checkpoint under which a block keeps what ``policy`` says.

    Each op is asked about by name and place: ``mm`` by the family, and the third ``mm`` by the tensor that it makes.
    """
    names: dict[Call, list[str]] = {}
    for name, call in calls.makers.items():
        names.setdefault(call, []).append(name)

    def contexts() -> Any:
        counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

        def decide(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            op, seen = op_of(func), counts[ctx.is_recompute]
            call = Call(op, seen[op])
            seen[op] += 1
            families = [f.name for f, _ in policy.families if op in f.aten]
            kept = policy.decide(names=names.get(call, ()), families=families) is SAVE
            kept = kept and not func._schema.is_mutable and call not in calls.written_over
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(decide)

    return contexts


def every_second(counted: Sequence[str], also: Sequence[str]) -> Callable[[], Any]:
    """``context_fn`` that keeps every second call of the ops ``counted``, from the first, and every call of ``also``.

    torchtitan's selective checkpoint by operation, which counts afresh in each block.
    """

    def contexts() -> Any:
        counts = {False: 0, True: 0}

        def decide(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            op = op_of(func)
            if op in counted:
                counts[ctx.is_recompute] += 1
            kept = op in also or (op in counted and counts[ctx.is_recompute] % 2 == 1)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(decide)

    return contexts


def _check(expression: Expression, calls: Calls) -> None:
    policy = expression.policy
    if policy is None:
        return
    missing = [n for n, _ in policy.names if n not in calls.makers and n not in policy.optional and n != "block_in"]
    if missing:
        raise NotExpressible(f"no call of this block makes {missing[0]!r}; SAC speaks of calls alone")


def _one(expression: Expression, calls: Calls, layer: Layer) -> Layer:
    if expression.means == "bare":
        return layer
    if expression.means == "parts":
        return partial(layer, region=partial(_region, expression.parts))
    if expression.policy is not None:
        return partial(keeping_inputs, layer, context_fn=selective(expression.policy, calls))
    if expression.means == "inputs_on_host":
        return partial(_on_host, layer)
    return partial(keeping_inputs, layer)


def _region(parts: tuple[str, ...], name: str, fn: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return keeping_inputs(fn, *args) if name in parts else fn(*args)


def _on_host(layer: Layer, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu(pin_memory=x.is_cuda):
        return keeping_inputs(layer, x)


def _in_a_row(layers: Sequence[Layer], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x
