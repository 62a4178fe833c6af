"""Text that users wrote, on a screen: what is no printable character is spelt out, and lines break between words."""

import re

from rich.cells import cell_len


def printable(text: str) -> str:
    """``text`` with control characters, line breaks and lone surrogates as Python's escapes.

    Names come from users: an escape sequence in one must not reach the terminal, nor a line break end a row.

    >>> printable("mlp\\x1b[31m\\n"), printable("größe 幅")
    ('mlp\\\\x1b[31m\\\\n', 'größe 幅')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """``text`` in lines of at most ``width`` cells, all but the first indented.

    Lines break between words; a word that is longer than a line is broken, and nothing is left out.

    >>> wrapped("kept         10 MiB in 8 values", 26, indent=13)
    ['kept         10 MiB in 8', '             values']
    >>> wrapped("abcdef", 4)
    ['abcd', 'ef']
    """
    indent = min(indent, width // 2)
    lines, line = [], ""
    for word in re.findall(r" *[^ ]+", text):
        if line.strip() and cell_len(line + word) > width:
            lines.append(line)
            line = " " * indent
            word = word.lstrip()
        line += word
        while cell_len(line) > width:
            cut = next(k for k in range(len(line), 0, -1) if k == 1 or cell_len(line[:k]) <= width)
            lines.append(line[:cut])
            line = " " * indent + line[cut:]
    return [*lines, line]


def padded(text: str, width: int, right: bool = False) -> str:
    """``text`` filled up with spaces to ``width`` cells.

    >>> padded("幅", 4), padded("ab", 4, right=True)
    ('幅  ', '  ab')
    """
    blank = " " * (width - cell_len(text))
    return blank + text if right else text + blank
