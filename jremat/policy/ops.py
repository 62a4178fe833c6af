"""Op families: what a policy by operation may speak of.

A family gathers the JAX primitives that do one kind of work, with the PyTorch (aten) ops that do the same. It is data:
a user's own kernel joins a policy in one line,

>>> mine = Family("ssm_scan", "my state-space kernel", primitives=("ssm_scan_p",))
>>> mine.matches("ssm_scan_p", {})
True
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """One kind of operation.

    Args:
        name: how specs and tables spell it, e.g. ``weight_matmul``.
        meaning: one line for people.
        primitives: names of JAX primitives.
        aten: PyTorch's ops that do the same work, without overloads.
        names: tags that mark a value as made by this family although no primitive shows it, e.g. the output of an
            attention kernel written in plain JAX.
        batched: for ``dot_general`` alone: True takes those with batch dimensions, False those without, None both.
        kernels: for ``pallas_call`` alone: it matches where the kernel's name holds one of these words.

    >>> Family("sine", "sines", primitives=("sin",)).matches("sin", {})
    True
    """

    name: str
    meaning: str
    primitives: tuple[str, ...] = ()
    aten: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    batched: bool | None = None
    kernels: tuple[str, ...] = ()

    def matches(self, primitive: str, params: Mapping[str, Any]) -> bool:
        """Whether an equation of ``primitive`` with ``params`` belongs here.

        >>> WEIGHT_MATMUL.matches("dot_general", {"dimension_numbers": (((2,), (0,)), ((), ()))})
        True
        """
        if primitive == "name":
            return params["name"] in self.names
        if primitive == "pallas_call" and self.kernels:
            return any(word in _kernel_name(params) for word in self.kernels)
        if primitive not in self.primitives:
            return False
        if primitive == "dot_general" and self.batched is not None:
            (_, _), (lhs_batch, rhs_batch) = params["dimension_numbers"]
            return self.batched == bool(lhs_batch or rhs_batch)
        return True

    def within(self, other: "Family") -> bool:
        """Whether ``other`` matches all that this family matches.

        >>> WEIGHT_MATMUL.within(MATMUL), MATMUL.within(WEIGHT_MATMUL)
        (True, False)
        """
        return (
            set(self.primitives) <= set(other.primitives)
            and set(self.names) <= set(other.names)
            and set(self.kernels) <= set(other.kernels)
            and other.batched in (None, self.batched)
        )


def _kernel_name(params: Mapping[str, Any]) -> str:
    return str(params.get("name") or params.get("name_and_src_info") or "").lower()


WEIGHT_MATMUL = Family(
    "weight_matmul",
    "matmul without batch dimensions: an activation times a weight",
    ("dot_general", "ragged_dot_general"),
    ("mm", "addmm", "linear"),
    batched=False,
)
BATCHED_MATMUL = Family(
    "batched_matmul",
    "matmul with batch dimensions: attention's scores and context, experts under vmap",
    ("dot_general",),
    ("bmm", "baddbmm"),
    batched=True,
)
MATMUL = Family(
    "matmul",
    "every matmul",
    ("dot_general", "ragged_dot_general"),
    WEIGHT_MATMUL.aten + BATCHED_MATMUL.aten,
)
CONV = Family("conv", "convolution", ("conv_general_dilated",), ("convolution",))
SCALED_MATMUL = Family(
    "scaled_matmul",
    "fp8 and block-scaled matmul",
    ("scaled_matmul_wrapper", "scaled_dot"),
    ("_scaled_mm", "_scaled_grouped_mm"),
)
ATTENTION = Family(
    "attention",
    "fused attention: its output and log-sum-exp (cuDNN, Pallas, or a tagged kernel in plain JAX)",
    ("dot_product_attention_fwd_wrapper", "dot_product_attention_fp8_fwd_wrapper"),
    (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
    names=("attn_fused", "attn_lse"),
    kernels=("attention", "flash", "mha", "splash"),
)
COLLECTIVE = Family(
    "collective",
    "communication between devices",
    (
        *("psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"),
        *("reduce_scatter", "all_to_all", "ppermute", "pgather", "ragged_all_to_all"),
    ),
    ("reduce_scatter_tensor", "all_to_all_single", "all_gather_into_tensor", "all_reduce"),
)
RANDOM = Family(
    "random",
    "random bits and keys: dropout's masks",
    (
        *("random_bits", "random_seed", "random_split", "random_fold_in", "random_wrap", "random_unwrap"),
        *("random_clone", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform"),
    ),
    ("native_dropout", "bernoulli", "rand_like"),
)
TOP_K = Family(
    "top_k",
    "choice by value: top-k, sort, argmax; a router's decision",
    ("top_k", "approx_top_k", "sort", "argmax", "argmin"),
    ("topk", "sort", "max", "argmax"),
    names=("router",),
)
NORM_STATS = Family(
    "norm_stats",
    "a norm's row statistics: mean, reciprocal deviation",
    ("rsqrt",),
    ("native_layer_norm", "_fused_rms_norm"),
    names=("norm_stats",),
)
REDUCTION = Family(
    "reduction",
    "sums, maxima and running sums along axes",
    (
        *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor"),
        *("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "reduce", "logsumexp"),
    ),
    ("sum", "mean", "amax", "logsumexp", "cumsum"),
)
POINTWISE = Family(
    "pointwise",
    "one output element from one element of each input",
    (
        *("add", "sub", "mul", "div", "rem", "neg", "sign", "abs", "max", "min", "pow", "integer_pow", "sqrt"),
        *("cbrt", "square", "exp", "exp2", "expm1", "log", "log1p", "tanh", "sin", "cos", "tan", "asin", "acos"),
        *("atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "logistic", "erf", "erfc", "erf_inv"),
        *("lgamma", "digamma", "select_n", "clamp", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not"),
        *("is_finite", "floor", "ceil", "round", "nextafter", "population_count", "clz", "shift_left"),
        *("shift_right_logical", "shift_right_arithmetic", "real", "imag", "conj", "complex", "add_any"),
    ),
    ("add", "mul", "gelu", "silu", "relu", "tanh", "where"),
)

FAMILIES = (
    *(WEIGHT_MATMUL, BATCHED_MATMUL, CONV, SCALED_MATMUL, ATTENTION, COLLECTIVE),
    *(RANDOM, TOP_K, NORM_STATS, REDUCTION, POINTWISE),
)
"""The families by which an op is classified, first match first; ``MATMUL`` is a union of two, for policies."""

SELECTABLE = (*FAMILIES, MATMUL)
"""The families that a spec may name in ``ops:``."""


NEVER_ROUNDED = (RANDOM, TOP_K, NORM_STATS)
"""The families that no policy may round: random bits, choices by value, statistics."""


def family_of(primitive: str, params: Mapping[str, Any], families: Iterable[Family] = FAMILIES) -> str:
    """The name of the family that an equation belongs to, or ``other`` (layout, indexing, control flow).

    >>> family_of("tanh", {})
    'pointwise'
    >>> family_of("reshape", {})
    'other'
    """
    return next((family.name for family in families if family.matches(primitive, params)), "other")
