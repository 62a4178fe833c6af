"""The order in which a compiler runs kernels, to need little memory: three ways, as XLA tries them.

Source: XLA's memory scheduler (hlo_memory_scheduler.cc): a greedy list, and a depth-first walk with and without a
heuristic for which operand to visit first; the one with the least peak is taken for the whole program.
"""

from collections.abc import Callable, Sequence

from jremat.graph.operations import Computation, Kernel, Value

Order = Callable[[Computation], list[Kernel]]


def defines(kernel: Kernel) -> int:
    """Bytes of the values that a kernel makes, as XLA's schedulers count them.

    A barrier makes none. A loop makes all that goes round in it, what it only reads included; so it is put off for as
    long as anything else can run.
    """
    if kernel.op.name == "optimization_barrier":
        return 0
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
    """Always the kernel that frees most beyond what it makes; of equals the one with most readers."""
    before = predecessors(computation)
    followers: dict[Kernel, list[Kernel]] = {kernel: [] for kernel in before}
    for kernel, earlier in before.items():
        for other in earlier:
            followers[other].append(kernel)
    reads = {k: list(dict.fromkeys(root(v) for v in k.reads if not root(v).held)) for k in before}
    unread: dict[Value, int] = {}
    for values in reads.values():
        for value in values:
            unread[value] = unread.get(value, 0) + 1
    waits = {kernel: len(earlier) for kernel, earlier in before.items()}
    ready = [kernel for kernel in before if not waits[kernel]]
    order: list[Kernel] = []
    while ready:
        best, best_priority = 0, (-(1 << 62), 0)
        for k, kernel in enumerate(ready):
            if kernel.writes and all(value.nbytes <= 8 for value in kernel.writes):
                priority = (1 << 62, 1 << 62)  # scalars first
            else:
                freed = sum(value.nbytes for value in reads[kernel] if unread[value] == 1)
                priority = freed - defines(kernel), len(followers[kernel])
            if priority >= best_priority:  # of equals the one that became ready last
                best, best_priority = k, priority
        kernel = ready.pop(best)
        order.append(kernel)
        for value in reads[kernel]:
            unread[value] -= 1
        for follower in followers[kernel]:
            waits[follower] -= 1
            if not waits[follower]:
                ready.append(follower)
    assert len(order) == len(computation.kernels)
    return order


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
    most_users = sum(max(2 * len(k.writes), 1) if len(k.writes) > 1 else 1 for k in before) + len(computation.inputs)
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
        operands = [rank(v) for v in kernel.reads if v in makers]
        extra[kernel] = min(max(own - 1, 0) - sum(users for users, _, _ in operands), most_users)
        sizes[kernel] = min(defines(kernel) - sum(nbytes for _, nbytes, _ in operands), most_bytes)

    def visit(kernel: Kernel) -> list[Kernel]:
        operands = sorted((v for v in kernel.reads if v in makers), key=rank)
        return list(dict.fromkeys([*(makers[v] for v in operands), *before[kernel]]))

    return _walk(before, visit)


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


ORDERS: tuple[Order, ...] = (greedy, depth_first, as_written)
"""All three; of equal peaks the first wins."""
