"""When to run which layer, and which states to hold meanwhile: schedules as data, a simulator, and register tables."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Advance:
    """Run layers ``start`` to ``stop`` - 1 on the working state, which is then the input of layer ``stop``."""

    start: int
    stop: int


@dataclass(frozen=True)
class Store:
    """Copy the working state to a slot."""

    slot: int


@dataclass(frozen=True)
class Restore:
    """Copy a slot to the working state."""

    slot: int


@dataclass(frozen=True)
class Free:
    """A slot's state is read no more."""

    slot: int


@dataclass(frozen=True)
class Backward:
    """Take ``layer`` back from the working state, its input: its own rerun with its residuals, then its pullback."""

    layer: int


Action = Advance | Store | Restore | Free | Backward


@dataclass(frozen=True)
class ReversalSchedule:
    """The reversal of a stack as a list of actions.

    The working state starts as the stack's input. All actions before the first ``Backward`` are the forward sweep.

    Args:
        num_layers: L.
        slots: how many states may be held at once; the input, held in slot 0, is one of them, the working state none.
        actions: in order.
    """

    num_layers: int
    slots: int
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Tally:
    """What a schedule does.

    Args:
        forward_steps: layers advanced, the forward sweep's L - 1 among them. The last layer's forward and each layer's
            own rerun before its pullback are not counted: every schedule has these L + 1.
        peak_slots: states held at once, the input among them.
        runs: how often each layer is advanced.
    """

    forward_steps: int
    peak_slots: int
    runs: tuple[int, ...]


def simulate(schedule: ReversalSchedule) -> Tally:
    """Run a schedule on paper.

    Args:
        schedule: any list of actions.

    Returns:
        What it does.

    Raises:
        ValueError: at the first action that breaks a rule: a layer run on a state that isn't its input, a slot read
            that holds nothing, more slots than ``schedule.slots``, a layer taken back out of turn, or some never.

    >>> actions = (Store(0), Advance(0, 1), Backward(1), Restore(0), Backward(0))
    >>> simulate(ReversalSchedule(2, 1, actions)).forward_steps
    1
    """
    num_layers = schedule.num_layers
    working, held, left, peak = 0, {}, num_layers, 0
    runs = [0] * num_layers
    for k, action in enumerate(schedule.actions):
        match action:
            case Advance(start, stop):
                _require(start == working, k, action, f"the working state is the input of layer {working}")
                _require(start < stop <= left, k, action, f"layers before {left} are left")
                for i in range(start, stop):
                    runs[i] += 1
                working = stop
            case Store(slot):
                _require(0 <= slot < schedule.slots, k, action, f"there are {schedule.slots} slots")
                held[slot] = working
            case Restore(slot):
                _require(slot in held, k, action, f"held are {sorted(held)}")
                working = held[slot]
            case Free(slot):
                _require(slot in held, k, action, f"held are {sorted(held)}")
                del held[slot]
            case Backward(layer):
                _require(layer == left - 1, k, action, f"layer {left - 1} is next")
                _require(layer == working, k, action, f"the working state is the input of layer {working}")
                left -= 1
        peak = max(peak, len(held))
    if left:
        raise ValueError(f"schedule: layers below {left} are never taken back")
    return Tally(sum(runs), peak, tuple(runs))


def _require(holds: bool, k: int, action: Action, why: str) -> None:
    if not holds:
        raise ValueError(f"schedule: action {k}, {action}, can't be done: {why}")


@dataclass(frozen=True, eq=False)
class Tables:
    """A schedule for a machine of registers: the slots and the working state are one array.

    A state that is stored is written to its slot by the step that makes it, and read from there; nothing is copied.

    Args:
        sweep: int32 [L - 1, 2]: for each layer but the last, the register read and the register written.
        replay: int32 [steps, 3]: layer, register read, register written.
        turns: int32 [L, 3]: for each layer, last first: where its replay steps begin and end, and the register that
            then holds its input.
        registers: how many there are; register 0 holds the input at first.
    """

    sweep: np.ndarray
    replay: np.ndarray
    turns: np.ndarray
    registers: int


def tables(schedule: ReversalSchedule) -> Tables:
    """A valid schedule as register tables.

    >>> actions = (Store(0), Advance(0, 1), Backward(1), Restore(0), Backward(0))
    >>> tables(ReversalSchedule(2, 1, actions)).turns.tolist()
    [[0, 0, 1], [0, 0, 0]]
    """
    simulate(schedule)
    scratch = schedule.slots
    at = 0  # the register that holds the working state
    steps: list[list[int]] = []
    turns: list[list[int]] = []
    begin = 0
    for action in schedule.actions:
        match action:
            case Advance(start, stop):
                for layer in range(start, stop):
                    steps.append([layer, at, scratch])
                    at = scratch
            case Store(slot) if at == scratch:
                steps[-1][2] = at = slot
            case Store(slot):
                assert at == slot, "a state is stored by the step that makes it"
            case Restore(slot):
                at = slot
            case Backward():
                turns.append([begin, len(steps), at])
                begin = len(steps)
    swept = turns[0][1]
    used = sorted({0, *(r for _, *pair in steps for r in pair)})
    name = {register: k for k, register in enumerate(used)}
    rows = np.array([[layer, name[r], name[w]] for layer, r, w in steps], np.int32).reshape(-1, 3)
    replayed = [[max(b - swept, 0), e - swept, name[at]] for b, e, at in turns]
    assert rows[:swept, 0].tolist() == list(range(schedule.num_layers - 1)), "the sweep runs each layer once, in order"
    return Tables(rows[:swept, 1:], rows[swept:], np.array(replayed, np.int32), len(used))
