"""What all tables for people share: units, columns, a console."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jremat.policy.shown import human, human_flops

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 160
"""Columns of a table that goes to a pipe or a file, which rich would give 80."""


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
