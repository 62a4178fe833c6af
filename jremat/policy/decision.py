"""What may happen to a value that the backward pass reads: kept, kept smaller or on the host, or recomputed."""

import enum


class Decision(enum.Enum):
    """One value's fate between the forward and the backward pass.

    ``SAVE`` keeps it in device memory, ``OFFLOAD`` keeps it in pinned host memory, ``RECOMPUTE`` computes it again.
    The others compress it in device memory: ``INT8``, ``INT4``, ``FP8`` (e4m3) and ``E5M2`` round a floating-point
    value, with a scale for each block, and ``BITS`` packs booleans eight to a byte. The forward pass reads the value
    itself, the backward pass what was decompressed. Each decision only *permits*: what the backward pass never reads is
    neither kept nor recomputed.

    >>> stronger(Decision.RECOMPUTE, Decision.OFFLOAD)
    <Decision.OFFLOAD: 'offload'>
    """

    SAVE = "save"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    E5M2 = "e5m2"
    BITS = "bits"

    @property
    def compresses(self) -> bool:
        """Whether the value is kept in fewer bytes.

        >>> Decision.FP8.compresses, Decision.OFFLOAD.compresses
        (True, False)
        """
        return self not in (SAVE, OFFLOAD, RECOMPUTE)


SAVE, OFFLOAD, RECOMPUTE = Decision.SAVE, Decision.OFFLOAD, Decision.RECOMPUTE
INT8, INT4, FP8, E5M2, BITS = Decision.INT8, Decision.INT4, Decision.FP8, Decision.E5M2, Decision.BITS

_WEAKEST_FIRST = (RECOMPUTE, OFFLOAD, INT4, E5M2, FP8, INT8, BITS, SAVE)


def stronger(*decisions: Decision) -> Decision:
    """The decision that keeps the value nearest: SAVE, then compressed, the finer the stronger, OFFLOAD, RECOMPUTE.

    >>> stronger(SAVE, OFFLOAD, RECOMPUTE)
    <Decision.SAVE: 'save'>
    """
    return max(decisions, key=_WEAKEST_FIRST.index)
