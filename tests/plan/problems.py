"""Random problems, and every choice of one tried."""

import itertools

import numpy as np

from jremat.planner.problem import Link, Node, Problem


def random_problem(rng: np.random.Generator, most: int = 16, shared: float = 0.1, host: bool = False) -> Problem:
    """A random block: up to ``most`` nodes, some that can't be kept, some that must be, some marks on several nodes."""
    nodes = []
    for place in range(int(rng.integers(1, most + 1))):
        reads = (
            tuple(sorted({int(r) for r in rng.integers(0, place, rng.integers(0, min(place, 3) + 1))})) if place else ()
        )
        mark = (f"m{place}" if rng.random() > shared else "shared") if rng.random() < 0.75 else None
        forced = mark not in (None, "shared") and rng.random() < 0.05
        sizes = int(rng.integers(0, 50)), float(rng.integers(0, 30))
        nodes.append(Node(reads, *sizes, needed=bool(rng.random() < 0.4), mark=mark, forced=forced))
    link = Link(float(rng.integers(1, 10)), float(rng.integers(0, 9)), float(rng.integers(0, 9))) if host else None
    return Problem(tuple(nodes), link=link)


def every_choice(problem: Problem, host: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every choice its seconds, device bytes and host bytes; choices that run a forced node again cost infinitely.

    Written apart from ``Problem.outcome``: all choices at once, one node after the other.
    """
    marks = list(problem.marks)
    every = list(itertools.product(range(3 if host else 2), repeat=len(marks)))
    fates = np.array(every, int).reshape(len(every), len(marks))
    column = {mark: fates[:, k] for k, mark in enumerate(marks)}
    zero = np.zeros(len(fates))
    seconds, device, moved = zero.copy(), zero.copy(), zero.copy()
    wanted = [np.full(len(fates), node.needed) for node in problem.nodes]
    for place in reversed(range(len(problem.nodes))):
        node = problem.nodes[place]
        fate = column[node.mark] if node.mark is not None else np.zeros(len(fates), int)
        again = wanted[place] & (fate == 0)
        seconds += np.where(again, np.inf if node.forced else node.seconds, 0.0)
        device += np.where(wanted[place] & (fate == 1), node.nbytes, 0)
        moved += np.where(wanted[place] & (fate == 2), node.nbytes, 0)
        for read in node.reads:
            wanted[read] = wanted[read] | again
    if problem.link is not None:
        for hidden in (problem.link.forward_seconds, problem.link.backward_seconds):
            seconds += np.maximum(0, moved / problem.link.bytes_per_second - hidden)
    return seconds, device, moved
