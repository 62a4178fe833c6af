"""Two reports of memory, or two programs: what grew, by name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from jremat.measure.buffers import Buffer
from jremat.oom.causes import kind_of, shapes_of_arguments
from jremat.oom.dump import Dump
from jremat.policy.shown import aligned, human

_LISTED = 20


@dataclass(frozen=True)
class Change:
    """One value, or several of one name, in both.

    Attributes:
        kind: what it is for.
        what: its tag, or the end of its operation's path and its source line.
        shape: dtype and shape of its largest buffer, in the second where it is there.
        before_bytes, after_bytes: 0 where it is not there.
    """

    kind: str
    what: str
    shape: str
    before_bytes: int
    after_bytes: int

    @property
    def grown_bytes(self) -> int:
        """Negative where it became smaller."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True)
class Growth:
    """What changed from one report to another.

    Attributes:
        before, after: the reports.
        changes: of the values that are alive at the peak, the largest change first.

    >>> from jremat.measure.buffers import Buffer
    >>> one = lambda n: Dump("a log", (Buffer(n, "temp", "float32", (n // 4,), "jit(f)/jvp()/tanh", "", None, "t"),))
    >>> print(growth(one(4096), one(8192)))
    4.0 KiB -> 8.0 KiB, 4.0 KiB more
    <BLANKLINE>
      change   before    after
    +4.0 KiB  4.0 KiB  8.0 KiB  saved residuals  jvp()/tanh  float32[2048]
    """

    before: Dump
    after: Dump
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        old, new = self.before.total_bytes, self.after.total_bytes
        parts = [f"{human(old)} -> {human(new)}, {human(abs(new - old))} {'more' if new >= old else 'less'}"]
        if self.changes:
            rows = [
                (_signed(c.grown_bytes), human(c.before_bytes), human(c.after_bytes), c.kind, c.what, c.shape)
                for c in self.changes[:_LISTED]
            ]
            parts += ["", aligned([("change", "before", "after", "", "", ""), *rows], right=[0, 1, 2])]
        return "\n".join(parts)

    __repr__ = __str__


def growth(before: Dump, after: Dump) -> Growth:
    """What grew from ``before`` to ``after``, by kind and name, whatever its shape.

    Args:
        before, after: of any two forms; names match best between two of one form.
    """
    old, new = _by_name(before), _by_name(after)
    changes = [
        Change(*name, _shape(new.get(name) or old[name]), _total(old.get(name)), _total(new.get(name)))
        for name in {**old, **new}
    ]
    changed = [change for change in changes if change.grown_bytes]
    return Growth(before, after, tuple(sorted(changed, key=lambda c: (-abs(c.grown_bytes), c.what))))


def _by_name(dump: Dump) -> Mapping[tuple[str, str], list[Buffer]]:
    """Buffers by kind and name, largest first."""
    shapes, found = shapes_of_arguments(dump), dict[tuple[str, str], list[Buffer]]()
    for buffer in dump.buffers:
        path = re.sub(r"\[.*", "", buffer.what.rstrip("/"))
        operation = "/".join(path.split("/")[-2:]) or re.sub(r"\.[\d.]+$", "", buffer.instruction)
        what = buffer.tag or f"{operation} {buffer.source}".strip()
        found.setdefault((kind_of(buffer, shapes), what), []).append(buffer)
    return found


def _total(buffers: list[Buffer] | None) -> int:
    return sum(buffer.nbytes for buffer in buffers or ())


def _shape(buffers: list[Buffer]) -> str:
    largest = buffers[0]
    return f"{largest.dtype}[{','.join(map(str, largest.shape))}]" if largest.dtype else ""


def _signed(nbytes: int) -> str:
    return f"{'+' if nbytes > 0 else '-'}{human(abs(nbytes))}"
