"""From a request, which needs shapes, to a policy or a plan: each kind is a question to the planner."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jremat.graph.peak import predicted_memory
from jremat.measure import Target
from jremat.measure import target as find_target
from jremat.planner.block import Budget, best, least_bytes
from jremat.planner.options import PlanOptions
from jremat.planner.planner import StepOf, cost_of, equipped, plan
from jremat.planner.read_block import read_block
from jremat.planner.roofline import matmul_flops
from jremat.policy import NONE, LayerPlan, NeedsShapes, Policy
from jremat.policy.whole_number import whole_number
from jremat.transform.groups import best_group, every_k


def resolve(
    request: NeedsShapes,
    block: Callable[..., Any],
    *args: Any,
    num_layers: int,
    target: str | Target = "local",
    step: StepOf | None = None,
    **options: Any,
) -> Policy | LayerPlan:
    """``request.resolve(block, *args, …)``, see ``jremat.Request.resolve``.

    Raises:
        ValueError: as there.
    """
    kind = equipped(find_target(target))
    num_layers = whole_number("num_layers", num_layers, 1)
    seldom = [field.name for field in dataclasses.fields(PlanOptions)]
    takes = {"auto": ("compiles", *seldom), "sqrt": ()}.get(request.kind, ("keep", "names_only"))
    unknown = sorted(set(options) - set(takes))
    if unknown:
        raise ValueError(f"{unknown[0]}: no option of {request.spec!r}; it takes {', '.join(takes) or 'none'}")
    if request.kind == "sqrt":
        peak = lambda function, *shapes: predicted_memory(function, *shapes).peak_bytes
        return every_k(best_group(block, num_layers, *args, peak=peak))
    if request.kind == "auto":
        memory = None if request.amount is None else int(request.amount)
        own = {"compiles": options.pop("compiles")} if "compiles" in options else {}
        own |= {"hbm_bytes": memory, "target": kind, "step": step, "options": PlanOptions(**options)}
        return plan(block, *args, num_layers=num_layers, **own).policy
    assert request.amount is not None, "the grammar reads an amount"
    cost = matmul_flops if request.kind == "overhead" else cost_of(kind)
    read = read_block(block, *args, cost=cost, fetched=1, **options)
    if request.kind == "budget":
        least, most = least_bytes(read.problem, math.inf), read.problem.outcome(read.problem.marks)
        assert least is not None, "without a limit something is allowed"
        found = best(read.problem, Budget(least.kept_bytes + request.amount * (most.kept_bytes - least.kept_bytes)))
    else:
        # ``matmul_flops`` charges a trifle for what is no matmul, so that ties go to the lighter choice.
        trifles = sum(node.seconds - node.matmul_flops for node in read.problem.nodes)
        found = least_bytes(read.problem, request.amount * read.forward_flops + trifles)
    if found is None:  # under any remat a kernel runs again whose results can't be kept by name
        return NONE
    return read.policy(found)
