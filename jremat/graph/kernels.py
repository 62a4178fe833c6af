"""Operations as the kernels that a GPU compiler makes of them: which values are materialised, which are not.

A matmul, a loop or a library call reads and writes memory. What is computed element by element is fused into the
kernels that read it, unless it is read where fusion can't reach, or making it several times would cost more than
writing it once. The rules are those of XLA's fusion for GPUs, as far as memory feels them; each names its reason.
"""

import math

from jremat.graph.operations import Kernel, Op, Value
from jremat.graph.rules import EXPENSIVE, FREE, FUSIBLE, IN_PLACE, LAYOUT, REDUCTIONS, Rules
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
        op.fused = _fuses(op, readers, rules)
        roots[op] = readers if op.fused else frozenset([op])
    return merged([_kernel(op) for op in ops if not op.fused])


def _fuses(op: Op, readers: frozenset[Op], rules: Rules) -> bool:
    if len(op.outputs) != 1 or not (op.name in FUSIBLE or op.name in FREE or op.name in LAYOUT):
        return False
    if op.name == "zeros":
        return False
    value = op.outputs[0]
    if not all(_reads_fused(user, value, rules) for user in value.users):
        return False
    if op.name in FREE or len(readers) == 1:
        return True
    if any(reader.name == "relaid" for reader in readers):
        return False  # a kernel that moves what it makes doesn't make again what others need too
    # Making it in each of its readers must not move more bytes than writing it once, nor repeat dear arithmetic.
    if op.name in EXPENSIVE and value.nbytes > rules.cheap_bytes:
        return False
    moved = sum(_read_bytes(v) for v in op.inputs)
    return (len(readers) - 1) * moved <= (len(readers) + 1) * value.nbytes


def split_sum(op: Op, rules: Rules) -> tuple[int, bool]:
    """Into how many parts XLA splits a matmul along what it sums over, and whether that doesn't divide.

    A matmul whose result has too few tiles to keep the GPU busy is split until it has enough.
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
    parts = 1 << (min(wanted, summed // rules.least_part).bit_length() - 1)
    return parts, summed % parts != 0


def turns_matmul(op: Op) -> bool:
    """Whether an operation transposes a matmul's result: XLA gives the matmul that layout and moves nothing."""
    maker = op.inputs[0].maker if op.name == "transpose" else None
    return maker is not None and maker.name == "dot_general"


def _read_bytes(value: Value, depth: int = 6) -> int:
    """Bytes that a kernel reads for a value: its own, or of what it is made from in passing, if that is less."""
    maker = value.maker
    if maker is None or not depth:
        return value.nbytes
    if maker.name in FREE:
        return 0
    if maker.name not in FUSIBLE or len(maker.outputs) != 1:
        return value.nbytes
    return min(value.nbytes, sum(_read_bytes(v, depth - 1) for v in maker.inputs))


def _reads_fused(user: Op, value: Value, rules: Rules) -> bool:
    """Whether a kernel can make ``value`` itself while it reads it."""
    if user.name in FUSIBLE | LAYOUT | REDUCTIONS or user.name in ("write to a stack", "relaid"):
        return True
    if user.name in IN_PLACE:
        return value is not user.inputs[0]
    return False


def _kernel(op: Op) -> Kernel:
    """A kernel with all that is fused into it."""
    reads: dict[Value, bool] = {}  # and whether each is read element by element
    moves = op.name in REDUCTIONS or op.name in LAYOUT
    turned = bool(op.outputs) and op.outputs[0].layout in ("turned", "mixed", "settled")
    # each with whether it is read element by element, and whether it was turned on the way
    waiting = [(value, not moves, False) for value in reversed(op.inputs)]
    seen: set[Value] = set()
    while waiting:
        value, aligned, crossed = waiting.pop()
        maker = value.maker
        if maker is not None and maker.fused:
            if value in seen:
                continue
            seen.add(value)
            turns = turns_matmul(maker)
            aligned = aligned and (maker.name not in LAYOUT or turns)
            waiting += [(v, aligned, crossed or turns) for v in reversed(maker.inputs)]
        elif maker is not None or value.held:
            across = turned and value.layout == "matmul" and not crossed
            reads[value] = reads.get(value, True) and aligned and not across
    shares = []
    for k, made in enumerate(op.outputs):
        if op.in_place:
            taken: tuple[Value, ...] = (op.inputs[op.in_place[k]],) if k in op.in_place else ()
        elif op.name in FUSIBLE:
            taken = tuple(v for v, aligned in reads.items() if aligned and v.nbytes == made.nbytes)
        else:
            taken = ()
        shares.append(taken)
    return Kernel(op, tuple(reads), tuple(op.outputs), tuple(shares))
