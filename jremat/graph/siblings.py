"""Kernels that XLA runs as one with several results, since they read the same array and go over the same elements.

Memory feels it: their results are alive together, and none of them is made before all of their inputs are.

Source: XLA's multi-output fusion for GPUs (gpu/transforms/multi_output_fusion.cc): from the last array read to the first.
"""

import math

from jremat.graph.operations import Kernel, Value
from jremat.graph.rules import FUSIBLE, REDUCTIONS

Before = dict[Kernel, set[Kernel]]


def merged(kernels: list[Kernel]) -> list[Kernel]:
    """The kernels, siblings joined, in an order in which each stands after what it reads."""
    for value in _read_last_first(kernels):
        readers = [kernel for kernel in kernels if value in kernel.reads and _elements(kernel)]
        k = 0
        while k < len(readers):
            for other in readers[k + 1 :]:
                if _elements(readers[k]) == _elements(other) and not _connected(readers[k], other, kernels):
                    one = _joined(readers[k], other)
                    kernels = [one if kernel is readers[k] else kernel for kernel in kernels if kernel is not other]
                    readers = [one if kernel is readers[k] else kernel for kernel in readers if kernel is not other]
                    break
            else:
                k += 1
    return _sorted(kernels)


def _read_last_first(kernels: list[Kernel]) -> list[Value]:
    """What several kernels read, but for scalars."""
    readers: dict[Value, int] = {}
    for kernel in kernels:
        for value in kernel.reads:
            readers[value] = readers.get(value, 0) + 1
    return [value for value in reversed(readers) if readers[value] > 1 and math.prod(value.aval.shape) > 1]


def _elements(kernel: Kernel) -> tuple[int, ...]:
    """The shape that a kernel goes over, axes of length one left out; nothing for one that can't be joined."""
    op = kernel.op
    if op.name in REDUCTIONS:
        shape = op.inputs[0].aval.shape
    elif op.name in FUSIBLE or op.name == "slice of a stack":
        shape = op.outputs[0].aval.shape
    else:
        return ()
    return tuple(n for n in shape if n != 1)


def _connected(a: Kernel, b: Kernel, kernels: list[Kernel]) -> bool:
    """Whether one of the two needs the other, directly or through others."""
    makers = {value: kernel for kernel in kernels for value in kernel.writes}
    return _needs(a, b, makers) or _needs(b, a, makers)


def _needs(kernel: Kernel, other: Kernel, makers: dict[Value, Kernel]) -> bool:
    seen, waiting = {kernel}, [kernel]
    while waiting:
        for value in waiting.pop().reads:
            maker = makers.get(value)
            if maker is other:
                return True
            if maker is not None and maker not in seen:
                seen.add(maker)
                waiting.append(maker)
    return False


def _joined(a: Kernel, b: Kernel) -> Kernel:
    reads = tuple(dict.fromkeys((*a.reads, *b.reads)))
    return Kernel(a.op, reads, (*a.writes, *b.writes), (*a.shares, *b.shares))


def _sorted(kernels: list[Kernel]) -> list[Kernel]:
    """In the given order, but each kernel after the makers of what it reads."""
    makers = {value: kernel for kernel in kernels for value in kernel.writes}
    order: dict[Kernel, None] = {}
    for start in kernels:
        waiting = [start]
        while waiting:
            missing = [makers[v] for v in waiting[-1].reads if v in makers and makers[v] not in order]
            if missing and waiting[-1] not in order:
                waiting.append(missing[0])
            else:
                order[waiting.pop()] = None
    return list(order)
