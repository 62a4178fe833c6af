"""Kept bytes at a price: a min-cut, which bounds every choice from below and gives the convex frontier.

With a price on bytes instead of a budget, the choice of one block is a minimum cut: for each node a vertex "run again"
and a vertex "wanted", an edge to the sink that costs its time, an edge between the two that costs its bytes at the
price. The cut's value less the price of the budget is a lower bound on the recompute time of every choice within that
budget (Lagrange), so it certifies an answer without the solver that found it.

Source: Picard 1976, Management Science 22(11), for the cut (PyTorch's ``torch/_functorch/partitioners.py`` cuts a
graph like this one without a price); Everett 1963, Operations Research 11(3), for the price and its bound.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jremat.planner.problem import Node, Outcome, Problem


@dataclass(frozen=True)
class Cut:
    """The best choice at one price.

    Args:
        outcome: of the choice.
        least: no choice has a smaller recompute time plus price times bytes: proved, by whole numbers rounded down.
    """

    outcome: Outcome
    least: float


def cut(problem: Problem, price: float) -> Cut:
    """The choice of least recompute time plus ``price`` times kept bytes, nothing offloaded.

    Args:
        price: of a byte, in the unit of ``Node.seconds``; at least 0.

    >>> from jremat.planner.problem import Node
    >>> chain = Problem((Node((), 8, 2.0, mark="a"), Node((0,), 4, 3.0, mark="b"), Node((1,), 4, 5.0, needed=True)))
    >>> [sorted(cut(chain, price).outcome.kept) for price in (0.1, 10.0)]
    [['b'], []]
    """
    return _Prices(problem).cut(price)


@dataclass(frozen=True, eq=False)
class Network:
    """The graph of a problem's cuts, built once for all prices.

    Args:
        seconds, nbytes: of each node.
        marked: whether it can be kept.
        forced: whether it must not be run again.
        needed: whether the backward pass reads it.
        readers, reads: of each edge, who reads and what is read.
    """

    seconds: np.ndarray
    nbytes: np.ndarray
    marked: np.ndarray
    forced: np.ndarray
    needed: np.ndarray
    readers: np.ndarray
    reads: np.ndarray

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> "Network":
        """Of a planner's nodes."""
        edges = [(place, read) for place, node in enumerate(nodes) for read in node.reads]
        readers, reads = np.array(edges, np.int64).reshape(len(edges), 2).T
        return cls(
            np.array([node.seconds for node in nodes], float),
            np.array([node.nbytes for node in nodes], float),
            np.array([node.mark is not None for node in nodes], bool),
            np.array([node.forced for node in nodes], bool),
            np.array([node.needed for node in nodes], bool),
            readers,
            reads,
        )

    def sides(self, price: float) -> tuple[np.ndarray, np.ndarray, float]:
        """The best choice at a price: which nodes are kept, which are run again, and the value of the cut."""
        count = len(self.seconds)
        none = np.zeros(count, bool)
        if not self.needed.any():
            return none, none, 0.0
        sizes = price * self.nbytes
        # Capacities are whole numbers of 31 bits; rounding down keeps the flow a lower bound.
        unit = max(float(self.seconds.sum() + sizes.sum()), 1e-300) / 2**28
        endless = 2**29
        pointers, indices, place = self._structure
        flat = np.full(len(indices), endless, np.int32)
        flat[:count] = np.where(self.forced & self.marked, endless, self.seconds / unit)
        flat[count : 2 * count] = np.where(self.marked, sizes / unit, endless)
        data = np.empty_like(flat)
        data[place] = flat
        graph = csr_array((data, indices, pointers), shape=(2 * count + 2, 2 * count + 2))
        result = maximum_flow(graph, 2 * count, 2 * count + 1)
        left = graph - result.flow
        left.data[left.data < 0] = 0
        left.eliminate_zeros()
        reached = np.zeros(2 * count + 2, bool)
        reached[breadth_first_order(left, 2 * count, return_predecessors=False)] = True
        again = reached[:count]
        return reached[count : 2 * count] & ~again & self.marked, again, float(result.flow_value * unit)

    @cached_property
    def _structure(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The edges as a sparse matrix has them, and where each of them is in it."""
        count = len(self.seconds)
        source, sink, every = 2 * count, 2 * count + 1, np.arange(count)
        needed = np.flatnonzero(self.needed)
        starts = np.concatenate([every, count + every, self.readers, np.full(len(needed), source)])
        ends = np.concatenate([np.full(count, sink), every, count + self.reads, count + needed])
        order = np.lexsort((ends, starts))
        place = np.empty(len(starts), np.int64)
        place[order] = np.arange(len(starts))
        pointers = np.searchsorted(starts[order], np.arange(sink + 2))
        return pointers.astype(np.int32), ends[order].astype(np.int32), place


@dataclass(frozen=True, eq=False)
class _Prices:
    """Cuts of one problem at any price."""

    problem: Problem

    @cached_property
    def _nodes(self) -> tuple[Node, ...]:
        return tuple(reduced(self.problem.nodes).values())

    @cached_property
    def _network(self) -> Network:
        return Network.of(self._nodes)

    def cut(self, price: float) -> Cut:
        """As the function ``cut``."""
        kept, _, value = self._network.sides(price)
        marks = {mark for place in np.flatnonzero(kept) if (mark := self._nodes[place].mark) is not None}
        return Cut(self.problem.outcome(marks), value)


def reduced(nodes: Sequence[Node], units: Sequence[int] = (), fixed: Collection[int] = ()) -> dict[int, Node]:
    """The nodes without those that no best choice keeps, by their places.

    A value with one reader, which is no larger and can be kept itself, is never worth keeping; and what can't be kept
    and has one reader is run again whenever that is: the two become one node. What nothing needs is left out.

    Args:
        nodes: in program order.
        units: of each node, e.g. the part of a program that it is in: nodes of two units stay two; all are one without.
        fixed: places of nodes to leave as they are.

    Returns:
        What is left, its reads in the numbering of what is left.

    >>> chain = (Node((), 8, 2.0, mark="a"), Node((0,), 4, 3.0, mark="b"), Node((1,), 4, 5.0, needed=True))
    >>> [(node.mark, node.seconds) for node in reduced(chain).values()]
    [('b', 5.0), (None, 5.0)]
    """
    bearers: dict[str, int] = {}
    for node in nodes:
        if node.mark is not None:
            bearers[node.mark] = bearers.get(node.mark, 0) + 1
    alive = [node.needed for node in nodes]
    readers: list[list[int]] = [[] for _ in nodes]
    for place in range(len(nodes) - 1, -1, -1):
        if alive[place]:
            for read in nodes[place].reads:
                alive[read] = True
                readers[read].append(place)
    into: dict[int, int] = {}  # node -> the node that it is merged into
    seconds = [node.seconds for node in nodes]
    flops = [node.matmul_flops for node in nodes]
    reads: list[set[int]] = [set(node.reads) for node in nodes]
    for place, node in enumerate(nodes):
        if not alive[place] or node.needed or node.forced or len(readers[place]) != 1:
            continue
        reader = readers[place][0]
        if place in fixed or (units and units[place] != units[reader]):
            continue
        if node.mark is not None:
            after = nodes[reader]
            dominated = after.mark is not None and after.nbytes <= node.nbytes
            if not dominated or bearers[node.mark] > 1 or bearers[str(after.mark)] > 1:
                continue
        into[place] = reader
        seconds[reader] += seconds[place]
        flops[reader] += flops[place]
        reads[reader] = (reads[reader] - {place}) | reads[place]
        for read in reads[place]:
            readers[read] = [*{*(r for r in readers[read] if r != place), reader}]
    stays = [place for place in range(len(nodes)) if alive[place] and place not in into]
    new = {place: k for k, place in enumerate(stays)}
    return {
        place: replace(
            nodes[place],
            reads=tuple(sorted(new[read] for read in reads[place])),
            seconds=seconds[place],
            matmul_flops=flops[place],
        )
        for place in stays
    }


def convex_frontier(problem: Problem) -> tuple[Outcome, ...]:
    """Every choice that is best at some price, fewest kept bytes first: each next one keeps more and recomputes less.

    >>> from jremat.planner.problem import Node
    >>> chain = Problem((Node((), 8, 2.0, mark="a"), Node((0,), 4, 3.0, mark="b"), Node((1,), 4, 5.0, needed=True)))
    >>> [(point.kept_bytes, point.recompute_seconds) for point in convex_frontier(chain)]
    [(0, 10.0), (4, 5.0)]
    """
    total_bytes = sum(node.nbytes for node in problem.nodes) or 1
    total_seconds = sum(node.seconds for node in problem.nodes) or 1.0
    network = _Prices(problem)
    least = network.cut(total_seconds).outcome  # a byte costs as much as running all
    most = network.cut(1e-6 * total_seconds / total_bytes).outcome
    found = {(least.kept_bytes, least.recompute_seconds): least, (most.kept_bytes, most.recompute_seconds): most}

    def between(low: Outcome, high: Outcome) -> None:
        if high.kept_bytes <= low.kept_bytes or low.recompute_seconds <= high.recompute_seconds:
            return
        price = (low.recompute_seconds - high.recompute_seconds) / (high.kept_bytes - low.kept_bytes)
        point = network.cut(price).outcome
        worth = lambda outcome: outcome.recompute_seconds + price * outcome.kept_bytes
        if worth(point) < worth(low) * (1 - 1e-6) and low.kept_bytes < point.kept_bytes < high.kept_bytes:
            found[point.kept_bytes, point.recompute_seconds] = point
            between(low, point)
            between(point, high)

    between(least, most)
    points = [found[key] for key in sorted(found)]
    return tuple(
        p
        for k, p in enumerate(points)
        if all(p.recompute_seconds < earlier.recompute_seconds for earlier in points[:k])
    )


def least_seconds(problem: Problem, device_bytes: float, frontier: tuple[Outcome, ...] | None = None) -> float:
    """A certified lower bound on the recompute time of every choice that keeps at most ``device_bytes``.

    Args:
        frontier: ``convex_frontier(problem)``, where it is there already.

    >>> from jremat.planner.problem import Node
    >>> chain = Problem((Node((), 8, 2.0, mark="a"), Node((0,), 4, 3.0, mark="b"), Node((1,), 4, 5.0, needed=True)))
    >>> round(least_seconds(chain, 2), 3)  # half way between 10 and 5
    7.5
    """
    points = frontier or convex_frontier(problem)
    prices = [0.0] + [
        (low.recompute_seconds - high.recompute_seconds) / (high.kept_bytes - low.kept_bytes)
        for low, high in pairwise(points)
        if low.kept_bytes <= device_bytes <= high.kept_bytes
    ]
    network = _Prices(problem)
    return max(0.0, *(network.cut(price).least - price * device_bytes for price in prices))
