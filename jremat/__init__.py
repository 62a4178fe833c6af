"""Rematerialization for JAX and Flax: what is kept for the backward pass, what it costs, and proof that it is so."""

import importlib
from typing import TYPE_CHECKING, Any

import jremat.quiet_cuda  # noqa: F401 - before JAX starts its backends

if TYPE_CHECKING:
    from jremat.apply_to_model import apply
    from jremat.check import Difference, Finding, Replay, lint, replay
    from jremat.estimator.transformer import estimate
    from jremat.fitting.planner import fit
    from jremat.graph import flops, trace
    from jremat.graph.peak import predicted_memory
    from jremat.measure import Memory, check_memory, compiled_memory
    from jremat.oom import Diagnosis, Launch, check_launch, diagnose
    from jremat.planner.options import PlanOptions
    from jremat.planner.planner import plan
    from jremat.planner.request import Request
    from jremat.policy import FAMILIES, FULL, NONE, Decision, Family, LayerPlan, Policy, tag
    from jremat.report.explain import Explanation, explain
    from jremat.transform.chain import stack
    from jremat.transform.checkpoint import residuals
    from jremat.transform.remat import remat
    from jremat.transform.scan_layers import scan_layers

    checkpoint = remat

# Found when first asked for: JAX takes a second to load, which an estimate or a policy doesn't need.
_HOMES = {
    "jremat.apply_to_model": ("apply",),
    "jremat.check": ("Difference", "Finding", "Replay", "lint", "replay"),
    "jremat.estimator.transformer": ("estimate",),
    "jremat.fitting.planner": ("fit",),
    "jremat.graph": ("flops", "trace"),
    "jremat.graph.peak": ("predicted_memory",),
    "jremat.measure": ("Memory", "check_memory", "compiled_memory"),
    "jremat.oom": ("Diagnosis", "Launch", "check_launch", "diagnose"),
    "jremat.planner.options": ("PlanOptions",),
    "jremat.planner.planner": ("plan",),
    "jremat.planner.request": ("Request",),
    "jremat.policy": ("FAMILIES", "FULL", "NONE", "Decision", "Family", "LayerPlan", "Policy", "tag"),
    "jremat.report.explain": ("Explanation", "explain"),
    "jremat.transform.chain": ("stack",),
    "jremat.transform.checkpoint": ("residuals",),
    "jremat.transform.remat": ("remat",),
    "jremat.transform.scan_layers": ("scan_layers",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "FAMILIES",
    "FULL",
    "NONE",
    "Decision",
    "Diagnosis",
    "Difference",
    "Explanation",
    "Family",
    "Finding",
    "Launch",
    "LayerPlan",
    "Memory",
    "PlanOptions",
    "Policy",
    "Replay",
    "Request",
    "apply",
    "check_launch",
    "check_memory",
    "checkpoint",
    "compiled_memory",
    "diagnose",
    "estimate",
    "explain",
    "fit",
    "flops",
    "lint",
    "plan",
    "predicted_memory",
    "remat",
    "replay",
    "residuals",
    "scan_layers",
    "stack",
    "tag",
    "trace",
]


def __getattr__(name: str) -> Any:
    own = "remat" if name == "checkpoint" else name  # JAX has both names too
    if own in _HOME:
        return getattr(importlib.import_module(_HOME[own]), own)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
