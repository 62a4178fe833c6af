"""What a planner is asked, checked: one line for what it can't use."""

import math
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from jremat.measure import Target
from jremat.plan.roofline import Cost
from jremat.policy import LayerPlan, Policy

Objective = Literal["seconds", "flops"]


def known_bytes(hbm_bytes: int | None, kind: Target) -> int:
    """The device memory to plan for: the one given, or the target's own.

    Raises:
        ValueError: neither is known, or it is no number of bytes.
    """
    known = hbm_bytes if hbm_bytes is not None else kind.hbm_bytes
    if known is None:
        raise ValueError(f"hbm_bytes: the memory of target {kind.name!r} is unknown; say how many bytes there are")
    if isinstance(known, bool) or not isinstance(known, int | float | np.number) or not math.isfinite(known):
        raise ValueError(f"hbm_bytes: expected bytes as a number, such as 60 * 2**30, got {known!r}")
    if known <= 0:
        raise ValueError(f"hbm_bytes: expected more than 0, got {known}")
    return int(known)


def check_margin(margin: Any) -> None:
    """Refuse a margin that is no share.

    Raises:
        ValueError: it isn't from 0 to 1.
    """
    if isinstance(margin, bool) or not isinstance(margin, int | float | np.number) or not 0 <= margin < 1:
        raise ValueError(f"margin: expected a share from 0 to 1, got {margin!r}")


def checked_policies(also: Any, num_layers: int | None) -> tuple[Policy | LayerPlan, ...]:
    """The policies to consider too, checked.

    Raises:
        ValueError: one is no policy, or a plan over layers where there are none.
    """
    if not isinstance(also, Iterable) or isinstance(also, str):
        raise ValueError(f"also: expected policies in a list, got {also!r}")
    found = tuple(also)
    for plan in found:
        if not isinstance(plan, Policy | LayerPlan):
            raise ValueError(f"also: expected what policies.get returns for a policy or a plan, got {plan!r}")
        if isinstance(plan, LayerPlan) and num_layers is None:
            raise ValueError(f"also: {plan.spec!r} is a plan over layers, and there is no num_layers")
    return found


def checked_tags(keep: Any) -> tuple[str, ...]:
    """The tags to keep, checked.

    Raises:
        ValueError: they are no list of strings.
    """
    if isinstance(keep, str) or not isinstance(keep, Iterable) or not all(isinstance(tag, str) for tag in keep):
        raise ValueError(f"keep: expected tags in a list, got {keep!r}")
    return tuple(keep)


def known_objective(objective: Objective | None, cost: Cost | None, kind: Target) -> Objective:
    """What is to be least: as asked, or seconds where they can be modelled.

    Raises:
        ValueError: another word, or seconds on a chip that the table doesn't know.
    """
    if objective not in (None, "seconds", "flops"):
        raise ValueError(f"objective: expected 'seconds' or 'flops', got {objective!r}")
    if objective == "seconds" and cost is None and kind.chip is None:
        raise ValueError(
            f"objective: target {kind.name!r} is no chip of the table, so no seconds can be modelled; "
            "expected 'flops', or a cost of your own"
        )
    return objective or ("seconds" if kind.chip or cost else "flops")
