"""What a lint says: the fault, where it stands, what it costs, and the cure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jremat.policy.shown import filled

if TYPE_CHECKING:
    from jremat.check.subject import Subject


@dataclass(frozen=True)
class Finding:
    """One fault of a program.

    Args:
        rule: its slug, as in ``jremat.check.RULES``.
        message: what is wrong here, in a line.
        place: the user's line, ``file.py:12 (function)``.
        cure: what to do.
        cost_bytes: of memory, in one call: kept for nothing, or moved for nothing.
        cost_flops: recomputed for nothing, in one call: of matmuls, or of everything where no matmul is in it.

    >>> print(Finding("double-remat", "two remats", "a.py:7", "drop one", 0, 4096))
    a.py:7: two remats [double-remat]; costs 4,096 FLOPs; cure: drop one
    """

    rule: str
    message: str
    place: str
    cure: str
    cost_bytes: int = 0
    cost_flops: int = 0

    @property
    def cost(self) -> str:
        """Its cost in words.

        >>> Finding("", "", "", "", 2 * 2**20, 10).cost
        '2.0 MiB and 10 FLOPs'
        """
        parts = [_bytes(self.cost_bytes)] if self.cost_bytes else []
        parts += [_flops(self.cost_flops)] if self.cost_flops else []
        return " and ".join(parts) or "nothing that can be counted"

    def __str__(self) -> str:
        text = f"{self.place}: {self.message} [{self.rule}]; costs {self.cost}; cure: {self.cure}"
        return filled(text, "  ")

    __repr__ = __str__


class Findings(tuple[Finding, ...]):
    """Findings that print one after the other.

    >>> print(Findings())
    no findings
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no findings"

    __repr__ = __str__


def _bytes(count: int) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.1f} {unit}"
    return f"{count} bytes"


def _flops(count: int) -> str:
    return f"{count:,} FLOPs" if count < 1e6 else f"{count:.2e} FLOPs"


@dataclass(frozen=True)
class Rule:
    """One kind of fault.

    Args:
        slug: its name.
        symptom: what a user sees.
        why: why it costs.
        cure: what helps.
        find: reads a program's findings.
    """

    slug: str
    symptom: str
    why: str
    cure: str
    find: "Callable[[Subject], Iterator[Finding]]"
