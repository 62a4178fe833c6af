"""Operations as the kernels that a GPU compiler makes of them: which values are materialised, which are not.

A matmul, a loop or a library call reads and writes memory; the rest is fused where it can be (``jremat.graph.fusion``).
"""

import math
from collections.abc import Collection

from jremat.graph.fusion import accumulates, fuses, reduced_by_rows, row_reduction
from jremat.graph.operations import Kernel, Op, Value
from jremat.graph.rules import FREE, FUSIBLE, LAYOUT, REDUCTIONS, Rules
from jremat.graph.siblings import merged


def scattered(ops: list[Op]) -> list[Op]:
    """A sum with what was scattered into zeros is scattered straight into the other summand, as XLA simplifies it."""
    place = {op: k for k, op in enumerate(ops)}
    moved: dict[Op, int] = {}
    for op in ops:
        if op.name not in ("add", "add_any") or len(op.inputs) != 2:
            continue
        for value, other in (op.inputs, op.inputs[::-1]):
            scatter = value.maker
            if scatter is None or scatter.name not in ("scatter-add", "scatter_add") or len(value.users) != 1:
                continue
            zeros = scatter.inputs[0]
            if zeros.maker is None or zeros.maker.name not in FREE or other is value:
                continue
            zeros.users.remove(scatter)
            other.users.remove(op)
            value.users.remove(op)
            other.users.append(scatter)
            scatter.inputs[0] = other
            for user in op.outputs[0].users:
                user.inputs = [value if v is op.outputs[0] else v for v in user.inputs]
                value.users.append(user)
            op.outputs[0].users = []
            op.inputs = []
            moved[scatter] = place[op]
            break
    return sorted(ops, key=lambda op: moved.get(op, place[op]))


def alive(ops: list[Op]) -> list[Op]:
    """The operations whose results are read; the others no longer count as users."""
    kept = []
    for op in reversed(ops):
        if op.name in ("result", "write to a stack") or any(value.users for value in op.outputs):
            kept.append(op)
        else:
            for value in op.inputs:
                value.users.remove(op)
    return kept[::-1]


def kernels_of(ops: list[Op], rules: Rules) -> list[Kernel]:
    """Group operations into kernels: from the last one back, each is fused into all that read it, or stands alone."""
    roots: dict[Op, frozenset[Op]] = {}  # the kernels that an operation's work is done in
    for op in reversed(ops):
        readers = frozenset().union(*(roots[user] for value in op.outputs for user in value.users))
        op.fused = fuses(op, readers, rules) or accumulates(op)
        roots[op] = readers if op.fused else frozenset([op])
    return merged([_kernel(op) for op in ops if not op.fused])


def split_sum(op: Op, rules: Rules) -> tuple[int, bool]:
    """Into how many parts XLA splits a matmul along what it sums over, and whether that doesn't divide.

    A matmul whose result has too few tiles to keep the GPU busy is split until it has enough, or until adding the parts
    up costs more than a shorter sum saves.
    """
    (contracted, other), (batch, _) = op.eqn.params["dimension_numbers"]
    left, right = (v.aval.shape for v in op.eqn.invars)
    summed = math.prod(left[axis] for axis in contracted)
    batches = math.prod(left[axis] for axis in batch)
    rows = math.prod(left) // max(summed * batches, 1)
    columns = math.prod(right) // max(math.prod(right[axis] for axis in other) * batches, 1)
    height, width = rules.tile
    tiles = batches * -(-rows // height) * -(-columns // width)
    if not tiles or summed < rules.least_summed:
        return 1, False
    wanted = -(-rules.busy_tiles // tiles)
    padded = batches * math.prod(-(-n // width) * width for n in (rows, columns))
    worth = round(math.log2(rules.summed_for_added * summed / padded) / 2)  # the power of two nearest to the root
    parts = 1 << max(0, min(wanted.bit_length() - 1, worth))
    return parts, summed % parts != 0


def turns_matmul(op: Op) -> bool:
    """Whether an operation transposes a matmul's result: XLA gives the matmul that layout and moves nothing."""
    maker = op.inputs[0].maker if op.name == "transpose" else None
    return maker is not None and maker.name == "dot_general"


def _kernel(op: Op) -> Kernel:
    """A kernel with all that is fused into it."""
    reads, inside = _inside(op)
    # a matmul that adds to what is there is named as a matmul
    operation = next((maker for maker in inside if maker.name == "dot_general"), op)
    taken = {v for v, aligned in reads.items() if aligned} - _reduced_inside(op, reads, inside)
    shares: list[tuple[Value, ...]] = []
    for k, made in enumerate(op.outputs):
        if op.in_place:
            shares.append((op.inputs[op.in_place[k]],) if k in op.in_place else ())
        elif op.name in FUSIBLE:
            shares.append(tuple(v for v in reads if v in taken and v.nbytes == made.nbytes))
        else:
            shares.append(())
    return Kernel(operation, tuple(reads), tuple(op.outputs), tuple(shares))


def _inside(op: Op) -> tuple[dict[Value, bool], list[Op]]:
    """What a kernel reads, each with whether it is read element by element; and the operations fused into it."""
    reads: dict[Value, bool] = {}
    moves = op.name in REDUCTIONS or op.name in LAYOUT
    waiting = [(value, not moves) for value in reversed(op.inputs)]
    seen: dict[Op, None] = {}
    while waiting:
        value, aligned = waiting.pop()
        maker = value.maker
        if maker is not None and maker.fused:
            if maker in seen:
                continue
            seen[maker] = None
            moved = maker.name == "dot_general" or (maker.name in LAYOUT and not turns_matmul(maker))
            waiting += [(v, aligned and not moved) for v in reversed(maker.inputs)]
        elif maker is not None or value.held:
            reads[value] = reads.get(value, True) and aligned
    return reads, list(seen)


def _reduced_inside(op: Op, reads: Collection[Value], inside: list[Op]) -> set[Value]:
    """What a kernel also reads row by row: it must not be written over before the row's maximum or sum is known.

    A kernel that holds one such reduction takes in those that it alone reads, too.

    Source: XLA's gpu/alias_info.cc (FusionCanShareBufferHint, before 2025 gpu/buffer_sharing.cc): an operand's buffer
    is taken only if each path from it through the fusion goes element by element.
    """
    rows = [found for found in map(reduced_by_rows, (op, *inside)) if found is not None]
    if rows:
        rows += [v.maker for v in reads if v.maker is not None and row_reduction(v.maker) and len(v.users) == 1]
    return {value for reduction in rows for value in _inside(reduction)[0]}
