"""What a stack of layers keeps between its forward and its backward pass, and what one replay makes again."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jremat.estimate.block import CARRIED, INPUT, SHARED, Block, Tensor, block_of, word
from jremat.estimate.config import TransformerConfig
from jremat.estimate.kept import Kept, kept_by, without_parameters_alone
from jremat.policy.decision import OFFLOAD, SAVE, Decision
from jremat.policy.layers import LayerPlan, Segment
from jremat.policy.policy import NONE, Policy


@dataclass(frozen=True)
class Row:
    """One kind of array that is alive in the stack.

    Args:
        name: the tensor's.
        axes, dtype: of one copy, as of ``jremat.estimate.block.Tensor``.
        copies: how many are alive at once.
        decision: SAVE in device memory, OFFLOAD in host memory.
    """

    name: str
    axes: tuple[str, ...]
    dtype: str
    copies: int
    decision: Decision = SAVE


@dataclass(frozen=True)
class StackKept:
    """What a stack holds for its backward pass.

    Args:
        rows: kept from the forward pass, in the order of the layers.
        replay: of the segment where one replay makes most: what the replay of a group or a schedule keeps meanwhile.
        recomputed: of one layer, what its own backward makes again first; of the segment where that is most.
        recomputed_flops: matmul FLOPs of all layers that the backward pass repeats, at batch and sequence of ``sizes``.
    """

    rows: tuple[Row, ...]
    replay: tuple[Row, ...]
    recomputed: tuple[Tensor, ...]
    recomputed_flops: int


CARRY = tuple(Row(word(name), *CARRIED[name], copies=1) for name in (INPUT, "carry_layer"))
"""What the executor hands from layer to layer; of it the integers stay on the device in any case."""
_POSITIONS = Row("positions", *CARRIED["positions"], copies=1)


def stack_kept(
    config: TransformerConfig, policy: Policy | LayerPlan, num_layers: int, sizes: Mapping[str, int], *, chain: bool
) -> StackKept:
    """What ``num_layers`` layers keep.

    Args:
        config: of the model.
        policy: of every layer, or a plan over them.
        num_layers: of this stack, which may be one stage of a pipeline.
        sizes: the value of every axis.
        chain: run by the stack's executor, not by a scan.

    Raises:
        ValueError: the plan doesn't fit the layers, or a policy the block.
    """
    block = block_of(config, chain=chain)
    if isinstance(policy, LayerPlan):
        segments = policy.resolve(num_layers)
    else:
        segments = (Segment((policy,), repeats=num_layers),)
    if not chain:
        (segment,) = segments
        return _repeated(block, segment.pattern, num_layers, sizes, chain=False)
    parts = [_segment(block, config, segment, sizes) for segment in segments]
    return StackKept(
        (*(row for part in parts for row in part.rows), _POSITIONS),  # the executor holds what its layers share
        max((part.replay for part in parts), key=lambda rows: _values(rows, sizes)),
        max((part.recomputed for part in parts), key=lambda tensors: _values(map(_row, tensors), sizes)),
        sum(part.recomputed_flops for part in parts),
    )


def _segment(block: Block, config: TransformerConfig, segment: Segment, sizes: Mapping[str, int]) -> StackKept:
    length = len(segment.pattern) * (segment.repeats or 0)
    if segment.slots is not None:
        return _scheduled(block, config, segment, length, sizes)
    if segment.group > 1:
        return _grouped(block, segment, length, sizes)
    layers = [segment.pattern[k % len(segment.pattern)] for k in range(length)]
    return _repeated(block, layers, length, sizes, chain=True)


def _repeated(
    block: Block, pattern: Sequence[Policy], length: int, sizes: Mapping[str, int], *, chain: bool
) -> StackKept:
    """Layers that stand alone, each keeping what its own policy says."""
    counts = {p: sum(pattern[k % len(pattern)] == p for k in range(length)) for p in dict.fromkeys(pattern)}
    rows: list[Row] = []
    kepts = {p: _kept(block, p, chain) for p in counts}
    for policy, kept in kepts.items():
        copies = counts[policy]
        rows += [replace(_row(t), copies=copies, decision=d) for t, d in kept.tensors]
        rows += [Row(word(name), *CARRIED[name], copies=copies) for name in kept.inputs if name not in SHARED]
        if "positions" in kept.inputs and not chain:
            rows.append(_POSITIONS)
    deepest = max(kepts.values(), key=lambda kept: _values(map(_row, kept.recomputed), sizes))
    flops = sum(counts[p] * matmul_flops(kept.recomputed, sizes) for p, kept in kepts.items())
    return StackKept(tuple(rows), (), deepest.recomputed, flops)


def _grouped(block: Block, segment: Segment, length: int, sizes: Mapping[str, int]) -> StackKept:
    """Groups of layers, of which the input alone is kept: the whole carry of the executor."""
    whole, rest = divmod(length, segment.group)
    host = any(p.decide(names=["block_in"]) is OFFLOAD for p in segment.pattern)
    pattern = tuple(_inside_group(p) for p in segment.pattern) if host else segment.pattern
    inside = [_repeated(block, pattern, n, sizes, chain=True) for n in ([segment.group] if whole else [rest])]
    groups = whole + bool(rest)
    rows = [replace(row, copies=groups, decision=OFFLOAD if host and row.axes else SAVE) for row in CARRY]
    # A group's replay runs all of its layers but the last whole; of that one, what makes the values that it keeps.
    ends = [min((g + 1) * segment.group, length) - 1 for g in range(groups)]
    replay = (length - groups) * matmul_flops(block.tensors.values(), sizes)
    replay += sum(matmul_flops(_remade(block, pattern[end % len(pattern)]), sizes) for end in ends)
    again = _repeated(block, pattern, length, sizes, chain=True).recomputed_flops
    return StackKept(tuple(rows), inside[0].rows, inside[0].recomputed, replay + again)


def _scheduled(
    block: Block, config: TransformerConfig, segment: Segment, length: int, sizes: Mapping[str, int]
) -> StackKept:
    """Layers under a binomial schedule: its registers, each a whole carry, and one layer's tensors in the backward."""
    from jremat.transform.revolve import binomial  # only here: NumPy would cost every estimate its start
    from jremat.transform.schedule import tables

    schedule = tables(binomial(length, segment.slots or 1))
    rows = [replace(row, copies=schedule.registers) for row in CARRY]
    one = _repeated(block, segment.pattern[:1], 1, sizes, chain=True)
    # Each step of the replay is a whole layer; then every layer is run for the values that it keeps, and taken back.
    turn = matmul_flops(_remade(block, segment.pattern[0]), sizes) + one.recomputed_flops
    flops = len(schedule.replay) * matmul_flops(block.tensors.values(), sizes) + length * turn
    again = everything(config, chain=True)
    tensors = tuple(t for t, _ in again.tensors)  # all that a layer reads
    return StackKept(tuple(rows), (), tensors, flops)


def _remade(block: Block, policy: Policy) -> tuple[Tensor, ...]:
    """What is made on the way to the values that a layer keeps, where a replay starts from its input."""
    seen: set[str] = set()
    waiting = [tensor.id for tensor, _ in _kept(block, policy, chain=True).tensors]
    while waiting:
        key = waiting.pop()
        if key in block.tensors and key not in seen:
            seen.add(key)
            waiting += block.tensors[key].needs
    return tuple(tensor for key, tensor in block.tensors.items() if key in seen)


def _inside_group(policy: Policy) -> Policy:
    """In a group whose input waits on the host a layer's input stays on the device, as the executor has it."""
    names = tuple((n, SAVE if n == "block_in" else d) for n, d in policy.names)
    return replace(policy, names=names)


def _kept(block: Block, policy: Policy, chain: bool) -> Kept:
    kept = kept_by(block, policy)
    return without_parameters_alone(kept, block) if chain else kept


def _row(tensor: Tensor) -> Row:
    return Row(tensor.label, tensor.axes, tensor.dtype, copies=1)


def _values(rows: Iterable[Row], sizes: Mapping[str, int]) -> int:
    total = 0
    for row in rows:
        values = row.copies
        for axis in row.axes:
            values *= sizes[axis]
        total += values
    return total


def matmul_flops(tensors: Iterable[Tensor], sizes: Mapping[str, int]) -> int:
    """FLOPs of the matmuls that make these tensors; a fused attention's two matmuls among them, masked scores too."""
    total = 0
    for tensor in tensors:
        if tensor.contracted:
            flops = 2
            for axis in (*tensor.axes, *tensor.contracted):
                flops *= sizes[axis]
            total += flops
        elif tensor.primitive == "while":
            total += 4 * sizes["b"] * sizes["n"] * sizes["s"] ** 2 * sizes["d"]
    return total


def everything(config: TransformerConfig, *, chain: bool) -> Kept:
    """What one layer keeps where nothing is made again."""
    return _kept(block_of(config, chain=chain), NONE, chain)
