"""One row of the zoo: a named policy, as data."""

from dataclasses import dataclass

from jremat.planner.request import Request
from jremat.policy import LayerPlan, Policy
from jremat.policy.shown import aligned

Spec = Policy | LayerPlan | Request
"""What ``policies.get`` returns: for one block, for a stack, or a request that needs shapes first."""


@dataclass(frozen=True)
class Entry:
    """A named policy, or a form of spec with an example of it.

    Args:
        spec: as it is written; a form has capitals where a value goes, e.g. ``every_k:K[,POLICY]``.
        policy: what it stands for; of a form, an example.
        kept: in words, what is kept for the backward pass.
        recomputed: in words, what is recomputed.
        elsewhere: what other systems call it.
        source: the file or paper that it comes from.
        aliases: other specs for the same policy.
        words: what a plan over layers keeps and recomputes per layer, which no formula of one block says
            (``policies.costs.cost`` derives those of one policy).

    >>> from policies import table
    >>> row = next(row for row in table() if row.spec == "full")
    >>> row.kept, row.is_form
    ("the block's input", False)
    """

    spec: str
    policy: Spec
    kept: str
    recomputed: str
    elsewhere: str
    source: str
    aliases: tuple[str, ...] = ()
    words: tuple[str, str] | None = None

    @property
    def is_form(self) -> bool:
        """Whether ``spec`` has places to fill in, so that only ``policy`` can be asked for as it stands."""
        return self.spec != self.policy.spec

    def __str__(self) -> str:
        rows = [
            ("spec", " ".join((self.spec, *(f"= {alias}" for alias in self.aliases)))),
            ("keeps", self.kept),
            ("recomputes", self.recomputed),
            ("elsewhere", self.elsewhere),
            ("source", self.source),
        ]
        return aligned([row for row in rows if row[1]])

    __repr__ = __str__


class Entries(tuple[Entry, ...]):
    """Rows of the zoo that print as a table."""

    def __str__(self) -> str:
        return aligned([("spec", "keeps"), *((entry.spec, entry.kept) for entry in self)])

    __repr__ = __str__
