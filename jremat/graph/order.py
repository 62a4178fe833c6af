"""The order in which a compiler runs kernels, to need little memory: three ways, as XLA tries them.

Source: XLA's memory scheduler (hlo_memory_scheduler.cc): a greedy list, and a depth-first walk with and without a
heuristic for which operand to visit first; the one of which XLA expects the least peak is taken for the whole program.
"""

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any

from jremat.graph.operations import Computation, Kernel, Value
from jremat.graph.rules import LONGEST_ROW

Order = Callable[[Computation], list[Kernel]]


def defines(kernel: Kernel) -> int:
    """Bytes of the values that a kernel makes, as XLA's schedulers count them.

    A barrier makes none. A loop makes all that goes round in it, what it only reads included, and a write of one slice
    makes the whole stack; so both are put off for as long as anything else can run, but for a loop in the greedy list
    of later versions (``Computation.loops_wait``).
    """
    if kernel.op.name == "optimization_barrier":
        return 0
    if kernel.op.defines:
        return kernel.op.defines
    return sum(value.nbytes for value in (kernel.op.inputs if kernel.op.name in ("scan", "while") else kernel.writes))


def root(value: Value) -> Value:
    """The value that a barrier hands on."""
    while value.maker is not None and value.maker.name == "optimization_barrier":
        value = value.maker.inputs[value.maker.outputs.index(value)]
    return value


def predecessors(computation: Computation) -> dict[Kernel, list[Kernel]]:
    """Which kernels must run before each: the makers of what it reads, and who reads what it writes over."""
    makers = {value: kernel for kernel in computation.kernels for value in kernel.writes}
    before = {k: list(dict.fromkeys(makers[v] for v in k.reads if v in makers)) for k in computation.kernels}
    for k, place in enumerate(computation.carried):
        made = makers.get(root(computation.outputs[k]))
        if place is None or made is None:
            continue
        carried = computation.inputs[place]
        readers = [kernel for kernel in computation.kernels if carried in kernel.reads and kernel is not made]
        after = _after(made, before)
        before[made] += [kernel for kernel in readers if kernel not in after and kernel not in before[made]]
    return before


def _after(kernel: Kernel, before: dict[Kernel, list[Kernel]]) -> set[Kernel]:
    """All kernels that can only run after this one."""
    followers: dict[Kernel, list[Kernel]] = {}
    for k, earlier in before.items():
        for other in earlier:
            followers.setdefault(other, []).append(k)
    found, waiting = set(), [kernel]
    while waiting:
        for k in followers.get(waiting.pop(), ()):
            if k not in found:
                found.add(k)
                waiting.append(k)
    return found


def greedy(computation: Computation) -> list[Kernel]:
    """Always the kernel that frees most beyond what it makes; of equals the one with most readers.

    What a kernel frees is looked at when it becomes ready, and again after one that reads the same instruction has run:
    XLA doesn't look again where two matmuls read an array through reshapes of their own, so the second, which would
    free the array, may wait until nothing else is left.
    """
    before = predecessors(computation)
    followers: dict[Kernel, list[Kernel]] = {kernel: [] for kernel in before}
    for kernel, earlier in before.items():
        for other in earlier:
            followers[other].append(kernel)
    reads = {k: list(dict.fromkeys(root(v) for v in k.reads if not root(v).held)) for k in before}
    operands = {k: {(v, _reshaped(k, v)) for v in k.reads} for k in before}
    siblings: dict[tuple[Value, Any], list[Kernel]] = {}
    unread: dict[Value, int] = {}
    for kernel, values in reads.items():
        for value in values:
            unread[value] = unread.get(value, 0) + 1
        for operand in operands[kernel]:
            siblings.setdefault(operand, []).append(kernel)

    def priority(kernel: Kernel) -> tuple[int, int]:
        if kernel.writes and all(value.nbytes <= 8 for value in kernel.writes):
            return 1 << 62, 1 << 62  # scalars first
        if kernel.op.inner and not computation.loops_wait:
            return 0, len(followers[kernel])
        freed = sum(value.nbytes for value in reads[kernel] if unread[value] == 1)
        return freed - defines(kernel), len(followers[kernel])

    waits = {kernel: len(earlier) for kernel, earlier in before.items()}
    ready = {kernel: priority(kernel) for kernel in before if not waits[kernel]}  # of equals the last that came
    order: list[Kernel] = []
    while ready:
        kernel = max(reversed(ready), key=ready.__getitem__)
        del ready[kernel]
        order.append(kernel)
        for value in reads[kernel]:
            unread[value] -= 1
        for follower in followers[kernel]:
            waits[follower] -= 1
            if not waits[follower]:
                ready[follower] = priority(follower)
        if any(unread[value] == 1 for value in reads[kernel]):
            for sibling in {s: None for operand in operands[kernel] for s in siblings[operand] if s in ready}:
                if priority(sibling) != ready[sibling]:
                    del ready[sibling]
                    ready[sibling] = priority(sibling)
    assert len(order) == len(computation.kernels)
    return order


def _reshaped(kernel: Kernel, value: Value) -> tuple[Any, ...]:
    """As what a kernel reads a value: a matmul as a matrix, its rows before what it sums over, or the other way, and
    whether what it sums over is split."""
    op = kernel.op
    if op.name != "dot_general":
        return ()
    side = next((k for k, v in enumerate(op.inputs) if v is value), 0)
    contracted, batch = (pair[side] for pair in op.eqn.params["dimension_numbers"])
    shape = op.eqn.invars[side].aval.shape
    free = [axis for axis in range(len(shape)) if axis not in contracted and axis not in batch]
    rows, columns = (free, contracted) if side == 0 else (contracted, free)
    turned = bool(rows and columns) and min(rows) > min(columns)
    made = op.outputs[0]
    split = made.nbytes != math.prod(made.aval.shape) * made.aval.dtype.itemsize
    return math.prod(shape[axis] for axis in rows), math.prod(shape[axis] for axis in columns), turned, split


def depth_first(computation: Computation) -> list[Kernel]:
    """Operands before their readers; first those that many read, then those behind which most bytes stand.

    Readers and bytes are added up over all paths, up to a bound that both soon reach; then XLA's names decide.
    """
    before = predecessors(computation)
    readers: dict[Value, int] = {}
    for kernel in before:
        for value in kernel.reads:
            readers[value] = readers.get(value, 0) + 1
    makers = {value: kernel for kernel in before for value in kernel.writes}
    most_bytes = 0  # XLA's bound on a kernel's bytes is what stands before it in the order as written
    most_users = sum(1 + len(k.writes) if len(k.writes) > 1 else 1 for k in before) + len(computation.inputs)
    most_users += _UNSEEN
    extra: dict[Kernel, int] = {}
    sizes: dict[Kernel, int] = {}

    def rank(value: Value) -> tuple[int, int, str]:
        """Of one operand: a result of several stands behind one instruction more."""
        kernel = makers[value]
        several = len(kernel.writes) > 1
        users = extra[kernel] + (max(readers.get(value, 1) - 1, 0) if several else 0)
        name = "get-tuple-element" if several else _NAMES.get(kernel.op.name, "loop_fusion")
        return -min(users, most_users), -sizes[kernel], name

    for kernel in _walk(before, lambda kernel: before[kernel]):
        most_bytes += defines(kernel)
        own = len(kernel.writes) if len(kernel.writes) > 1 else sum(readers.get(v, 0) for v in kernel.writes)
        operands = [rank(v) for v in kernel.reads if v in makers and not _within(makers[v], kernel)]
        extra[kernel] = min(max(own - 1, 0) - sum(users for users, _, _ in operands), most_users)
        sizes[kernel] = min(defines(kernel) - sum(nbytes for _, nbytes, _ in operands), most_bytes)

    def visit(kernel: Kernel) -> list[Kernel]:
        operands = sorted((v for v in kernel.reads if v in makers), key=rank)
        return list(dict.fromkeys([*(makers[v] for v in operands), *before[kernel]]))

    return _walk(before, visit)


def _within(maker: Kernel, reader: Kernel) -> bool:
    """Whether XLA makes a mean or a variance of rows inside the kernel that normalises them.

    A variance always, a mean where the rows are few.
    """
    op = maker.op
    if op.name != "reduce_sum" or not maker.reads or maker.reads[0] not in reader.reads:
        return False
    shape, axes = op.inputs[0].aval.shape, op.eqn.params["axes"]
    if tuple(axes) != (len(shape) - 1,) or shape[-1] > LONGEST_ROW:
        return False
    centred = any(value.maker is not None and value.maker.name == "reduce_sum" for value in maker.reads)
    return centred or math.prod(shape[:-1]) <= _FEW_ROWS


_UNSEEN = 10
"""Tuples, bitcasts and copies of a training step, which XLA counts too: 5 to 18 in eight that were compiled."""

_FEW_ROWS = 1 << 12
"""Found by compiling: a mean of 4,096 rows is made where it is used, of 8,192 once."""

_NAMES = {
    "dot_general": "gemm_fusion",
    "conv_general_dilated": "cudnn-conv",
    "while": "while",
    "scan": "while",
    "convert_element_type": "loop_convert_fusion",
    "zeros": "loop_broadcast_fusion",
    "relaid": "input_transpose_fusion",
    "reduce_sum": "input_reduce_fusion",
    "reduce_max": "input_reduce_fusion",
}
"""How XLA begins the names of kernels: of equals the first in the alphabet is visited first."""


def as_written(computation: Computation) -> list[Kernel]:
    """Operands before their readers, in the order in which they are read."""
    before = predecessors(computation)
    return _walk(before, lambda kernel: before[kernel])


def _walk(before: dict[Kernel, list[Kernel]], visit: Callable[[Kernel], Sequence[Kernel]]) -> list[Kernel]:
    """Depth first from the results, each kernel after its predecessors."""
    order: dict[Kernel, None] = {}
    roots = [k for k in before if k.op.name == "result"] + [k for k in before if not k.writes]
    for start in [*roots, *before]:
        waiting = [(start, False)]
        while waiting:
            kernel, done = waiting.pop()
            if kernel in order:
                continue
            if done:
                order[kernel] = None
                continue
            waiting.append((kernel, True))
            waiting += [(k, False) for k in reversed(visit(kernel)) if k not in order]
    return list(order)


def late(order: Order) -> Order:
    """As late as possible: from the last kernel back, always the one whose readers have all been placed for longest.

    Of equals the last in the given order. Of the kernels of a loop's body that XLA's scheduler placed, 94% of the pairs
    stand in this order.

    Source: XLA's latency_hiding_scheduler.cc, which fills a body from its end.
    """

    def ordered(computation: Computation) -> list[Kernel]:
        before = predecessors(computation)
        place = {kernel: k for k, kernel in enumerate(order(computation))}
        waits = collections.Counter(earlier for kernels in before.values() for earlier in kernels)
        ready = {kernel: 0 for kernel in before if not waits[kernel]}
        found: list[Kernel] = []
        while ready:
            kernel = min(ready, key=lambda k: (ready[k], -place[k]))
            del ready[kernel]
            found.append(kernel)
            for earlier in before[kernel]:
                waits[earlier] -= 1
                if not waits[earlier]:
                    ready[earlier] = len(found)
        assert len(found) == len(before)
        return found[::-1]

    return ordered


ORDERS: tuple[Order, ...] = (greedy, depth_first, as_written)
"""All three; of equal peaks the first wins."""
