"""What all tables for people share: units, columns, a console."""

import os
import sys
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING

from jremat.policy.shown import human, human_flops
from jremat.terminal.table_layout import INDENT, Column, Note, TableRow, laid_out
from jremat.terminal.text import printable, wrapped

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

PIPE_WIDTH = 160
"""Columns of a table that goes to a pipe or a file where ``COLUMNS`` says nothing."""
LEAST_WIDTH = 20
"""Columns below which no table is laid out."""


def changed(difference: float, unit: str) -> str:
    """A difference with its sign; nothing where there is none.

    >>> changed(-1536, "bytes"), changed(0, "bytes")
    ('-1.5 KiB', '')
    """
    text = human(abs(difference)) if unit == "bytes" else human_flops(abs(difference))
    return f"{'-' if difference < 0 else '+'}{text}" if difference else ""


def console(file: IO[str] | None = None) -> "Console":
    """Where tables go: as wide as the terminal or ``COLUMNS``, wide enough in a pipe; no text is read as markup."""
    from rich.console import Console

    fits_terminal = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    screen = Console(width=None if fits_terminal else PIPE_WIDTH, file=file, markup=False, emoji=False, highlight=False)
    screen.width = max(screen.width, LEAST_WIDTH)
    return screen


def show(screen: "Console", *texts: str, indent: int = 0) -> None:
    """Print each text, broken between words where it is wider than the screen, its later lines indented."""
    for text in texts:
        for line in wrapped(printable(text), screen.width, indent):
            screen.print(line, soft_wrap=True)


class Table:
    """A table that shows every cell whole, however narrow the screen.

    Where the columns don't fit beside one another, the ``loose`` ones go to a line of their own below their row, the
    last first. Where the rest still doesn't fit, a long label (the first column) has a line to itself, or the other
    columns go on in further lines.

    Args:
        title: above it.
        caption: below it, each line by itself.
    """

    def __init__(self, title: str = "", caption: str = "") -> None:
        self.title, self.caption = title, caption
        self.columns: list[Column] = []
        self.rows: list[TableRow | Note | None] = []  # None: a new section begins

    def add_column(self, head: str, *, right: bool = False, loose: bool = False) -> None:
        """A column more, at the right: its head, whether it holds figures, whether it may stand below its row.

        Where no column has a head the table has no line of heads.
        """
        self.columns.append(Column(printable(head), right, loose))

    def add_row(self, *cells: str, bold: bool = False) -> None:
        """A row more; cells that are left out are empty."""
        assert len(cells) <= len(self.columns)
        blank = ("",) * (len(self.columns) - len(cells))
        self.rows.append(TableRow((*map(printable, cells), *blank), bold))

    def add_note(self, text: str) -> None:
        """Text below the last row, in lines of its own."""
        self.rows.append(Note(printable(text)))

    def add_section(self) -> None:
        """Set what follows apart."""
        if self.rows and self.rows[-1] is not None:
            self.rows.append(None)

    def lines(self, width: int) -> Iterator[tuple[str, bool]]:
        """Each line at a width, and whether it is bold."""
        yield from ((line, False) for line in wrapped(printable(self.title), width) if line)
        rows = [row for row in self.rows if isinstance(row, TableRow)]
        layout = laid_out(self.columns, rows, width)
        if any(column.head for column in self.columns):
            for line in layout.lines(TableRow(tuple(column.head for column in self.columns)), self.columns, width):
                yield line, False
            yield "─" * min(width, layout.width), False
        for row in self.rows:
            if row is None:
                yield "", False
            elif isinstance(row, Note):
                yield from ((line, False) for line in wrapped(" " * INDENT + row.text, width, 2 * INDENT))
            else:
                yield from ((line, row.bold) for line in layout.lines(row, self.columns, width))
        for text in self.caption.splitlines():
            yield from ((line, False) for line in wrapped(printable(text), width, 2))

    def __rich_console__(self, screen: "Console", options: "ConsoleOptions") -> Iterator["Segment"]:
        from rich.segment import Segment
        from rich.style import Style

        for line, bold in self.lines(options.max_width):
            yield Segment(line + "\n", Style(bold=True) if bold else None)


def columns(title: str, heads: Sequence[str], right: Sequence[str] = (), loose: Sequence[str] = ()) -> Table:
    """An empty table: ``right`` and ``loose`` name heads, as ``Table.add_column`` takes them."""
    table = Table(title)
    for head in heads:
        table.add_column(head, right=head in right, loose=head in loose)
    return table
