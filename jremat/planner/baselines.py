"""How others choose what one block keeps, in the planner's own terms, so that the exact choice can be held beside them.

Each takes a problem and a budget and returns an outcome, as ``jremat.planner.block.best`` does, or None where it finds
nothing that fits; ``Block.policy`` makes a policy of any of them and ``jremat.policy.plan_file.write`` a file. What
must not be recomputed is kept by all of them, which the originals don't know. None but MaxText's uses the host.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from jremat.planner.block import Budget, best
from jremat.planner.cut import cut
from jremat.planner.problem import Outcome, Problem

Baseline = Callable[[Problem, Budget], Outcome | None]
"""A way to choose."""


def greedy(problem: Problem, budget: Budget) -> Outcome | None:
    """Starts from all that can be kept and drops, one after the other, what adds least time per byte until it fits.

    Source: PyTorch, ``torch/distributed/_tools/sac_estimator.py``, which orders operations by bytes per second of
    runtime once; here the time and the bytes of a drop are counted anew after each, which is never a worse order to
    begin with. Jain et al. 2020, arXiv 1910.02653, section 6, holds such heuristics beside its program.

    >>> from jremat.planner.problem import Node
    >>> chain = Problem((Node((), 8, 2.0, mark="a"), Node((0,), 4, 3.0, mark="b"), Node((1,), 4, 5.0, needed=True)))
    >>> sorted(greedy(chain, Budget(4)).kept)
    ['b']
    """
    forced = _forced(problem)
    kept = frozenset(problem.marks)
    found = problem.outcome(kept)
    while found.kept_bytes > budget.device_bytes:
        drops = {mark: problem.outcome(kept - {mark}) for mark in sorted(kept - forced)}
        if not drops:
            return None

        def worth(mark: str, before: Outcome = found, drops: Mapping[str, Outcome] = drops) -> tuple[bool, float]:
            freed = before.kept_bytes - drops[mark].kept_bytes
            added = drops[mark].recompute_seconds - before.recompute_seconds
            return (False, added / freed) if freed > 0 else (True, -freed)  # one that frees nothing comes last

        worst = min(drops, key=worth)
        kept, found = kept - {worst}, drops[worst]
    return found


def knapsack(problem: Problem, budget: Budget) -> Outcome | None:
    """PyTorch's: an exact 0/1 knapsack over what costly operations make, then a min-cut for bytes.

    An item weighs its bytes and is worth its own operation's time. What is packed is not recomputed, and under that
    condition a cut keeps the fewest bytes. Neither knows what an item saves behind it, nor what else a spare byte
    could keep; where the fastest choice of all fits, it is taken.

    Source: PyTorch, ``torch/_functorch/partitioners.py``, ``choose_saved_values_set``, with the solver ``ilp`` or
    ``dp`` of ``_activation_checkpointing/knapsack.py``. There the costly operations are a list (here: those with a
    matmul in them), presets that save by fusion come before, and the budget is a share of bytes.

    >>> from jremat.planner.problem import Node
    >>> up = Node((), 8, 2.0, matmul_flops=9, mark="up", needed=True)
    >>> act = Node((0,), 8, 1.0, mark="act", needed=True)
    >>> sorted(knapsack(Problem((up, act)), Budget(8)).kept)
    ['up']
    """
    return _packed(problem, budget, _costly(problem), _fill_exactly)


def greedy_knapsack(problem: Problem, budget: Budget) -> Outcome | None:
    """As ``knapsack``, the items taken by time per byte while they fit.

    Source: PyTorch, ``torch/_functorch/_activation_checkpointing/knapsack.py``, ``greedy_knapsack``.

    >>> from jremat.planner.problem import Node
    >>> pair = (Node((), 6, 7.0, 9, mark="a", needed=True), Node((), 5, 5.0, 9, mark="b", needed=True))
    >>> sorted(greedy_knapsack(Problem(pair), Budget(10)).kept)
    ['a']
    """
    return _packed(problem, budget, _costly(problem), _fill_greedily)


def wide_knapsack(problem: Problem, budget: Budget) -> Outcome | None:
    """As ``knapsack``, over all that the fastest choice keeps, each value worth the time of making it from the others.

    Stronger than what PyTorch does: cheap values are items too, and an item's worth counts what lies behind it. It
    errs only where two items that go together would cost more, or a value that is no item would spare both.

    >>> from jremat.planner.problem import Node
    >>> chain = Problem((Node((), 8, 2.0, mark="a"), Node((0,), 4, 3.0, mark="b"), Node((1,), 4, 5.0, needed=True)))
    >>> sorted(wide_knapsack(chain, Budget(4)).kept), wide_knapsack(chain, Budget(3)).recompute_seconds
    (['b'], 10.0)
    """
    fastest = best(problem, Budget())
    if fastest is None:
        return None
    alone = {item: problem.outcome(fastest.kept - {item}).recompute_seconds for item in fastest.kept}
    held = [(problem.nodes[place].mark, problem.nodes[place].nbytes) for place in fastest.held]
    items = tuple(
        _Item(item, sum(nbytes for mark, nbytes in held if mark == item), alone[item] - fastest.recompute_seconds)
        for item in sorted(fastest.kept)
    )
    return _packed(problem, budget, items, _fill_exactly)


MAXTEXT_ORDER: tuple[tuple[str, ...], ...] = (
    *(("mlp_out",), ("mlp_gate",), ("mlp_up",), ("query",), ("attn_proj",), ("key",), ("value",)),
    ("attn_out", "attn_fused", "attn_lse"),
)
"""Tensors in the order in which MaxText's estimator lets them go, in our tags: by the width that their matmul sums
over, widest first, then by their own. So it stands for f > h = heads · d > s; with s > h the context comes earlier, by
s. A context made by a fused kernel is three values here."""


def fixed_order(problem: Problem, budget: Budget) -> Outcome | None:
    """MaxText's walk: all of its tensors on the device, then one after the other on the host, then recomputed.

    Nothing else is ever kept: no norms, no activations, no probabilities.

    Source: MaxText, ``src/maxtext/utils/estimator.py``, ``next_policy`` and ``generate_priority_list``; there each turn
    is a compile, and without a host to spare the same walk goes from the device to recompute at once.

    >>> from jremat.planner.problem import Node
    >>> up, act = Node((), 8, 2.0, mark="1", name="mlp_up", needed=True), Node((0,), 8, 1.0, mark="2", needed=True)
    >>> fixed_order(Problem((up, act)), Budget(100)).recompute_seconds, fixed_order(Problem((up, act)), Budget(7)).kept
    (1.0, frozenset())
    """
    named = [frozenset(n.mark for n in problem.nodes if n.mark and n.name in tags) for tags in MAXTEXT_ORDER]
    groups = [marks - _forced(problem) for marks in named if marks]
    to_host = budget.host_bytes > 0 and problem.link is not None
    walk = [(0, moved) for moved in range(len(groups) + 1)] if to_host else [(0, 0)]
    walk += [(dropped, len(groups) if to_host else dropped) for dropped in range(1, len(groups) + 1)]
    for dropped, moved in walk:
        kept = _forced(problem).union(*groups[moved:])
        found = problem.outcome(kept, frozenset().union(*groups[dropped:moved]))
        if found.kept_bytes <= budget.device_bytes and found.host_bytes <= budget.host_bytes:
            return found
    return None


BASELINES: Mapping[str, Baseline] = MappingProxyType(
    {f.__name__: f for f in (greedy, knapsack, greedy_knapsack, wide_knapsack, fixed_order)}
)
"""All of them by name."""


@dataclass(frozen=True)
class _Item:
    """What a knapsack may hold: a mark, its bytes, and the time that it is worth."""

    mark: str
    nbytes: int
    seconds: float


_Fill = Callable[[np.ndarray, np.ndarray, float], np.ndarray]
"""Weights, worths and the room to which of the items are taken."""


def _costly(problem: Problem) -> tuple[_Item, ...]:
    """Marks whose own operation, up to the marks before it, has a matmul, where the backward pass leads to it."""
    wanted = set(problem.outcome(()).recomputed)
    found = []
    for mark, places in problem.marks.items():
        made, todo = set(places), list(places)
        while todo:
            before = {r for r in problem.nodes[todo.pop()].reads if problem.nodes[r].mark is None} - made
            made |= before
            todo += before
        if wanted & set(places) and any(problem.nodes[p].matmul_flops for p in made):
            size = sum(problem.nodes[p].nbytes for p in places)
            found.append(_Item(mark, size, sum(problem.nodes[p].seconds for p in made)))
    return tuple(found)


def _packed(problem: Problem, budget: Budget, items: tuple[_Item, ...], fill: _Fill) -> Outcome | None:
    fastest = best(problem, Budget())
    if fastest is None or fastest.kept_bytes <= budget.device_bytes:
        return fastest
    forced = _forced(problem)
    room = budget.device_bytes - sum(n.nbytes for n in problem.nodes if n.mark in forced)
    free = [item for item in items if item.mark not in forced]
    weights, worths = np.array([i.nbytes for i in free], float), np.array([i.seconds for i in free], float)
    taken = fill(weights, worths, room) if room >= 0 and free else np.zeros(len(free), bool)
    plain = problem.outcome(forced.union(item.mark for item, flag in zip(free, taken) if flag))
    # What is packed is not recomputed; everything else may be, free of charge: the cut counts bytes alone.
    bytes_only = tuple(replace(n, seconds=0.0, forced=n.forced or n.mark in plain.kept) for n in problem.nodes)
    leanest = problem.outcome(cut(replace(problem, nodes=bytes_only), 1.0).outcome.kept | forced)
    return next((o for o in (leanest, plain) if o.kept_bytes <= budget.device_bytes), None)


def _fill_exactly(weights: np.ndarray, worths: np.ndarray, room: float) -> np.ndarray:
    unit = max(float(worths.max()), 1e-300)
    found = milp(
        -worths / unit,
        constraints=LinearConstraint(weights[None, :], -np.inf, room),
        integrality=np.ones(len(weights)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    return found.x > 0.5


def _fill_greedily(weights: np.ndarray, worths: np.ndarray, room: float) -> np.ndarray:
    taken = np.zeros(len(weights), bool)
    for item in sorted(range(len(weights)), key=lambda k: -worths[k] / max(weights[k], 1e-300)):
        if weights[item] <= room:
            taken[item], room = True, room - weights[item]
    return taken


def _forced(problem: Problem) -> frozenset[str]:
    """Marks of what must not be recomputed."""
    return frozenset(node.mark for node in problem.nodes if node.forced and node.mark)
