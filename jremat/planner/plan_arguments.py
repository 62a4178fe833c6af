"""What a planner is asked, checked: one line for what it can't use."""

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np

from jremat.measure import Target
from jremat.planner.roofline import Cost
from jremat.policy import LayerPlan, Policy
from jremat.policy.shown import parse_bytes

Objective = Literal["seconds", "flops"]


def known_bytes(hbm_bytes: int | str | None, kind: Target) -> int:
    """The device memory to plan for: the one given, or the target's own.

    Raises:
        ValueError: neither is known, or it is no number of bytes.
    """
    known = hbm_bytes if hbm_bytes is not None else kind.hbm_bytes
    if known is None:
        raise ValueError(
            f"hbm_bytes: the memory of target {kind.name!r} is unknown; say how many bytes there are, "
            "as in --hbm 60GiB or auto:60GiB"
        )
    known = bytes_in_words("hbm_bytes", known)
    if isinstance(known, bool) or not isinstance(known, int | float | np.number) or not math.isfinite(known):
        raise ValueError(f"hbm_bytes: expected bytes as a number, such as 60 * 2**30, got {known!r}")
    if known <= 0:
        raise ValueError(f"hbm_bytes: expected more than 0, got {known}")
    return int(known)


def bytes_in_words(name: str, given: Any) -> Any:
    """A number of bytes, read where it is written as ``"60GiB"``; anything else as it is.

    Raises:
        ValueError: a text that is no size.
    """
    try:
        return parse_bytes(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def check_function(f: Any, args: tuple[Any, ...], num_layers: int | None) -> None:
    """Refuse what is no function to plan for, or lacks the arguments of a layer.

    Raises:
        ValueError: a Linen module, which reads its parameters from outside; or fewer arguments than a block has.
    """
    if not callable(f) or (hasattr(f, "init") and hasattr(f, "apply")):
        raise ValueError(
            f"f: expected a function of parameters and inputs, got {type(f).__name__}; "
            "of a Linen module it is lambda variables, x: module.apply(variables, x)"
        )
    if num_layers is not None and len(args) < 2:
        raise ValueError(f"args: expected those of f(layer_parameters, carry, *shared), got {len(args)} of them")


def check_margin(margin: Any) -> None:
    """Refuse a margin that is no share.

    Raises:
        ValueError: it isn't from 0 to 1.
    """
    if isinstance(margin, bool) or not isinstance(margin, int | float | np.number) or not 0 <= margin < 1:
        raise ValueError(f"margin: expected a share from 0 to 1, got {margin!r}")


def checked_policies(also: Any) -> tuple[Policy | LayerPlan, ...]:
    """The policies to consider too, checked.

    Raises:
        ValueError: one is no policy.
    """
    if not isinstance(also, Iterable) or isinstance(also, str):
        raise ValueError(f"also: expected policies in a list, got {also!r}")
    found = tuple(also)
    for plan in found:
        if not isinstance(plan, Policy | LayerPlan):
            raise ValueError(f"also: expected what policies.get returns for a policy or a plan, got {plan!r}")
    return found


def checked_tags(keep: Any) -> tuple[str, ...]:
    """The tags to keep, checked.

    Raises:
        ValueError: they are no list of strings.
    """
    if isinstance(keep, str) or not isinstance(keep, Iterable) or not all(isinstance(tag, str) for tag in keep):
        raise ValueError(f"keep: expected tags in a list, got {keep!r}")
    return tuple(keep)


def check_functions(**given: Any) -> None:
    """Refuse what should be functions, or left out, and isn't.

    Raises:
        ValueError: one is neither callable nor None.
    """
    for name, value in given.items():
        if value is not None and not callable(value):
            raise ValueError(f"{name}: expected a function, got {value!r}")


def step_under(step: Callable[..., Any], given: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What a caller's ``step`` returns for a policy, or for a function, checked.

    Raises:
        ValueError: it doesn't take one argument, or returns no pair of a function and the shapes of its arguments.
    """
    if not _takes(step, (given,)):
        raise ValueError(f"step: expected a function of one argument, got one of {inspect.signature(step)}")
    made = step(given)
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]) or not isinstance(made[1], tuple | list):
        raise ValueError(f"step: expected to return the step and a tuple of its arguments' shapes, got {made!r}")
    function, shapes = made[0], tuple(made[1])
    if not _takes(function, shapes):
        raise ValueError(
            f"step: expected to return a step and the shapes of its arguments, got {len(shapes)} shapes for a step of "
            f"{inspect.signature(function)}"
        )
    return function, shapes


def _takes(f: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a function can be called with these arguments, as far as its signature says."""
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):  # a builtin
        return True
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def checked_peak(predicted: Any) -> int:
    """What a caller's ``predict`` returns, checked.

    Raises:
        ValueError: it is no number of bytes.
    """
    number = isinstance(predicted, int | float | np.number) and not isinstance(predicted, bool)
    if not number or not math.isfinite(predicted) or predicted < 0:
        raise ValueError(f"predict: expected to return bytes, a number of at least 0, got {predicted!r}")
    return int(predicted)


def checked_costs(costs: Any, operations: int) -> tuple[float, ...]:
    """What a ``cost`` says of a graph, checked.

    Raises:
        ValueError: it isn't one finite number of at least 0 for each operation.
    """
    found = tuple(costs) if isinstance(costs, Iterable) else None
    numbers = found is not None and all(isinstance(c, int | float | np.number) and 0 <= c < math.inf for c in found)
    if found is None or not numbers or len(found) != operations:
        what = f"{len(found)} of them" if found is not None and numbers else repr(costs)
        raise ValueError(f"cost: expected {operations} costs of at least 0, one for each operation, got {what}")
    return found


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
