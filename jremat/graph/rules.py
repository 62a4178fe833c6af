"""What XLA's fusion and scheduling for GPUs do with each kind of operation, per version of JAX."""

from dataclasses import dataclass

from jremat.calibration import nearest_compiler
from jremat.policy.ops import POINTWISE, REDUCTION

ALIASES = frozenset(
    {
        "reshape",
        "squeeze",
        "expand_dims",
        "copy",
        "copy_p",
        "stop_gradient",
        "sharding_constraint",
        "bitcast_convert_type",
    }
    | {"pvary", "pcast", "mesh_cast", "reshard", "random_wrap", "random_unwrap", "random_clone", "device_put"}
)
"""The result is the input's own memory."""

FREE = frozenset({"broadcast_in_dim", "iota", "broadcast", "full", "rng_uniform"})
"""Made from nothing, or from little: recomputed in every kernel that reads it."""

LAYOUT = frozenset(
    {"transpose", "slice", "dynamic_slice", "pad", "concatenate", "rev", "gather", "slice of a stack", "split"}
)
"""Fused, but its elements are not where its input's are."""

FUSIBLE = frozenset(POINTWISE.primitives) | {
    *(
        "sum of parts",
        "convert_element_type",
        "integer_pow",
        "square",
        "rsqrt",
        "log_softmax",
        "copysign",
        "erf",
        "is_finite",
    ),
    *("random_bits", "threefry2x32", "random_fold_in", "random_seed", "random_split", "reduce_precision"),
}
"""Done element by element inside whatever reads it."""

EXPENSIVE = frozenset({"tanh", "erf", "erfc", "pow", "sin", "cos", "log1p", "random_bits", "threefry2x32", "erf_inv"})
"""Not done twice on large arrays: the compiler's cost model counts tens of operations an element."""

REDUCTIONS = frozenset(REDUCTION.primitives) | {"argmax", "argmin", "reduce_precision_sum"}
"""Reads what it reduces fused, writes its result."""

POOLING = frozenset({"reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"})
"""Reads its windows fused, writes its result."""

PURE = (FUSIBLE | FREE | LAYOUT | REDUCTIONS | {"dot_general"}) - {"slice of a stack"}
"""Done once where the program says it twice."""

IN_PLACE = frozenset({"dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter-mul"})
"""Written over its first input where that dies here."""


LONGEST_ROW = 1 << 14
"""Elements of a row that one kernel reduces and uses again, at most: of softmaxes over 256 to 32,768 elements, compiled
by both versions, those over 32,768 take a kernel for each reduction."""


@dataclass(frozen=True)
class Rules:
    """What a prediction rests on.

    Attributes:
        jax: the version whose compiler it was read from.
        entered: primitives whose inside stands in the program as if it were written there.
        opaque: primitives whose inside needs no memory of the program's.
        cheap_bytes: an array of at most this size is recomputed whatever it costs.
        few_rows: the exponentials of a softmax over at most so many rows are written when three kernels read them, of
            more rows recomputed in each: found by compiling, between 65,536 and 69,632.
        few_tanh: most rows and elements of an activation that is taken twice; of nine that were compiled, those of
            8,192 rows or 21 million elements are written, those of 4,096 rows and up to 16.8 million aren't.
        unlike_matmuls: layouts (``Value.layout``) beside which a matmul's result is laid out anew to be read element by
            element.
        loops_wait: whether the greedy order puts loops off, as making all that goes round in them.
        bodies_late: whether a second scheduler moves the kernels of a loop's body to as late as they can run.
        zeroed_together: whether the stacks of one shape are zeroed by one kernel, those of other loops too.
        slices_copied: whether a slice of a stack that several kernels read is copied out of it first.
        tile: rows and columns of a matmul's result that one block of threads makes.
        busy_tiles: how many tiles keep an H200 busy: two for each of its 132 multiprocessors.
        least_summed: the shortest sum of a matmul that is split.
        summed_for_added: so many elements of parts added up cost what one more step along a split sum does: found by
            compiling 22 shapes.
    """

    jax: str
    entered: frozenset[str] = frozenset(
        {"jit", "pjit", "closed_call", "core_call", "core_closed_call", "custom_jvp_call", "custom_vjp_call", "remat2"}
        | {"checkpoint", "custom_vjp_call_jaxpr", "custom_lin", "eval_jaxpr", "shard_map", "remat3", "remat"}
    )
    opaque: frozenset[str] = frozenset({"pallas_call", "reduce", "scatter-add", "scatter", "sort", "reduce_window"})
    cheap_bytes: int = 1 << 20
    few_rows: int = 1 << 16
    few_tanh: tuple[int, int] = (1 << 12, 1 << 24)
    unlike_matmuls: frozenset[str] = frozenset({"mixed"})
    loops_wait: bool = True
    bodies_late: bool = False
    zeroed_together: bool = True
    slices_copied: bool = False
    tile: tuple[int, int] = (64, 128)
    busy_tiles: int = 264
    least_summed: int = 1024
    summed_for_added: int = 5461


CALIBRATED = {
    "0.10.2": Rules("0.10.2"),
    # There XLA copies slices of stacks while other kernels run (dynamic_slice_copy_fusion_async_wrapper.cc), and its
    # LatencyHidingScheduler orders each body that holds such a copy anew, after the memory scheduler has chosen for the
    # whole program. Its log (``TF_CPP_VMODULE=hlo_memory_scheduler=2``) shows that a loop itself counts as nothing.
    "0.12.0.1": Rules(
        "0.12.0.1",
        unlike_matmuls=frozenset({"mixed", "turned"}),
        loops_wait=False,
        bodies_late=True,
        zeroed_together=False,
        slices_copied=True,
    ),
}
"""By JAX's version, ``jremat.calibration.COMPILERS``."""


def rules_for(version: str) -> Rules:
    """The rules of the version named, or of the nearest one below that was calibrated, which is warned of once."""
    return CALIBRATED[nearest_compiler(version)]
