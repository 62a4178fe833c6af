"""The 0/1 program of one block against every choice, and its bound."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jremat.planner.block import Budget, best, least_bytes
from jremat.planner.cut import convex_frontier, cut, least_seconds
from jremat.planner.problem import Node, Problem
from tests.plan.problems import every_choice, random_problem


def test_equals_brute_force_on_300_random_graphs():
    rng = np.random.default_rng(2026)
    for _ in range(300):
        problem, budget = random_problem(rng), int(rng.integers(0, 200))
        seconds, device, _ = every_choice(problem)
        allowed = (device <= budget) & np.isfinite(seconds)
        found = best(problem, Budget(budget))
        if not allowed.any():
            assert found is None
            continue
        least = seconds[allowed].min()
        assert found.recompute_seconds == pytest.approx(least, abs=1e-6)
        assert found.kept_bytes == device[allowed & (seconds == least)].min(), "of equal ones, the one that keeps least"
        assert least_seconds(problem, budget) <= least + 1e-9, "the bound is below every choice"


def test_equals_brute_force_with_a_link_to_the_host():
    rng = np.random.default_rng(7)
    for _ in range(200):
        problem = random_problem(rng, most=8, host=True)
        device_bytes, host_bytes = (int(n) for n in rng.integers(0, 120, 2))
        seconds, device, host = every_choice(problem, host=True)
        allowed = (device <= device_bytes) & (host <= host_bytes) & np.isfinite(seconds)
        found = best(problem, Budget(device_bytes, host_bytes))
        if not allowed.any():
            assert found is None
            continue
        assert found.recompute_seconds == pytest.approx(seconds[allowed].min(), abs=1e-6)
        assert found.kept_bytes <= device_bytes and found.host_bytes <= host_bytes


def test_least_bytes_is_the_same_program_the_other_way_round():
    rng = np.random.default_rng(3)
    for _ in range(200):
        problem, limit = random_problem(rng), float(rng.integers(0, 200))
        seconds, device, _ = every_choice(problem)
        allowed = seconds <= limit
        found = least_bytes(problem, limit)
        if not allowed.any():
            assert found is None
            continue
        assert found.kept_bytes == device[allowed].min()
        assert found.recompute_seconds <= limit


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), budget=st.integers(0, 300))
def test_more_bytes_never_cost_more_time(seed, budget):
    problem = random_problem(np.random.default_rng(seed), shared=0.0)
    less, more = best(problem, Budget(budget)), best(problem, Budget(budget + 25))
    if less is not None:
        assert more.recompute_seconds <= less.recompute_seconds + 1e-6


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_convex_frontier_is_convex_and_exact(seed):
    problem = random_problem(np.random.default_rng(seed), shared=0.0)
    points = [(p.kept_bytes, p.recompute_seconds) for p in convex_frontier(problem)]
    seconds, device, _ = every_choice(problem)
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points)]
    assert all(slope < 0 for slope in slopes) and slopes == sorted(slopes)
    for nbytes, time_ in points:
        if np.isfinite(seconds[device <= nbytes].min()):
            assert time_ == pytest.approx(seconds[device <= nbytes].min(), abs=1e-6)


def test_a_cut_is_no_worse_than_any_choice_at_its_price():
    rng = np.random.default_rng(11)
    for _ in range(100):
        problem, price = random_problem(rng, shared=0.0), float(rng.uniform(0, 3))
        seconds, device, _ = every_choice(problem)
        worth = (seconds + price * device)[np.isfinite(seconds)]
        if len(worth):
            assert cut(problem, price).least <= worth.min() + 1e-9
            chosen = cut(problem, price).outcome
            assert chosen.recompute_seconds + price * chosen.kept_bytes <= worth.min() + 1e-3


def test_two_hundred_values_to_a_gap_of_nothing_in_a_tenth_of_a_second():
    rng, took = np.random.default_rng(5), []
    for _ in range(9):
        nodes = []
        for place in range(250):
            reads = tuple({max(place - int(back), 0) for back in rng.integers(1, 6, 2)}) if place else ()
            size = int(rng.choice([256, 1024, 4096, 16384]))
            nodes.append(Node(reads, size, float(rng.random()), needed=bool(rng.random() < 0.15), mark=f"m{place}"))
        problem = Problem(tuple(nodes))
        start = time.perf_counter()
        assert best(problem, Budget(40_000)) is not None
        took.append(time.perf_counter() - start)
    # The aim is 0.1 s on two quiet cores; the slack is for machines that run other tests beside this one.
    assert sorted(took)[4] < 0.4, took


def test_a_budget_below_what_must_be_kept_has_no_choice():
    router = Problem((Node((), 100, 1.0, mark="r", forced=True), Node((0,), 8, 1.0, needed=True)))
    assert best(router, Budget(99)) is None
    assert best(router, Budget(100)).kept_bytes == 100


def test_refuses_nonsense():
    with pytest.raises(ValueError, match="device_bytes: expected at least 0"):
        Budget(-1)
    with pytest.raises(ValueError, match="expected earlier nodes only"):
        Problem((Node((0,), 1, 1.0),))
