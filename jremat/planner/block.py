"""The best choice of kept values in one block, exactly: a 0/1 program, solved to a gap of nothing.

For each node of the block's forward program there is whether it is *kept* on the device, *moved* to the host, or *run*
again. Wanted is what the backward pass reads and what a node that is run again reads; what is wanted must be kept,
moved or run. Least is the time of what is run again and of transfers that don't hide. With the keeps fixed the runs are
a closure, so only the keeps are integers.

Source: the integer program of Jain et al. 2020, Checkmate, arXiv 1910.02653, section 4, without its stages: inside one
block the backward pass reads all that is kept at once.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from jremat.planner.problem import Outcome, Problem


@dataclass(frozen=True)
class Budget:
    """Bytes that one block may keep.

    Args:
        device_bytes: on the device; ``math.inf`` where it doesn't matter.
        host_bytes: in pinned host memory; 0: nothing is offloaded.
    """

    device_bytes: float = math.inf
    host_bytes: float = 0

    def __post_init__(self) -> None:
        for name, value in (("device_bytes", self.device_bytes), ("host_bytes", self.host_bytes)):
            if not value >= 0:
                raise ValueError(f"{name}: expected at least 0 bytes, got {value}")


def best(problem: Problem, budget: Budget) -> Outcome | None:
    """The choice of least recompute time that keeps no more than ``budget``; of equal ones one that keeps least.

    Args:
        problem: of one block.
        budget: in bytes.

    Returns:
        The best choice, proved; None where what must be kept alone is more than the budget.

    >>> from jremat.planner.problem import Node
    >>> chain = Problem((Node((), 8, 2.0, mark="a"), Node((0,), 4, 3.0, mark="b"), Node((1,), 4, 5.0, needed=True)))
    >>> sorted(best(chain, Budget(4)).kept), best(chain, Budget(0)).recompute_seconds
    (['b'], 10.0)
    """
    program = _Program(_reachable(problem), problem, offload=budget.host_bytes > 0 and problem.link is not None)
    found = program.solve(seconds=1.0, nbytes=0.0, budget=budget)
    return None if found is None else problem.outcome(*found)


def least_bytes(problem: Problem, recompute_seconds: float, budget: Budget = Budget()) -> Outcome | None:
    """The choice that keeps least among those that cost no more than ``recompute_seconds``.

    >>> from jremat.planner.problem import Node
    >>> chain = Problem((Node((), 8, 2.0, mark="a"), Node((0,), 4, 3.0, mark="b"), Node((1,), 4, 5.0, needed=True)))
    >>> least_bytes(chain, 9.0).kept_bytes, least_bytes(chain, 10.0).kept_bytes
    (4, 0)
    """
    program = _Program(_reachable(problem), problem, offload=budget.host_bytes > 0 and problem.link is not None)
    found = program.solve(seconds=0.0, nbytes=1.0, budget=budget, limit_seconds=recompute_seconds)
    return None if found is None else problem.outcome(*found)


def _reachable(problem: Problem) -> list[int]:
    """Places of the nodes that the backward pass reads or that lie before one that it reads, in program order."""
    wanted = [node.needed for node in problem.nodes]
    for place in range(len(problem.nodes) - 1, -1, -1):
        if wanted[place]:
            for read in problem.nodes[place].reads:
                wanted[read] = True
    return [place for place, flag in enumerate(wanted) if flag]


# The objective is a share of the time of running all, times this: the solver stops at an absolute gap of 1e-6.
_SCALE = 1e5


class _Program:
    """The rows and columns of the 0/1 program.

    Columns: per mark whether it is kept; per mark whether it is moved, if anything may be; per node that bears a mark
    of several nodes, whether its own bytes are kept; per node whether it is run; the time lost to transfers, out and
    back.
    """

    def __init__(self, places: list[int], problem: Problem, offload: bool):
        self.problem, self.places, self.offload = problem, places, offload
        alive = set(places)
        self.marks = [mark for mark, at in problem.marks.items() if alive & set(at)]
        columns = iter(range(10**9))
        self.keep = {mark: next(columns) for mark in self.marks}
        self.move = {mark: next(columns) for mark in self.marks} if offload else {}
        self.run = {place: next(columns) for place in places}
        # Where several nodes bear one mark, those that nobody reads are not kept: each has a column of its own.
        shared = [p for p in places if (m := problem.nodes[p].mark) and len(set(problem.marks[m]) & alive) > 1]
        self.own = {place: next(columns) for place in shared}
        self.own_moved = {place: next(columns) for place in shared} if offload else {}
        self.lost = (next(columns), next(columns)) if offload else ()
        self.width = next(columns)
        self.unit_seconds = sum(problem.nodes[p].seconds for p in places) or 1.0

    def solve(
        self, seconds: float, nbytes: float, budget: Budget, limit_seconds: float = math.inf
    ) -> tuple[frozenset[str], frozenset[str]] | None:
        """The marks kept and moved, or None where nothing is allowed.

        Args:
            seconds, nbytes: weights of the two in the objective.
            budget: of bytes.
            limit_seconds: the most recompute time.
        """
        if not self.places:
            return frozenset(), frozenset()
        time, size, host = self._vectors()
        # The second aim breaks ties of the first; a share of 1e-7 of it can't outweigh a real difference.
        aim = time * (seconds or 1e-7 * nbytes) + (size + host) / max(sum(size), 1) * (nbytes or 1e-7 * seconds)
        rows = list(self._rows())
        # Bytes in their common divisor: whole numbers, so that the solver's tolerance is less than one of them.
        unit = math.gcd(*(int(n) for n in (*size, *host))) or 1
        for vector, most in ((size, budget.device_bytes), (host, budget.host_bytes)):
            if most < math.inf and vector.any():
                rows.append((_sparse(vector / unit), -np.inf, most // unit))
        if limit_seconds < math.inf:
            rows.append((_sparse(time), -np.inf, limit_seconds / self.unit_seconds + 1e-9))
        low, high = np.zeros(self.width), np.ones(self.width)
        high[list(self.lost)] = np.inf
        high[[column for place, column in self.run.items() if self.problem.nodes[place].forced]] = 0
        integral = np.zeros(self.width)
        integral[[*self.keep.values(), *self.move.values()]] = 1
        found = milp(
            aim * _SCALE,
            constraints=_constraints(rows, self.width),
            integrality=integral,
            bounds=Bounds(low, high),
            options={"mip_rel_gap": 0.0, "presolve": True},
        )
        if found.x is None:
            return None
        assert found.status == 0, f"an exact solver ends with a proof: {found.message}"
        chosen = lambda column: found.x[column] > 0.5
        moved = frozenset(mark for mark, column in self.move.items() if chosen(column))
        return frozenset(mark for mark, column in self.keep.items() if chosen(column)) - moved, moved

    def _vectors(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Per column its time, as a share of running all, and its bytes on the device and on the host."""
        nodes = self.problem.nodes
        time, size, host = (np.zeros(self.width) for _ in range(3))
        for place, column in self.run.items():
            time[column] = nodes[place].seconds / self.unit_seconds
        time[list(self.lost)] = 1.0
        for columns, own, vector in ((self.keep, self.own, size), (self.move, self.own_moved, host)):
            for place, column in own.items():
                vector[column] = nodes[place].nbytes
            for mark, column in columns.items():
                alone = [p for p in self.problem.marks[mark] if p in self.run and p not in self.own]
                vector[column] = sum(nodes[p].nbytes for p in alone)
        return time, size, host

    def _rows(self):
        """(column -> coefficient, lower, upper) of every rule but the budgets."""
        nodes = self.problem.nodes
        for place in self.places:
            node = nodes[place]
            if node.needed:
                yield self._available(place), 1, np.inf
            for read in set(node.reads):
                yield {**self._available(read), self.run[place]: -1}, 0, np.inf
            if node.mark is None:
                continue
            if place in self.own:  # kept by itself only as its mark allows, and run again only as it doesn't
                yield {self.keep[node.mark]: 1, self.own[place]: -1}, 0, np.inf
                barred = {self.keep[node.mark]: 1, self.run[place]: 1}
                if self.offload:
                    yield {self.move[node.mark]: 1, self.own_moved[place]: -1}, 0, np.inf
                    barred[self.move[node.mark]] = 1
                yield barred, -np.inf, 1
        for mark in self.move:
            yield {self.keep[mark]: 1, self.move[mark]: 1}, -np.inf, 1
        link = self.problem.link
        if self.offload and link is not None:
            _, _, host = self._vectors()
            transfer = {
                int(column): host[column] / link.bytes_per_second / self.unit_seconds for column in np.flatnonzero(host)
            }
            for column, hidden in zip(self.lost, (link.forward_seconds, link.backward_seconds)):
                yield {column: 1, **{k: -v for k, v in transfer.items()}}, -hidden / self.unit_seconds, np.inf

    def _available(self, place: int) -> dict[int, float]:
        """The columns one of which must be set for the node's result to be there."""
        found: dict[int, float] = {self.run[place]: 1}
        mark = self.problem.nodes[place].mark
        if mark is not None:
            found[self.own.get(place, self.keep[mark])] = 1
            if self.offload:
                found[self.own_moved.get(place, self.move[mark])] = 1
        return found


def _sparse(vector: np.ndarray) -> dict[int, float]:
    return {int(column): float(vector[column]) for column in np.flatnonzero(vector)}


def _constraints(rows, width: int) -> LinearConstraint:
    entries = [
        (row, column, value) for row, (coefficients, _, _) in enumerate(rows) for column, value in coefficients.items()
    ]
    at, columns, values = zip(*entries) if entries else ((), (), ())
    matrix = coo_array((values, (at, columns)), shape=(len(rows), width)).tocsr()
    return LinearConstraint(matrix, [low for _, low, _ in rows], [high for _, _, high in rows])
