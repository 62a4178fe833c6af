"""The zoo of remat policies: ``policies.get("dots_saveable")``, ``policies.table()``, ``python -m policies``."""

from policies.entry import Cost, Entry
from policies.grammar import parse_bytes
from policies.plan_file import write as write_plan
from policies.registry import get, names, table
from policies.stacks import alternate, block, every_k, mix, revolve, torchtitan

__all__ = [
    "Cost",
    "Entry",
    "alternate",
    "block",
    "every_k",
    "get",
    "mix",
    "names",
    "parse_bytes",
    "revolve",
    "table",
    "torchtitan",
    "write_plan",
]
