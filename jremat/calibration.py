"""Numbers that were fitted, not derived: each with its source, or the command that refits it.

What predicts a compiler (``jremat.graph.rules``) is fitted per version of JAX; how good predictions are, and what
counts as a finding, is one for all.
"""

import functools
import warnings
from dataclasses import dataclass

COMPILERS = ("0.10.2", "0.12.0.1")
"""The versions of JAX whose compiler is predicted, oldest first; ``python benchmarks/estimate_peak.py`` compares."""


@functools.cache  # once for each version
def nearest_compiler(version: str) -> str:
    """The calibrated version of JAX whose compiler stands for that of ``version``: the newest that is no newer.

    Warns:
        UserWarning: once, for a version whose compiler the rules were never compared with.

    >>> nearest_compiler("0.12.1"), nearest_compiler("0.10.5")
    ('0.12.0.1', '0.10.2')
    """
    minor = lambda text: tuple(map(int, text.split(".")[:2]))
    nearest = next((known for known in reversed(COMPILERS) if minor(known) <= minor(version)), COMPILERS[0])
    if minor(nearest) != minor(version):
        warnings.warn(
            f"predicted_memory: not calibrated for jax {version}, predicted by the rules for jax {nearest}; "
            "trust what is compiled: jremat.compiled_memory, and jremat.plan with compiles of at least 1",
            UserWarning,
            stacklevel=3,
        )
    return nearest


@dataclass(frozen=True)
class RooflineShares:
    """What large kernels reach of a chip's peaks.

    Attributes:
        matmul: of dense FLOP/s: a bf16 cuBLAS matmul of 8,192 reaches 0.75 to 0.8 on an H100 (PyTorch's own benchmarks,
            and Megatron-LM's best HFU, leave the same).
        bandwidth: of bytes a second: a copy kernel reaches 0.9 (BabelStream).
    """

    matmul: float = 0.8
    bandwidth: float = 0.9


@dataclass(frozen=True)
class EstimateShares:
    """How far an estimate is trusted.

    Attributes:
        error: how far a step may need more than its estimated peak: the worst of the steps that were compiled
            (``python benchmarks/estimate_peak.py``).
        margin: of a device's memory, to leave free: the allocator's fragmentation, workspaces of libraries.
    """

    error: float = 0.08
    margin: float = 0.05


@dataclass(frozen=True)
class SearchShares:
    """When the planner compiles, and what it concludes (``python benchmarks/planner.py``).

    Attributes:
        reach: of a peak: a choice isn't corrected by a compile of one that keeps more or less by that.
        aims: of the limit, that a choice is expected to need at most, compile by compile as long as none fits. Of 77
            steps half are predicted to within 0.3%, and what is left of that after a correction is less.
        hair: of the limit: a choice that is expected to need no more is worth a compile.
        passed_over: of the limit: a faster named choice that needs no more is compiled before it is passed over.
        much_faster: of the seconds of what fits: one that takes no more is worth a compile above the limit.
        near: of the limit: where nothing fits yet, what needs more isn't compiled.
        used: of the limit: what needs less leaves so much over that another compile is spent.
    """

    reach: float = 0.25
    aims: tuple[float, ...] = (1, 0.996, 0.985, 0.96, 0.9, 0)
    hair: float = 1.015
    passed_over: float = 1.03
    much_faster: float = 0.8
    near: float = 1.2
    used: float = 0.8


@dataclass(frozen=True)
class LintThresholds:
    """What counts as a finding (``python benchmarks/lint.py``).

    Attributes:
        saves_nothing: of what a block keeps: a kernel's log-sum-exp is 1/head_dim of its output, so a saving of no more
            is none.
        nearly_all: of a body's work: what a norm or a residual sum adds to a block is less than a tenth.
        same_peak: of the peak without remat: a remat that leaves more saves one array of a small program, its result,
            not what the layers keep.
        same_program: by how much predicted peaks of one program under two group sizes may differ.
        two_programs: the same of two programs, whose predictions are less alike.
        key_words: a PRNG key has at most four words; a dropout mask has more elements.
    """

    saves_nothing: float = 0.1
    nearly_all: float = 0.9
    same_peak: float = 0.85
    same_program: float = 1.05
    two_programs: float = 1.2
    key_words: int = 16


@dataclass(frozen=True)
class ReplayTolerances:
    """By how much two compilations of one function may differ: sums are taken in another order.

    Attributes:
        units: rounding units of a float32 or float64.
        units_half: of a half-precision type.
        floor: of the largest gradient: one that is small beside it (a key's bias has none but noise) is compared with
            this share of that one.
    """

    units: int = 64
    units_half: int = 8
    floor: float = 0.01


ROOFLINE, ESTIMATE, SEARCH = RooflineShares(), EstimateShares(), SearchShares()
LINT, REPLAY = LintThresholds(), ReplayTolerances()
