"""Which operations XLA's fusion for GPUs does inside of the kernels that read them, as far as memory feels it.

What is computed element by element is done in the kernels that read it, unless it is read where fusion can't reach, or
making it several times would cost more than writing it once.
"""

import math

import numpy as np

from jremat.graph.operations import Op, Value
from jremat.graph.rules import EXPENSIVE, FREE, FUSIBLE, IN_PLACE, LAYOUT, REDUCTIONS, Rules


def fuses(op: Op, readers: frozenset[Op], rules: Rules) -> bool:
    """Whether an operation is done inside of the kernels that read its result, ``readers``, once in each."""
    if len(op.outputs) != 1 or not (op.name in FUSIBLE or op.name in FREE or op.name in LAYOUT):
        return False
    if op.name == "zeros":
        return False
    value = op.outputs[0]
    if not all(_reads_fused(user, value, rules) for user in value.users):
        return False
    if _spread(op) or gathered_into_total(op):
        return False
    if op.name in FREE or len(readers) == 1:
        return True
    movers = sum(reader.name == "relaid" for reader in readers)
    if 0 < movers < len(readers) and op.name != "convert_element_type":
        return False  # a kernel that moves what it makes doesn't recompute what others need too
    # Making it in each of its readers must not move more bytes than writing it once, nor repeat dear arithmetic.
    if op.name in EXPENSIVE and value.nbytes > rules.cheap_bytes and not _few_tanh(op, readers, rules):
        return False
    if op.name == "exp" and len(readers) > 2 and 0 < _rows_summed(value) <= rules.few_rows:
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
    if user.name in FUSIBLE | LAYOUT | REDUCTIONS or user.name in ("write to a stack", "relaid"):
        return True
    if user.name in IN_PLACE:
        return value is not user.inputs[0]
    return False
