"""Rows of a page as a Markdown table, and the page printed."""

import sys
from collections.abc import Callable, Iterable
from typing import NoReturn

from jremat.terminal.command_line import fail, run


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


def printed(page: Callable[[], str], program: str) -> NoReturn:
    """Print a page as a command of this name, which takes no arguments."""

    def main() -> int:
        if sys.argv[1:]:
            return fail(program, f"expected no arguments, got {' '.join(sys.argv[1:])}")
        print(page(), end="")
        return 0

    run(main, program)
