"""What every printed result shares: figures with units, columns that fit a terminal."""

import re
import shutil
import textwrap
from collections.abc import Collection, Sequence


def terminal_width() -> int:
    """Columns that a result prints in: ``COLUMNS``, the terminal's, or 100 where neither is known."""
    return max(shutil.get_terminal_size((100, 24)).columns, 20)


def filled(text: str, indent: str = "") -> str:
    """A text broken between words at ``terminal_width()``, all lines but the first indented."""
    return "\n".join(textwrap.wrap(text, terminal_width(), subsequent_indent=indent, break_on_hyphens=False))


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


_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


def parse_bytes(text: str) -> int:
    """A size with its unit, in bytes.

    Args:
        text: a number and a unit, as ``60GiB``.

    Returns:
        Bytes, rounded down.

    Raises:
        ValueError: no number, or none of the units B, KB, MB, GB, TB, KiB, MiB, GiB, TiB.

    >>> parse_bytes("1.5KiB"), parse_bytes("2GB")
    (1536, 2000000000)
    """
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-z]+)", text)
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise ValueError(f"size: expected a number and a unit ({', '.join(_UNITS)}), such as 60GiB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


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


def human_seconds(seconds: float) -> str:
    """Seconds in a unit that suits them.

    >>> human_seconds(0.0123), human_seconds(2.5)
    ('12.3 ms', '2.50 s')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Rows as columns, two spaces apart; a line wider than ``terminal_width()`` goes on below its last cell.

    Args:
        rows: of as many cells each, or fewer.
        right: columns whose cells stand at the right.

    >>> print(aligned([("bytes", "value"), ("2.0 MiB", "up")], right=[0]))
      bytes  value
    2.0 MiB  up
    """
    widths = [max(len(row[k]) for row in rows if k < len(row)) for k in range(max(map(len, rows), default=0))]
    lines = []
    for row in rows:
        cells = [cell.rjust(w) if k in right else cell.ljust(w) for k, (cell, w) in enumerate(zip(row, widths))]
        line = "  ".join(cells).rstrip()
        if len(line) > terminal_width():
            start = min(sum(len(cell) + 2 for cell in cells[:-1]), terminal_width() // 2)
            line = filled(line, " " * start)
        lines.append(line)
    return "\n".join(lines)


def most(rows: Sequence[str], count: int, what: str) -> list[str]:
    """The first ``count`` of some lines, and how many more there are.

    >>> most(["a", "b", "c"], 1, "values")
    ['a', '… and 2 more values']
    """
    left = len(rows) - count
    return [*rows] if left <= 0 else [*rows[:count], f"… and {left:,} more {what}"]
