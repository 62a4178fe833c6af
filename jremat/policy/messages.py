"""Parts of error messages: the value that came, cut to one line, and near names of one that doesn't exist."""

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < 10_000 else "an integer of thousands of digits"


def shown(value: Any) -> str:
    """``repr(value)`` on one line and of bounded length, whatever a file or a caller put there.

    >>> shown("gpt2"), len(shown("x" * 10**6)), shown([[[[[[[[1]]]]]]]])
    ("'gpt2'", 80, '[[[[[[[...]]]]]]]')
    """
    return " ".join(_Short().repr(value).split())


def near(name: str, names: Iterable[str], most: int = 2, cutoff: float = 0.6) -> str:
    """The end of a message about a name that doesn't exist; empty where no name is near.

    Args:
        name: that was given.
        names: that exist.
        most: names listed, the nearest first.
        cutoff: least similarity, as of ``difflib.get_close_matches``.

    >>> near("hiden", ["hidden", "heads"]), near("zzz", ["hidden"])
    ("; did you mean 'hidden'?", '')
    """
    found = difflib.get_close_matches(name[:200], list(names), n=most, cutoff=cutoff)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""
