"""How values lie in memory: which transposes move data, and which a matmul takes into its own layout."""

import math
from typing import Any

from jremat.graph.operations import Op, Value
from jremat.graph.rules import FUSIBLE


def layout_of(op: Op) -> str:
    """How the result lies in memory, as far as it isn't as its shape says; see ``Value.layout``."""
    if op.name == "dot_general":
        return "matmul"
    if op.name == "transpose":
        given = op.inputs[0]
        if given.layout != "matmul":
            return ""
        order = [axis for axis in op.eqn.params["permutation"] if op.eqn.invars[0].aval.shape[axis] != 1]
        batch = 0
        while batch < len(order) and order[batch] == sorted(order)[batch]:
            batch += 1
        # two axes change places: any matmul can read it; of three or more some can't
        return "turned" if len(order) - batch <= 2 else "mixed"
    if op.name not in FUSIBLE or not op.outputs:
        return ""
    size = math.prod(op.outputs[0].aval.shape)
    found = {v.layout for v in op.inputs if math.prod(v.aval.shape) == size}
    return next((layout for layout in ("settled", "mixed", "turned", "matmul") if layout in found), "")


def turned_back(eqn: Any, value: Value) -> bool:
    """Whether a transpose moves nothing: of a turned value, or of a matmul that can read its operands swapped."""
    if value.layout in ("turned", "mixed", "settled"):
        return True
    maker = value.maker
    if maker is None or maker.name != "dot_general":
        return False
    (contracted, _), (batch, _) = maker.eqn.params["dimension_numbers"]
    free = len(maker.eqn.invars[0].aval.shape) - len(contracted) - len(batch)
    rank = len(eqn.invars[0].aval.shape)
    return not batch and tuple(eqn.params["permutation"]) == (*range(free, rank), *range(free))


def untransposed(value: Value) -> Value:
    """A matrix as it lies in memory: a matmul reads its rows as columns just as well."""
    maker = value.maker
    return maker.inputs[0] if maker is not None and maker.name == "transpose" and is_matrix(value) else value


def is_matrix(value: Value) -> bool:
    """Whether at most two axes are longer than one."""
    return sum(n != 1 for n in value.aval.shape) <= 2


def transposed_within(stack: Value, one: Value) -> bool:
    """Whether a loop transposes a kept matmul's result before it reads it: then all of the stack is laid out anew."""
    waiting = list(one.users)
    while waiting:
        op = waiting.pop()
        if op.name == "transpose":
            return stack.layout == "matmul"
        if op.name == "slice of a stack":
            waiting += op.outputs[0].users
        elif op.name == "optimization_barrier":  # hands each value on
            given = [value for value in op.inputs if value is one or value.maker in one.users]
            waiting += [user for value in given for user in op.outputs[op.inputs.index(value)].users]
    return False
