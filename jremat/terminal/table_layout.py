"""Where the cells of a table stand on a screen of a given width, every one of them whole."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from jremat.terminal.text import padded, wrapped

GAP = 2
"""Spaces between columns."""
INDENT = 4
"""Spaces before what goes on below its row."""
NARROW = 28
"""Cells below which no column of text is folded, and no column of labels cut back."""


@dataclass(frozen=True)
class Column:
    """A column's head, whether it holds figures, and whether it may go to a line of its own below its row."""

    head: str
    right: bool = False
    loose: bool = False


@dataclass(frozen=True)
class TableRow:
    """A row's cells, one a column."""

    cells: tuple[str, ...]
    bold: bool = False


@dataclass(frozen=True)
class Note:
    """Text below a row, in lines of its own."""

    text: str


@dataclass(frozen=True)
class Layout:
    """How a row is laid out.

    Args:
        groups: columns side by side, a line of each row a group, with their widths.
        below: columns whose cells go on in a paragraph below.
    """

    groups: tuple[dict[int, int], ...]
    below: tuple[int, ...]

    @property
    def width(self) -> int:
        """Of the widest line, what goes on below left out."""
        return max(_total(list(group.values())) + INDENT * (k > 0) for k, group in enumerate(self.groups))

    def lines(self, row: TableRow, columns: Sequence[Column], width: int) -> Iterator[str]:
        """The lines of one row."""
        cells = list(row.cells)
        lead = len(cells[0]) - len(cells[0].lstrip())
        if cells and cell_len(cells[0]) > self.groups[0][0]:
            yield from wrapped(cells[0], width, lead + INDENT)
            cells[0] = ""
        for k, group in enumerate(self.groups):
            folded = [wrapped(cells[i], w) for i, w in group.items()]
            for parts in itertools.zip_longest(*folded, fillvalue=""):
                shown = (padded(part, w, columns[i].right) for part, (i, w) in zip(parts, group.items()))
                line = (" " * (INDENT * (k > 0)) + (" " * GAP).join(shown)).rstrip()
                if line:
                    yield line
        text = (" " * GAP).join(cells[i] for i in self.below if cells[i])
        if text:
            start = lead + INDENT
            yield from wrapped(" " * start + text, width, start)


def laid_out(columns: Sequence[Column], rows: Sequence[TableRow], width: int) -> Layout:
    """The layout in which every cell of the rows is shown within ``width``.

    >>> columns = Column("value"), Column("bytes", right=True), Column("why", loose=True)
    >>> rows = [TableRow(("up", "2.0 MiB", "the policy keeps what is named up"))]
    >>> [line for width in (80, 30) for line in laid_out(columns, rows, width).lines(rows[0], columns, width)]
    ['up     2.0 MiB  the policy keeps what is named up', 'up     2.0 MiB', '    the policy keeps what is', \
'    named up']
    """
    texts = list(_by_column(columns, rows))
    natural = [max(map(cell_len, cells)) for cells in texts]
    word = [max((cell_len(word) for cell in cells for word in cell.split()), default=0) for cells in texts]
    loose = [k for k, column in enumerate(columns) if column.loose]
    for count in range(len(loose), -1, -1):
        beside = loose[:count]
        shown = [k for k in range(len(columns)) if k in beside or k not in loose]
        least = [max(min(natural[k], NARROW), word[k]) if k in beside else natural[k] for k in shown]
        free = width - _total(least)
        if free >= 0:
            widths = dict(zip(shown, least))
            for k in beside:
                more = min(free, natural[k] - widths[k])
                widths[k] += more
                free -= more
            return Layout((widths,), tuple(k for k in loose if k not in beside))
    tight = [k for k in range(len(columns)) if k not in loose]
    label = width - _total([natural[k] for k in tight[1:]]) - GAP
    if label >= min(natural[0], NARROW):  # a longer label has a line to itself
        return Layout(({k: natural[k] if k else label for k in tight},), tuple(loose))
    groups: list[dict[int, int]] = [{}]
    for k in tight:
        own = min(natural[k], width - INDENT)
        if groups[-1] and _total([*groups[-1].values(), own]) + INDENT * (len(groups) > 1) > width:
            groups.append({})
        groups[-1][k] = own
    return Layout(tuple(groups), tuple(loose))


def _by_column(columns: Sequence[Column], rows: Sequence[TableRow]) -> Iterator[list[str]]:
    for k, column in enumerate(columns):
        yield [column.head, *(row.cells[k] for row in rows)]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * max(len(widths) - 1, 0)
