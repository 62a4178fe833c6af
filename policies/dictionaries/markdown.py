"""Rows of a page as a Markdown table."""

from collections.abc import Iterable


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table with its headings, a line a row; bars inside a cell are escaped.

    >>> print(table(["there", "here"], [["a|b", "c"]]))
    | there | here |
    |---|---|
    | a\\|b | c |
    """
    headings = tuple(headings)
    return "\n".join([line(headings), "|" + "---|" * len(headings), *map(line, rows)])


def line(cells: Iterable[str]) -> str:
    """One row.

    >>> line(["a", "b"])
    '| a | b |'
    """
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def code(text: str) -> str:
    """A cell of code; nothing stays nothing.

    >>> code("full"), code("")
    ('`full`', '')
    """
    return f"`{text}`" if text else ""
