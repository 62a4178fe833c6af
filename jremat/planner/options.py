"""The options of ``jremat.plan`` that few calls need."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from jremat.planner.plan_arguments import (
    Objective,
    bytes_in_words,
    check_functions,
    check_margin,
    checked_policies,
    checked_tags,
)
from jremat.planner.roofline import Cost
from jremat.planner.search import PeakOf
from jremat.policy import LayerPlan, Policy
from jremat.policy.whole_number import whole_number


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What ``jremat.plan`` considers, minimizes and leaves free, where the defaults are not enough.

    Args:
        host_bytes: pinned host memory that may be used too, of all layers; an int or ``"80GiB"``.
        objective: ``seconds``, by roofline on the target's chip, or ``flops``, of matmuls; None: seconds where the
            target is a chip that the table knows.
        cost: of each operation, e.g. measured, in place of the roofline.
        predict: the peak of the whole step under a plan, in place of ``jremat.predicted_memory``.
        also: policies and plans to consider beside the planner's own, and to report in ``.beside``.
        keep: tags of values that must not be recomputed, e.g. a router's logits; what a choice by value (top-k,
            sort, argmax) is made from never is. No plan is chosen that recomputes one, full remat and groups among
            them.
        names_only: keep only values that the user tagged, so that plain ``nn.remat`` can run the plan.
        margin: share of the memory to leave free.

    Raises:
        ValueError: an option out of range.

    >>> PlanOptions(host_bytes="1KiB").host_bytes
    1024
    """

    host_bytes: int | str = 0
    objective: Objective | None = None
    cost: Cost | None = None
    predict: PeakOf | None = None
    also: Iterable[Policy | LayerPlan] = ()
    keep: Collection[str] = ()
    names_only: bool = False
    margin: float = 0.05

    def __post_init__(self) -> None:
        read = {
            "host_bytes": whole_number("host_bytes", bytes_in_words("host_bytes", self.host_bytes), 0),
            "also": checked_policies(self.also),
            "keep": checked_tags(self.keep),
        }
        for name, value in read.items():
            object.__setattr__(self, name, value)
        if self.objective not in (None, "seconds", "flops"):
            raise ValueError(f"objective: expected 'seconds' or 'flops', got {self.objective!r}")
        if not isinstance(self.names_only, bool | np.bool_):
            raise ValueError(f"names_only: expected True or False, got {self.names_only!r}")
        check_margin(self.margin)
        check_functions(predict=self.predict, cost=self.cost)
