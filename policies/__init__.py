"""The zoo of remat policies: ``policies.get("dots_saveable")``, ``policies.table()``, ``python -m policies``."""

from jremat.policy import PolicyLike
from jremat.policy.shown import parse_bytes
from policies.entry import Entry
from policies.registry import get, load, names, table
from policies.translate import translate
from policies.translation import Translation

__all__ = [
    "Entry",
    "PolicyLike",
    "Translation",
    "get",
    "load",
    "names",
    "parse_bytes",
    "table",
    "translate",
]
