"""What may be kept: decisions, op families, names, policies and plans over layers."""

from jremat.policy.decision import OFFLOAD, RECOMPUTE, SAVE, Decision
from jremat.policy.layers import LayerPlan, NeedsShapes, PolicyLike, Segment
from jremat.policy.names import VOCABULARY, tag
from jremat.policy.ops import FAMILIES, Family
from jremat.policy.policy import FULL, NONE, Policy

__all__ = [
    "FAMILIES",
    "FULL",
    "NONE",
    "OFFLOAD",
    "RECOMPUTE",
    "SAVE",
    "VOCABULARY",
    "Decision",
    "Family",
    "LayerPlan",
    "NeedsShapes",
    "Policy",
    "PolicyLike",
    "Segment",
    "tag",
]
