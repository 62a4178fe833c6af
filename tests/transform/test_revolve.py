"""Schedules: their invariants, and their cost beside the optimum found another way."""

import functools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jremat.transform.reversal_schedule import Advance, Backward, Free, Restore, Schedule, Store, simulate, tables
from jremat.transform.revolve import binomial, binomial_steps, multi_level, optimal, square_root, uniform

LAYERS, SLOTS = 64, 8


@functools.cache
def brute(n: int, slots: int) -> int:
    """Fewest advances by trying every place for the next state: no formula."""
    if n == 1:
        return 0
    if slots == 1:
        return n - 1 + brute(n - 1, 1)
    return min(m + brute(n - m, slots - 1) + brute(m, slots) for m in range(1, n))


@pytest.mark.parametrize("slots", range(1, SLOTS + 1))
def test_binomial_takes_the_fewest_steps(slots):
    for n in range(1, LAYERS + 1):
        tally = simulate(binomial(n, slots))
        assert tally.forward_steps == binomial_steps(n, slots) == brute(n, slots)
        assert tally.peak_slots <= slots


def test_binomial_agrees_with_an_independent_library():
    multistage = pytest.importorskip("checkpoint_schedules.multistage", reason="pip install checkpoint_schedules")
    for slots in range(1, SLOTS + 1):
        for n in range(2, LAYERS + 1):
            assert simulate(binomial(n, slots)).forward_steps == multistage.optimal_extra_steps(n, slots)


@pytest.mark.parametrize("n", [1, 2, 7, 32])
def test_one_slot_costs_half_the_square(n):
    """The naive case: nothing but the input is held, so each layer is reached from it: N (N - 1) / 2 extra steps."""
    schedule = binomial(n, 1)
    tally = simulate(schedule)
    assert (tally.forward_steps, tally.peak_slots) == (n * (n - 1) // 2, 1)
    assert tally.runs == tuple(range(n - 1, -1, -1))


def test_slots_for_every_layer_cost_the_sweep_alone():
    assert all(simulate(binomial(n, n)).forward_steps == n - 1 for n in range(1, 20))


@functools.cache
def cheapest(costs: tuple[int, ...], slots: int) -> int:
    """Least cost of reversing by trying every place, for costs that differ."""
    if len(costs) == 1:
        return 0
    if slots == 1:
        return sum(costs[:-1]) + cheapest(costs[:-1], 1)
    return min(
        sum(costs[:m]) + cheapest(costs[m:], slots - 1) + cheapest(costs[:m], slots) for m in range(1, len(costs))
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=10), st.integers(1, 4))
def test_unequal_layers_cost_the_least(costs, slots):
    tally = simulate(optimal(costs, slots), costs)
    assert tally.forward_cost == cheapest(tuple(costs), slots)
    assert tally.peak_slots <= slots


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_equal_layers_are_a_case_of_unequal_ones(slots):
    for n in (1, 5, 23, LAYERS):
        assert simulate(optimal([1.0] * n, slots)).forward_steps == binomial_steps(n, slots)


@pytest.mark.parametrize(("n", "period"), [(16, 4), (17, 4), (15, 4), (5, 5), (5, 9), (7, 1)])
def test_uniform_by_hand(n, period):
    groups = math.ceil(n / period)
    tally = simulate(uniform(n, period))
    assert tally.forward_steps == n - 1 + (groups - 1) * (period - 1)
    assert tally.peak_slots <= groups + max(period - 2, 0)
    assert max(tally.runs) <= 2


def test_square_root_is_near_two_roots():
    for n in (1, 9, 16, 50, 64, 96):
        assert simulate(square_root(n)).peak_slots <= 2 * math.ceil(math.sqrt(n))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 4))
def test_two_levels_by_their_intervals(n, period, slots):
    """Every interval but the last is swept first; then each is reversed from its outer state, as in one level."""
    tally = simulate(multi_level(n, period, slots))
    intervals = [min(period, n - start) for start in range(0, n, period)]
    assert tally.forward_steps == sum(binomial_steps(k, slots + 1) for k in intervals) + sum(intervals[:-1])
    assert tally.peak_slots <= len(intervals) + slots


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9))
def test_tables_do_what_the_schedule_says(n, slots):
    """The register machine, run on layer numbers in place of states."""
    schedule = binomial(n, slots)
    program = tables(schedule)
    assert program.registers <= slots + 1
    registers = [None] * program.registers
    registers[0] = 0
    for layer, (read, write) in enumerate(program.sweep):
        assert registers[read] == layer
        registers[write] = layer + 1
    done = 0
    for layer, (begin, end, at) in zip(reversed(range(n)), program.turns):
        assert begin == done
        for which, read, write in program.replay[begin:end]:
            assert registers[read] == which
            registers[write] = which + 1
        done = end
        assert registers[at] == layer
    assert done == len(program.replay)
    assert len(program.sweep) + len(program.replay) == simulate(schedule).forward_steps


@pytest.mark.parametrize(
    ("actions", "why"),
    [
        ((Store(0), Advance(1, 2)), "the working state is the input of layer 0"),
        ((Store(0), Advance(0, 3)), "layers before 2 are left"),
        ((Store(0), Advance(0, 1), Store(1)), "there are 1 slots"),
        ((Advance(0, 1), Backward(1), Restore(0)), "held are"),
        ((Store(0), Free(0), Free(0)), "held are"),
        ((Store(0), Backward(0)), "layer 1 is next"),
        ((Store(0), Backward(1)), "the working state is the input of layer 0"),
        ((Store(0), Advance(0, 1), Backward(1)), "layers below 1 are never taken back"),
    ],
)
def test_the_simulator_finds_broken_schedules(actions, why):
    with pytest.raises(ValueError, match=why):
        simulate(Schedule(2, 1, actions))


def test_bad_numbers_are_named():
    with pytest.raises(ValueError, match="slots: expected at least 1, got 0"):
        binomial(4, 0)
    with pytest.raises(ValueError, match="num_layers: expected at least 1, got 0"):
        binomial_steps(0, 2)
    with pytest.raises(ValueError, match="period: expected at least 1, got 0"):
        uniform(4, 0)
    with pytest.raises(ValueError, match="slots: expected 0 or more, got -1"):
        multi_level(4, 2, -1)
    with pytest.raises(ValueError, match="costs: expected none negative, got -1"):
        optimal([1, -1], 2)
    with pytest.raises(ValueError, match="costs: expected one per layer, 3, got 2"):
        simulate(binomial(3, 2), [1, 1])
