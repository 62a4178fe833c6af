"""PyTorch's selective checkpoint (SAC): a list of aten ops as a policy.

``create_selective_checkpoint_contexts([ops])`` keeps the output of every call of a listed op and recomputes the rest.
``sac:mm,addmm`` is the same here, by op family. Two differences: JAX keeps of these only what the backward pass
reads, and ``mm`` and ``addmm`` are one family, as JAX has no matmul with a bias in it.
"""

from collections.abc import Iterable

from jremat.policy import Family, Policy
from jremat.policy.messages import near
from jremat.policy.ops import ATTENTION, BATCHED_MATMUL, COLLECTIVE, CONV, SCALED_MATMUL, TOP_K, WEIGHT_MATMUL

_FAMILIES = (WEIGHT_MATMUL, BATCHED_MATMUL, CONV, SCALED_MATMUL, ATTENTION, TOP_K, COLLECTIVE)
# The composite that users write for the four kernels, and the higher-order op that torch._higher_order_ops names.
_ALSO = {"scaled_dot_product_attention": ATTENTION, "flex_attention": ATTENTION}

OPS: dict[str, Family] = {op: family for family in _FAMILIES for op in family.aten} | _ALSO
"""aten ops, without overload, that a family here stands for."""


def sac(ops: Iterable[str]) -> Policy:
    """The policy that keeps what the listed aten ops make.

    Args:
        ops: names, with or without ``torch.ops.aten.`` before and an overload after.

    Raises:
        ValueError: an op that no family stands for (pointwise ops, say: JAX fuses them, and their family keeps all).

    >>> sac(["aten.mm.default", "addmm"]).canonical_spec
    'ops:weight_matmul'
    """
    return Policy.ops(*(_family(op) for op in ops))


def op_name(op: str) -> str:
    """An op's bare name.

    >>> op_name("torch.ops.aten.mm.default")
    'mm'
    """
    words = [
        word for word in op.split(".") if word not in ("torch", "ops", "aten", "_c10d_functional", "_higher_order_ops")
    ]
    return words[0] if words else op


def _family(op: str) -> Family:
    name = op_name(op)
    if name in OPS:
        return OPS[name]
    hint = near(name, OPS) or f"; there are {', '.join(sorted(OPS))}"
    raise ValueError(f"policy: no op family keeps just the aten op {op!r}{hint}")
