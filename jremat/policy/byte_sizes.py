"""Sizes with their units."""

import re

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
