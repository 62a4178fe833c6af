"""What is alive when: a heap that hands out buffers in the order of the kernels, and takes them back."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jremat.graph.operations import Computation, Op, Value
from jremat.graph.order import Order, late, root


@dataclass(eq=False)
class Life:
    """One buffer.

    Attributes:
        value: that it was made for first.
        nbytes: of memory that this computation needs for it.
        born, dies: first and last step at which it is alive.
        depth: of how many loops and branches it is inside.
        values: all that were put in its place, one after the other.
    """

    value: Value
    nbytes: int
    born: int
    dies: int
    depth: int
    values: list[Value] = field(default_factory=list)


@dataclass
class Run:
    """A computation run once.

    Attributes:
        alive: bytes at each step, beyond what the caller holds.
        ops: whose kernel runs at each step, with the operations around it, outermost first.
        lives: every buffer.
        estimate_bytes: the peak as XLA's schedulers see it, who count twice what a loop carries where it starts.
    """

    alive: list[int]
    ops: list[tuple[Op, ...]]
    lives: list[Life]
    estimate_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most at any step."""
        return max(self.alive, default=0)


def run(computation: Computation, order: Order, results_apart: bool = False) -> Run:
    """Simulate one run in the order given.

    Args:
        computation: as kernels.
        order: one of ``jremat.graph.order.ORDERS``.
        results_apart: results lie in memory that is counted elsewhere, as a whole program's do.
    """
    return _Heap(computation, order, results_apart, 0).run()


class _Heap:
    def __init__(self, computation: Computation, order: Order, results_apart: bool, depth: int):
        self.computation, self.order, self.results_apart, self.depth = computation, order, results_apart, depth
        self.kernels = order(computation)
        self.last: dict[Value, int] = {}
        for t, kernel in enumerate(self.kernels):
            for value in kernel.reads:
                self.last[root(value)] = t
        self.place = {}  # for each value carried out of a loop's body, the value whose place it takes
        for k, place in enumerate(computation.carried):
            if place is not None:
                self.place[root(computation.outputs[k])] = computation.inputs[place]
        self.results = {root(v) for v in computation.outputs}
        if results_apart:
            self.results |= self._grown_into_results()
        # What is carried in has a place already, which a loop or an update inside may take over.
        self.buffers = {carried: Life(carried, 0, 0, 0, depth, [carried]) for carried in self.place.values()}

    def run(self) -> Run:
        found = Run([], [], [])
        alive = 0
        for t, kernel in enumerate(self.kernels):
            step = len(found.alive)
            taken: set[Value] = set()
            if kernel.op.name != "optimization_barrier":
                for k, value in enumerate(kernel.writes):
                    place = kernel.shares[k], k in kernel.op.in_place
                    alive += self._allocate(value, place, taken, t, step, found.lives)
            if kernel.op.name.startswith("scatter") and taken:
                found.estimate_bytes = max(found.estimate_bytes, alive + sum(v.nbytes for v in kernel.writes))
            if any(inner.carried for inner in kernel.op.inner):
                found.estimate_bytes = max(found.estimate_bytes, alive + sum(v.nbytes for v in kernel.writes))
            for inner in kernel.op.inner:
                # a branch's results are its caller's, a loop's take the place of what it carries
                within = _Heap(inner, self.order, not inner.carried, self.depth + 1).run()
                offset = len(found.alive)
                found.alive += [alive + n for n in within.alive]
                found.ops += [(kernel.op, *ops) for ops in within.ops]
                for life in within.lives:
                    life.born, life.dies = life.born + offset, life.dies + offset
                found.lives += within.lives
                found.estimate_bytes = max(found.estimate_bytes, alive + within.estimate_bytes)
            if not kernel.op.inner:
                found.alive.append(alive)
                found.ops.append((kernel.op,))
            step = len(found.alive) - 1
            for value in {root(v) for v in (*kernel.reads, *kernel.writes)}:
                held = self.buffers.get(value)
                if held is None:
                    continue
                held.dies = step
                if self.last.get(value, t) <= t and held.values[-1] is value:
                    alive -= held.nbytes
                    del self.buffers[value]
        found.estimate_bytes = max(found.estimate_bytes, found.peak_bytes)
        return found

    def _grown_into_results(self) -> set[Value]:
        """The values that results are written over, as the zeros of a loop's stack: they lie in the results' memory."""
        found: set[Value] = set()
        for t, kernel in reversed(list(enumerate(self.kernels))):
            for k, value in enumerate(kernel.writes):
                if k in kernel.op.in_place and (value in self.results or value in found):
                    found |= {root(v) for v in kernel.shares[k] if not root(v).held and self.last[root(v)] == t}
        return found

    def _allocate(
        self,
        value: Value,
        place: tuple[tuple[Value, ...], bool],
        taken: set[Value],
        t: int,
        step: int,
        lives: list[Life],
    ) -> int:
        """A buffer for a value: one that dies here, or a new one. Returns the bytes that are new."""
        candidates, in_place = place
        for candidate in map(root, candidates):
            old = self.buffers.get(candidate)
            fits = not candidate.held or in_place or self.place.get(value) is candidate
            if old is not None and fits and candidate not in taken and self.last[candidate] == t:
                taken.add(candidate)
                old.values.append(value)
                self.buffers[value] = old
                del self.buffers[candidate]
                return 0
        nbytes = value.nbytes
        if value in self.results and (self.results_apart or self._over(value, candidates, t)):
            nbytes = 0
        life = Life(value, nbytes, step, step, self.depth, [value])
        self.buffers[value] = life
        lives.append(life)
        return nbytes

    def _over(self, value: Value, candidates: tuple[Value, ...], t: int) -> bool:
        """Whether a loop's result can be written over the value that it was carried in as."""
        carried = self.place.get(value)
        if carried is None:
            return False
        last = self.last.get(carried, -1)
        return last < t or (last == t and carried in candidates)


def best(computation: Computation, orders: Sequence[Order], bodies_late: bool = False) -> Run:
    """The run of which XLA expects the least peak, of equal ones the first; loops' bodies then late, if asked."""
    runs = [run(computation, order, results_apart=True) for order in orders]
    found = min(runs, key=lambda r: r.estimate_bytes)
    if not bodies_late:
        return found
    chosen = orders[runs.index(found)]
    return run(computation, lambda c: late(chosen)(c) if c.carried else chosen(c), results_apart=True)
