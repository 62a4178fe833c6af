"""Rematerialization for JAX and Flax: what is kept for the backward pass, what it costs, and proof that it is so."""

from jremat.graph import flops, trace
from jremat.policy import FAMILIES, FULL, NONE, Decision, Family, LayerPlan, Policy, Request, tag
from jremat.transform.checkpoint import checkpoint, residuals
from jremat.transform.remat import remat

__all__ = [
    "FAMILIES",
    "FULL",
    "NONE",
    "Decision",
    "Family",
    "LayerPlan",
    "Policy",
    "Request",
    "checkpoint",
    "flops",
    "remat",
    "residuals",
    "tag",
    "trace",
]
