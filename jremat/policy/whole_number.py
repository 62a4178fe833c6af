"""Arguments that count something."""

import numbers
from typing import Any

from jremat.policy.messages import shown


def whole_number(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """An argument that counts, as an int.

    Args:
        name: what the error calls it.
        value: any; NumPy's integers count, truths don't.
        least, most: that it may be.

    Raises:
        ValueError: it is no whole number, below ``least`` or above ``most``.

    >>> whole_number("num_layers", 3), whole_number("host_bytes", 0, least=0)
    (3, 0)
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise ValueError(f"{name}: expected a whole number of at least {least}, got {shown(value)}")
    if most is not None and int(value) > most:
        raise ValueError(f"{name}: expected at most {most}, got {shown(value)}")
    return int(value)
