"""Kernels that XLA runs as one with several results, since they read the same array and go over the same elements.

Memory feels it: their results are alive together, and none of them is made before all of their inputs are.

Source: XLA's multi-output fusion for GPUs (gpu/transforms/multi_output_fusion.cc), from the last array read to the
first.
"""

import dataclasses
import math

from jremat.graph.fusion import gathered_into_total
from jremat.graph.operations import Kernel, Value
from jremat.graph.rules import FUSIBLE, REDUCTIONS


def merged(kernels: list[Kernel]) -> list[Kernel]:
    """The kernels, siblings joined but for a matmul's readers, in an order in which each stands after what it reads."""
    readers: dict[Value, list[Kernel]] = {}
    makers: dict[Value, Kernel] = {}
    for kernel in kernels:
        makers |= dict.fromkeys(kernel.writes, kernel)
        for value in kernel.reads:
            readers.setdefault(value, []).append(kernel)
    place = {kernel: float(k) for k, kernel in enumerate(kernels)}
    for value in reversed(list(readers)):
        if math.prod(value.aval.shape) == 1 or (value.maker is not None and value.maker.name == "dot_general"):
            continue
        candidates = [kernel for kernel in readers[value] if _elements(kernel)]
        k = 0
        while k < len(candidates):
            one = candidates[k]
            other = next(
                (c for c in candidates[k + 1 :] if _elements(one) == _elements(c) and not _connected(one, c, makers)),
                None,
            )
            if other is None:
                k += 1
                continue
            both = _joined(one, other)
            place[both] = min(place.pop(one), place.pop(other))
            _replace(one, other, both, readers, makers)
            candidates = [both if c is one else c for c in candidates if c is not other]
    for kernel in list(place):
        if gathered_into_total(kernel.op):
            _join_to_maker(kernel, place, readers, makers)
    for kernel in list(place):
        if kernel.op.name == "random_bits" and len(readers.get(kernel.writes[0], ())) == 1:
            _sink(kernel, place, readers, makers)
    return _sorted(sorted(place, key=place.__getitem__), makers)


def _join_to_maker(
    kernel: Kernel, place: dict[Kernel, float], readers: dict[Value, list[Kernel]], makers: dict[Value, Kernel]
) -> None:
    """A gather for a sum is joined to the kernel whose result it is taken from, if both go over the same elements.

    So a loss is taken from its logits as soon as their log-sum-exp is there, not when all else is done.
    """
    for value in kernel.reads:
        maker = makers.get(value)
        if maker is None or maker.op.name not in FUSIBLE or _elements(maker) != _elements(kernel):
            continue
        if any(_needs(makers[v], maker, makers) for v in kernel.reads if v in makers and makers[v] is not maker):
            continue
        both = _joined(maker, kernel)
        both = dataclasses.replace(both, reads=tuple(v for v in both.reads if v not in maker.writes))
        place[both] = max(place.pop(maker), place.pop(kernel))
        _replace(maker, kernel, both, readers, makers)
        return


def _sink(
    kernel: Kernel, place: dict[Kernel, float], readers: dict[Value, list[Kernel]], makers: dict[Value, Kernel]
) -> None:
    """Random bits whose readers have become one kernel are made in it, and never written."""
    (bits,) = kernel.writes
    (reader,) = readers.pop(bits)
    reads = tuple(dict.fromkeys(r for v in reader.reads for r in (kernel.reads if v is bits else (v,))))
    whole = dataclasses.replace(reader, reads=reads)
    place[whole] = place.pop(reader)
    del place[kernel], makers[bits]
    _replace(kernel, reader, whole, readers, makers)


def _replace(
    one: Kernel, other: Kernel, both: Kernel, readers: dict[Value, list[Kernel]], makers: dict[Value, Kernel]
) -> None:
    """Two kernels are one from here on."""
    makers |= dict.fromkeys(both.writes, both)
    for read in both.reads:
        readers[read] = [c for c in readers.get(read, ()) if c is not one and c is not other] + [both]


def _elements(kernel: Kernel) -> tuple[int, ...]:
    """The shape that a kernel goes over, axes of length one left out; nothing for one that can't be joined."""
    op = kernel.op
    if op.name in REDUCTIONS:
        shape = op.inputs[0].aval.shape
    elif op.name in FUSIBLE or op.name in ("slice of a stack", "relaid"):
        shape = op.outputs[0].aval.shape
    else:
        return ()
    return tuple(n for n in shape if n != 1)


def _connected(a: Kernel, b: Kernel, makers: dict[Value, Kernel]) -> bool:
    """Whether one of the two needs the other, directly or through others."""
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
    """Both as one. What both read can't be written over: XLA gives a place only to the one result that reads it."""
    reads = tuple(dict.fromkeys((*a.reads, *b.reads)))
    own = tuple(tuple(v for v in taken if v not in b.reads) for taken in a.shares)
    others = tuple(tuple(v for v in taken if v not in a.reads) for taken in b.shares)
    return Kernel(a.op, reads, (*a.writes, *b.writes), (*own, *others))


def _sorted(kernels: list[Kernel], makers: dict[Value, Kernel]) -> list[Kernel]:
    """In the given order, but each kernel after the makers of what it reads."""
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
