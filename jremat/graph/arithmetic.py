"""FLOPs of one equation.

Matmuls and convolutions count 2 per multiply-accumulate. A pointwise operation counts 1 per output element, a reduction
1 per input element, moving data 0: a convention, kept apart from the matmuls.
"""

import math
from collections.abc import Mapping
from typing import Any

from jremat.policy.ops import POINTWISE, REDUCTION


def matmul_flops(primitive: str, params: Mapping[str, Any], inputs: list[Any], outputs: list[Any]) -> int:
    """FLOPs of one matmul, convolution or fused attention; 0 for anything else.

    Args:
        primitive: its JAX name.
        params: of the equation.
        inputs, outputs: avals, with ``shape``.

    >>> from types import SimpleNamespace as aval
    >>> matmul_flops("dot_general", {"dimension_numbers": (((1,), (0,)), ((), ()))},
    ...              [aval(shape=(2, 3)), aval(shape=(3, 5))], [aval(shape=(2, 5))])
    60
    """
    if primitive == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * math.prod(outputs[0].shape) * math.prod(inputs[0].shape[i] for i in contracted)
    if primitive == "ragged_dot_general":
        # Each row of the ragged operand meets one group's matrix: groups cost nothing beyond their rows.
        (contracted, _), _ = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        groups = math.prod(inputs[1].shape[i] for i in params["ragged_dot_dimension_numbers"].rhs_group_dimensions)
        ragged_output = len(outputs[0].shape) > len(inputs[0].shape)  # a weight gradient: groups lead the output
        rows = math.prod(outputs[0].shape) // (groups if ragged_output else 1)
        return 2 * rows * math.prod(inputs[0].shape[i] for i in contracted)
    if primitive == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        kernel = [inputs[1].shape[i] for i in numbers.rhs_spec]  # (out features, in features per group, *spatial)
        return 2 * math.prod(outputs[0].shape) * math.prod(kernel[1:]) // params["batch_group_count"]
    if primitive in ("scaled_matmul_wrapper", "scaled_dot"):
        return 2 * math.prod(outputs[0].shape) * inputs[0].shape[-1]
    if primitive in _FUSED_ATTENTION:
        batch, queries, heads, depth = inputs[0].shape
        return _FUSED_ATTENTION[primitive] * 2 * batch * heads * queries * inputs[1].shape[1] * depth
    return 0


# Matmuls of each fused kernel: scores and context; dV, dP, dQ, dK and the scores recomputed (FlashAttention, alg. 4).
_FUSED_ATTENTION = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 5}
FUSED_RERUN = {"dot_product_attention_bwd_wrapper": (1, 5)}


def other_flops(primitive: str, inputs: list[Any], outputs: list[Any]) -> int:
    """FLOPs of one operation that is no matmul, by the convention at the head of this file."""
    if primitive in POINTWISE.primitives or primitive == "rsqrt":
        return math.prod(outputs[0].shape)
    if primitive in REDUCTION.primitives:
        return sum(math.prod(i.shape) for i in inputs)
    return 0


def is_square(primitive: str, params: Mapping[str, Any], inputs: list[Any]) -> bool:
    """Whether a matmul works on scores between two axes of one length: Q·Kᵀ, P·V and their gradients.

    A batched matmul of which one free axis is as long as the other operand's free axis (it makes scores) or as the
    contracted axis (it reads them).
    """
    if primitive != "dot_general":
        return False
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    if not lhs_batch:
        return False

    def free(aval: Any, contracted: Any, batch: Any) -> set[Any]:
        return {n for i, n in enumerate(aval.shape) if n != 1 and i not in (*contracted, *batch)}

    lhs, rhs = free(inputs[0], lhs_contracted, lhs_batch), free(inputs[1], rhs_contracted, rhs_batch)
    depth = {inputs[0].shape[i] for i in lhs_contracted}
    return bool(lhs & rhs or lhs & depth or rhs & depth)
