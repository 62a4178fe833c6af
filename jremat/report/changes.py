"""Two explanations of one function, value by value: what one keeps and the other recomputes."""

from collections.abc import Iterable
from dataclasses import dataclass

from jremat.report.explain import ExplainedValue, Explanation


@dataclass(frozen=True)
class State:
    """What becomes of one value, over all layers.

    Args:
        kept_copies, offloaded_copies, again_copies: how many are kept, moved to the host, recomputed.
        held_bytes: of those that are kept or moved.
        recompute_flops: matmul FLOPs to recompute it.
    """

    kept_copies: int = 0
    offloaded_copies: int = 0
    again_copies: int = 0
    held_bytes: int = 0
    recompute_flops: int = 0

    def __add__(self, row: ExplainedValue) -> "State":
        return State(
            self.kept_copies + row.copies * (row.fate == "kept"),
            self.offloaded_copies + row.copies * (row.fate == "offloaded"),
            self.again_copies + row.copies * (row.fate == "recomputed"),
            self.held_bytes + row.bytes * (row.fate != "recomputed"),
            self.recompute_flops + row.recompute_flops,
        )

    def __str__(self) -> str:
        counts = (
            ("kept", self.kept_copies),
            ("host", self.offloaded_copies),
            ("again", self.again_copies),
        )
        return ", ".join(f"{word}{f' ×{n}' if n > 1 else ''}" for word, n in counts if n) or "–"


@dataclass(frozen=True)
class Change:
    """One value under two policies.

    Args:
        value, part, source: of the value.
        before, after: what becomes of it under each.
    """

    value: str
    part: str
    source: str
    before: State
    after: State

    @property
    def differs(self) -> bool:
        """Whether bytes are held or matmuls are run in one and not in the other."""
        held = self.before.held_bytes != self.after.held_bytes
        return held or self.before.recompute_flops != self.after.recompute_flops


def changes(before: Explanation, after: Explanation) -> tuple[Change, ...]:
    """Every value of both, in the order of the tables; what is fetched again is left out."""
    states = [_states(explanation) for explanation in (before, after)]
    keys = dict.fromkeys(key for found in (states[1], states[0]) for key in found)
    order = {part: k for k, part in enumerate(dict.fromkeys(row.part for e in (before, after) for row in e))}
    rows = [
        Change(value, part, source, *(found.get((part, value, source), State()) for found in states))
        for part, value, source in keys
    ]
    return tuple(sorted(rows, key=lambda row: (order[row.part], -max(row.before.held_bytes, row.after.held_bytes))))


def _states(found: Iterable[ExplainedValue]) -> dict[tuple[str, str, str], State]:
    states: dict[tuple[str, str, str], State] = {}
    for row in found:
        if row.fate != "input" and not row.fetched:
            key = row.part, row.value, row.source
            states[key] = states.get(key, State()) + row
    return states
