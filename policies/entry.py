"""One row of the zoo: a named policy with what it costs, as data."""

import re
from dataclasses import dataclass

from jremat.policy import LayerPlan, Policy, Request
from jremat.policy.shown import aligned

Spec = Policy | LayerPlan | Request
"""What ``policies.get`` returns: for one block, for a stack, or a request that needs shapes first."""


@dataclass(frozen=True)
class Cost:
    """What a policy costs per layer, as formulas.

    The symbols: b batch, s sequence, h hidden width, n query heads, k key and value width, f MLP width, e bytes of one
    value; M is 1 where attention materialises its scores and F is 1 where it is fused, else 0. ``n * head width`` is
    taken to be h, and in the GPT family f = 4h and k = h.

    Args:
        kept_bytes: kept for the backward pass, the block's input included, parameters not, dropout off.
        recomputed_flops: matmul FLOPs that the backward pass repeats, a fused attention's forward included, every
            score counted, masked ones too.
        host_bytes: the part of ``kept_bytes`` that lies in host memory.
        exact: whether the formulas can be evaluated and hold to the byte; otherwise they are words.

    >>> Cost("e*b*s*(9*h + M*n*s)", "2*b*s*h*2*s").at(b=1, s=4, h=8, n=2, e=2, fused=False)
    (640, 512, 0)
    """

    kept_bytes: str
    recomputed_flops: str
    host_bytes: str = "0"
    exact: bool = True

    def at(
        self, *, b: int, s: int, h: int, n: int, e: int, k: int = 0, f: int = 0, fused: bool
    ) -> tuple[int, int, int]:
        """Bytes kept, FLOPs recomputed and bytes in host memory at given sizes.

        Raises:
            ValueError: the cost is in words.
        """
        if not self.exact:
            raise ValueError(f"cost: expected a formula, got words: {self.kept_bytes!r}, {self.recomputed_flops!r}")
        symbols = {"b": b, "s": s, "h": h, "n": n, "e": e, "k": k or h, "f": f or 4 * h, "M": not fused, "F": fused}
        formulas = (self.kept_bytes, self.recomputed_flops, self.host_bytes)
        kept, flops, host = (int(eval(formula, {"__builtins__": {}}, dict(symbols))) for formula in formulas)
        return kept, flops, host

    def pretty(self) -> tuple[str, ...]:
        """Bytes kept, bytes of them in host memory and FLOPs recomputed, as people write formulas.

        >>> Cost("e*b*s*(9*h + M*n*s)", "2*b*s*h*2*s").pretty()
        ('ebs(9h + Mns)', '0', '2bsh·2s')
        """
        return tuple(_pretty(formula) for formula in (self.kept_bytes, self.host_bytes, self.recomputed_flops))


def _pretty(formula: str) -> str:
    return re.sub(r"\*(\d)", r"·\1", formula).replace("*", "")


@dataclass(frozen=True)
class Entry:
    """A named policy, or a form of spec with an example of it.

    Args:
        spec: as it is written; a form has capitals where a value goes, e.g. ``every_k:K[,POLICY]``.
        policy: what it stands for; of a form, an example.
        kept: in words, what is kept for the backward pass.
        recomputed: in words, what is made again.
        gpt: its cost per layer in the GPT family.
        llama: its cost per layer in the Llama family.
        elsewhere: what other systems call it.
        source: the file or paper that it comes from.
        aliases: other specs for the same policy.
        aten: PyTorch's ops that a selective-checkpoint list with the same effect names; empty: no such list.

    >>> from policies import table
    >>> row = next(row for row in table() if row.spec == "full")
    >>> row.kept, row.gpt.kept_bytes, row.is_form
    ("the block's input", 'e*b*s*h', False)
    """

    spec: str
    policy: Spec
    kept: str
    recomputed: str
    gpt: Cost
    llama: Cost
    elsewhere: str
    source: str
    aliases: tuple[str, ...] = ()
    aten: tuple[str, ...] = ()

    @property
    def is_form(self) -> bool:
        """Whether ``spec`` has places to fill in, so that only ``policy`` can be asked for as it stands."""
        return self.spec != self.policy.spec

    def __str__(self) -> str:
        kept, host, again = self.gpt.pretty()
        rows = [
            ("spec", " ".join((self.spec, *(f"= {alias}" for alias in self.aliases)))),
            ("keeps", self.kept),
            ("recomputes", self.recomputed),
            ("GPT layer", f"{kept} bytes kept, {again} FLOPs recomputed, {host} bytes on the host"),
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
