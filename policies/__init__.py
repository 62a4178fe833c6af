"""The zoo of remat policies: ``policies.get("dots_saveable")``, ``policies.table()``, ``python -m policies``."""

from jremat.policy import PolicyLike
from jremat.policy.plan_file import write as write_plan
from policies.entry import Entry
from policies.grammar import parse_bytes
from policies.registry import get, names, table
from policies.translate_maxtext import from_maxtext
from policies.translate_megatron import from_megatron
from policies.translate_torch import from_huggingface, from_torchtitan
from policies.translation import Translation

__all__ = [
    "Entry",
    "PolicyLike",
    "Translation",
    "from_huggingface",
    "from_maxtext",
    "from_megatron",
    "from_torchtitan",
    "get",
    "names",
    "parse_bytes",
    "table",
    "write_plan",
]
