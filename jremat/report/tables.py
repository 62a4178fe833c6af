"""What all tables for people share: units, columns, a console."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 160
"""Columns of a table that goes to a pipe or a file, which rich would give 80."""


def human(nbytes: float) -> str:
    """Bytes in a unit that suits them.

    >>> human(1536), human(80 * 2**30)
    ('1.5 KiB', '80.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} TiB"


def human_flops(flops: float) -> str:
    """FLOPs in a unit that suits them.

    >>> human_flops(1_236_950_581_248), human_flops(27)
    ('1.24 TFLOP', '27 FLOP')
    """
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if abs(flops) < 1000:
            return f"{flops:.0f} {unit}" if unit == "FLOP" else f"{flops:.3g} {unit}"
        flops /= 1000
    return f"{flops:,.3g} PFLOP"


def changed(difference: float, unit: str) -> str:
    """A difference with its sign; nothing where there is none.

    >>> changed(-1536, "bytes"), changed(0, "bytes")
    ('-1.5 KiB', '')
    """
    text = human(abs(difference)) if unit == "bytes" else human_flops(abs(difference))
    return f"{'-' if difference < 0 else '+'}{text}" if difference else ""


def console() -> "Console":
    """Where tables go: as wide as the terminal, wide enough in a pipe, words left uncoloured."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def columns(title: str, heads: Sequence[str], right: Sequence[str] = (), fold: Sequence[str] = ()) -> "Table":
    """An empty table.

    Args:
        title: above it, at the left.
        heads: of the columns, in order.
        right: those of them that hold figures.
        fold: those of them that may take several lines; the others are never cut.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", pad_edge=False, box=SIMPLE_HEAD)
    for head in heads:
        table.add_column(
            head,
            justify="right" if head in right else "left",
            no_wrap=head not in fold,
            overflow="fold" if head in fold else "ellipsis",
        )
    return table
