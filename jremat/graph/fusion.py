"""Which operations XLA's fusion for GPUs does inside of the kernels that read them, as far as memory feels it.

What is computed element by element is done in the kernels that read it, unless it is read where fusion can't reach, or
making it several times would cost more than writing it once.
"""

import math

import numpy as np

from jremat.graph.operations import Op, Value
from jremat.graph.rules import EXPENSIVE, FREE, FUSIBLE, IN_PLACE, LAYOUT, LONGEST_ROW, POOLING, REDUCTIONS, Rules


def fuses(op: Op, readers: frozenset[Op], rules: Rules) -> bool:
    """Whether an operation is done inside of the kernels that read its result, ``readers``, once in each."""
    if len(op.outputs) != 1 or not (op.name in FUSIBLE or op.name in FREE or op.name in LAYOUT):
        return False
    if op.name == "zeros":
        return False
    if op.name == "slice of a stack" and rules.slices_copied and len(readers) > 1:
        return False
    value = op.outputs[0]
    if not all(_reads_fused(user, value, rules) for user in value.users):
        return False
    if _spread(op) or gathered_into_total(op):
        return False
    if op.name in FREE or len(readers) == 1:
        return True
    movers = sum(reader.name in ("relaid", "padded") for reader in readers)
    if 0 < movers < len(readers) and op.name != "convert_element_type":
        return False  # a kernel that moves what it makes doesn't recompute what others need too
    # Making it in each of its readers must not move more bytes than writing it once, nor repeat dear arithmetic.
    if op.name in EXPENSIVE and value.nbytes > rules.cheap_bytes and not _few_tanh(op, readers, rules):
        return False
    if op.name == "exp" and len(readers) > 2 and 0 < _rows_summed(value) <= rules.few_rows:
        less = op.inputs[0].maker
        if less is None or reduced_by_rows(less) is None:
            return False
    moved = sum(_read_bytes(v) for v in op.inputs)
    return (len(readers) - 1) * moved <= (len(readers) + 1) * value.nbytes


def accumulates(op: Op) -> bool:
    """Whether a matmul's float32 result is only added to what is handed in: the matmul's kernel then adds it itself."""
    if op.name != "dot_general" or op.outputs[0].aval.dtype != np.float32:
        return False
    made = op.outputs[0]
    held = lambda user: any(value.held and value.nbytes == made.nbytes for value in user.inputs)
    return len(made.users) == 1 and made.users[0].name in ("add", "add_any") and held(made.users[0])


def row_reduction(op: Op) -> bool:
    """Whether an operation reduces rows as they lie in memory, each short enough for one block of threads."""
    if op.name not in ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"):
        return False
    shape = op.eqn.invars[0].aval.shape
    last = tuple(op.eqn.params["axes"]) == (len(shape) - 1,)
    return last and 1 < shape[-1] <= LONGEST_ROW and op.inputs[0].layout not in ("turned", "mixed")


def reduced_by_rows(op: Op) -> Op | None:
    """The row reduction of an operation's first operand that its second operand is, as of ``x - max(x)``.

    XLA does both in one kernel, and what the result is fused into does both again.

    Source: XLA's gpu/transforms/softmax_rewriter_triton.cc (its diamonds of a producer, a reduction and a broadcast).
    """
    if op.name not in FUSIBLE or len(op.inputs) != 2:
        return None
    first, second = op.inputs
    while second.maker is not None and second.maker.name not in REDUCTIONS:
        spread = second.maker.name == "broadcast_in_dim" and len(second.users) == 1
        above = second.maker.inputs[0] if spread and second.maker.inputs else _alone(second)
        if above is None:
            return None
        second = above
    reduction = second.maker
    if reduction is None or not row_reduction(reduction) or len(second.users) != 1:
        return None
    start = reduction.inputs[0]
    while (above := _alone(start)) is not None:
        start = above
    while first is not start:
        above = _alone(first)
        if above is None:
            return None
        first = above
    return reduction


def _alone(value: Value) -> Value | None:
    """What a value that one operation reads is made from element by element, if that is one array beside numbers."""
    op = value.maker
    if op is None or op.name not in FUSIBLE or len(op.outputs) != 1 or len(value.users) > 1:
        return None
    arrays = {v for v in op.inputs if not _one_number(v)}
    return arrays.pop() if len(arrays) == 1 else None


def _one_number(value: Value) -> bool:
    """Whether a value is one number, however many times."""
    if math.prod(value.aval.shape) == 1:
        return True
    maker = value.maker
    return maker is not None and maker.name in ("broadcast_in_dim", "full") and all(map(_one_number, maker.inputs))


def _spread(op: Op) -> bool:
    """Whether a logarithm's result is read by many elements each: it is then taken once and written."""
    size = math.prod(op.outputs[0].aval.shape)
    wide = any(u.outputs and math.prod(u.outputs[0].aval.shape) > size for u in op.outputs[0].users)
    return wide and _made_with("log", op)


def gathered_into_total(op: Op) -> bool:
    """Whether what is gathered is summed up to one number: few threads do that, so they don't gather too."""
    users = [user for value in op.outputs for user in value.users]
    total = any(user.name == "reduce_sum" and math.prod(user.outputs[0].aval.shape) == 1 for user in users)
    return total and _made_with("gather", op)


def _made_with(name: str, op: Op, depth: int = 6) -> bool:
    """Whether an operation of that name is done in making a value, over as many elements as it has."""
    if op.name == name:
        return True
    size = math.prod(op.outputs[0].aval.shape)
    same = [v.maker for v in op.inputs if v.maker is not None and math.prod(v.aval.shape) == size]
    return depth > 0 and op.name in FUSIBLE and any(_made_with(name, maker, depth - 1) for maker in same)


def _few_tanh(op: Op, readers: frozenset[Op], rules: Rules) -> bool:
    """Whether an activation goes over few rows and elements: then it is taken twice, or once for all who read it.

    Not where one of them comes after another, as in a replay of several layers: it waits in memory then.
    """
    shape = op.outputs[0].aval.shape
    rows, elements = rules.few_tanh
    few = op.name == "tanh" and math.prod(shape[:-1]) <= rows and math.prod(shape) <= elements
    return few and not any(_leads_to(reader, readers - {reader}) for reader in readers)


def _leads_to(op: Op, others: frozenset[Op]) -> bool:
    """Whether one of the others reads, directly or not, what an operation makes."""
    seen: set[Op] = set()
    waiting = [op]
    while waiting:
        for user in (user for value in waiting.pop().outputs for user in value.users):
            if user in others:
                return True
            if user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def _rows_summed(value: Value) -> int:
    """Over how many rows a value is summed up; 0 where no sum reads it."""
    sums = [user.eqn for user in value.users if user.name == "reduce_sum"]
    summed = min((math.prod(value.aval.shape[axis] for axis in eqn.params["axes"]) for eqn in sums), default=0)
    return math.prod(value.aval.shape) // summed if summed else 0


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
    if user.name in FUSIBLE | LAYOUT | REDUCTIONS | POOLING or user.name in ("write to a stack", "relaid", "padded"):
        return True
    if user.name in IN_PLACE:
        return value is not user.inputs[0]
    return False
