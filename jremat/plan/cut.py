"""Kept bytes at a price: a min-cut, which bounds every choice from below and gives the convex frontier.

With a price on bytes instead of a budget, the choice of one block is a minimum cut: for each node a vertex "run again"
and a vertex "wanted", an edge to the sink that costs its time, an edge between the two that costs its bytes at the
price. The cut's value less the price of the budget is a lower bound on the recompute time of every choice within that
budget (Lagrange), so it certifies an answer without the solver that found it.

Source: Picard 1976, Management Science 22(11), for the cut (PyTorch's ``torch/_functorch/partitioners.py`` cuts a
graph like this one without a price); Everett 1963, Operations Research 11(3), for the price and its bound.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jremat.plan.problem import Outcome, Problem


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

    >>> from jremat.plan.problem import Node
    >>> chain = Problem((Node((), 8, 2.0, mark="a"), Node((0,), 4, 3.0, mark="b"), Node((1,), 4, 5.0, needed=True)))
    >>> [sorted(cut(chain, price).outcome.kept) for price in (0.1, 10.0)]
    [['b'], []]
    """
    nodes = problem.nodes
    count = len(nodes)
    source, sink = 2 * count, 2 * count + 1
    costs = np.array([node.seconds for node in nodes])
    sizes = np.array([price * node.nbytes for node in nodes])
    # Capacities are whole numbers of 31 bits; rounding down keeps the flow a lower bound.
    unit = max(float(costs.sum() + sizes.sum()), 1e-300) / 2**28
    endless = 2**29
    edges: list[tuple[int, int, int]] = []
    for place, node in enumerate(nodes):
        again, wanted = place, count + place
        edges.append((again, sink, endless if node.forced and node.mark else int(costs[place] / unit)))
        edges.append((wanted, again, int(sizes[place] / unit) if node.mark is not None else endless))
        edges += [(again, count + read, endless) for read in node.reads]
        if node.needed:
            edges.append((source, wanted, endless))
    if not edges:
        return Cut(problem.outcome(()), 0.0)
    starts, ends, capacities = (np.array(column) for column in zip(*edges))
    graph = coo_array((capacities.astype(np.int32), (starts, ends)), shape=(sink + 1, sink + 1)).tocsr()
    result = maximum_flow(graph, source, sink)
    left = graph - result.flow
    left.data[left.data < 0] = 0
    left.eliminate_zeros()
    side = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    kept = {node.mark for place, node in enumerate(nodes) if node.mark and count + place in side and place not in side}
    return Cut(problem.outcome(kept), float(result.flow_value * unit))


def convex_frontier(problem: Problem) -> tuple[Outcome, ...]:
    """Every choice that is best at some price, fewest kept bytes first: each next one keeps more and recomputes less.

    >>> from jremat.plan.problem import Node
    >>> chain = Problem((Node((), 8, 2.0, mark="a"), Node((0,), 4, 3.0, mark="b"), Node((1,), 4, 5.0, needed=True)))
    >>> [(point.kept_bytes, point.recompute_seconds) for point in convex_frontier(chain)]
    [(0, 10.0), (4, 5.0)]
    """
    total_bytes = sum(node.nbytes for node in problem.nodes) or 1
    total_seconds = sum(node.seconds for node in problem.nodes) or 1.0
    least = cut(problem, total_seconds).outcome  # a byte costs as much as running all
    most = cut(problem, 1e-6 * total_seconds / total_bytes).outcome
    found = {(least.kept_bytes, least.recompute_seconds): least, (most.kept_bytes, most.recompute_seconds): most}

    def between(low: Outcome, high: Outcome) -> None:
        if high.kept_bytes <= low.kept_bytes or low.recompute_seconds <= high.recompute_seconds:
            return
        price = (low.recompute_seconds - high.recompute_seconds) / (high.kept_bytes - low.kept_bytes)
        point = cut(problem, price).outcome
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

    >>> from jremat.plan.problem import Node
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
    return max(0.0, *(cut(problem, price).least - price * device_bytes for price in prices))
