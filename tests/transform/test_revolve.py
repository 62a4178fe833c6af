"""Schedules: their invariants, and their cost beside the optimum found another way."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jremat.transform.reversal_schedule import (
    Advance,
    Backward,
    Free,
    Restore,
    ReversalSchedule,
    Store,
    simulate,
    tables,
)
from jremat.transform.revolve import binomial, binomial_steps

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
        simulate(ReversalSchedule(2, 1, actions))


def test_bad_numbers_are_named():
    with pytest.raises(ValueError, match="slots: expected at least 1, got 0"):
        binomial(4, 0)
    with pytest.raises(ValueError, match="num_layers: expected at least 1, got 0"):
        binomial_steps(0, 2)
