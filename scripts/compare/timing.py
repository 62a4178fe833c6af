"""Step time of both sides: a policy's step beside a bare one, again and again, and the median of their ratios."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from scripts.compare import torch_side
from scripts.compare.rows import check
from scripts.compare.session import Case, Session

Step = Callable[[], Any]


@dataclass(frozen=True)
class Pairs:
    """One side's steps, each timed right beside a bare one: what slows the machine slows both.

    Args:
        bare, own: seconds of the steps without remat and of those under the policy, in pairs.
    """

    bare: tuple[float, ...]
    own: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """The policy's time over the bare one's, smallest first."""
        return tuple(sorted(own / bare for bare, own in zip(self.bare, self.own, strict=True)))

    @property
    def overhead(self) -> float:
        """The median ratio."""
        return statistics.median(self.ratios)

    @property
    def middle(self) -> tuple[float, float]:
        """The range of the middle half of the ratios.

        >>> Pairs((1.0,) * 5, (9.0, 2.0, 2.1, 2.2, 1.0)).middle  # one pair was interrupted: it doesn't count
        (2.0, 2.2)
        """
        cut = len(self.ratios) // 4
        return self.ratios[cut], self.ratios[-1 - cut]


def timed(session: Session, cases: Sequence[Case], rounds: int) -> dict[str, dict[str, Any]]:
    """Step times of each case, by its PyTorch line.

    Every round runs all cases, one side then the other, each step beside a bare one and the two in turn first; the
    first round warms up and isn't counted.
    """
    config = session.size.config
    bare: tuple[Step, Step] = session.jax_step("none"), partial(torch_side.step, session.twin, torch_side.one_by_one)
    steps: dict[str, tuple[Step, Step]] = {
        case.line: (session.jax_step(case.spec), partial(torch_side.step, session.twin, case.run_of(config)))
        for case in cases
    }
    seconds: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for turn in range(rounds + 1):
        for line, sides in steps.items():
            for side, own in enumerate(sides):
                pair = _pair(bare[side], own, swapped=turn % 2 == 1)
                if turn:
                    seconds.setdefault((line, side), []).append(pair)
    pairs = {key: Pairs(*zip(*found)) for key, found in seconds.items()}
    return {line: _row(pairs[line, 0], pairs[line, 1]) for line in steps}


def _pair(bare: Step, own: Step, *, swapped: bool) -> tuple[float, float]:
    if swapped:
        second = _seconds(own)
        return _seconds(bare), second
    return _seconds(bare), _seconds(own)


def _seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _row(ours: Pairs, theirs: Pairs) -> dict[str, Any]:
    apart = ours.middle[1] < theirs.middle[0] or theirs.middle[1] < ours.middle[0]
    return {
        "step_seconds": {"jax": statistics.median(ours.own), "pytorch": statistics.median(theirs.own)},
        "overhead": check(
            ours.overhead <= theirs.overhead,
            hard=False,
            jax=ours.overhead,
            pytorch=theirs.overhead,
            jax_middle_half=ours.middle,
            pytorch_middle_half=theirs.middle,
            told_apart=apart,
            pairs=len(ours.own),
        ),
    }


def overhead_line(rows: Sequence[dict[str, Any]]) -> str:
    """In one line, under how many policies JAX's overhead is at most PyTorch's.

    >>> slower = {"jax": 1.5, "pytorch": 1.2, "told_apart": True, "pairs": 5, "holds": False}
    >>> noisy = {**slower, "told_apart": False}
    >>> overhead_line([{"policy": "full", "overhead": slower}, {"policy": "none", "overhead": noisy}])
    "time over none: JAX's at most PyTorch's in 0 of 2 rows; not told apart by 5 pairs in 1; above it in full"
    """
    found = [(row["policy"], row["overhead"]) for row in rows if "overhead" in row]
    holds = sum(overhead["told_apart"] and overhead["holds"] for _, overhead in found)
    noisy = sum(not overhead["told_apart"] for _, overhead in found)
    above = [policy for policy, overhead in found if overhead["told_apart"] and not overhead["holds"]]
    pairs = found[0][1]["pairs"] if found else 0
    return (
        f"time over none: JAX's at most PyTorch's in {holds} of {len(found)} rows; "
        f"not told apart by {pairs} pairs in {noisy}; above it in {', '.join(above) or 'none'}"
    )
