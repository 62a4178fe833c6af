"""What may happen to a value that the backward pass reads: kept, kept on the host, or recomputed."""

import enum


class Decision(enum.Enum):
    """One value's fate between the forward and the backward pass.

    ``SAVE`` keeps it in device memory, ``OFFLOAD`` keeps it in pinned host memory, ``RECOMPUTE`` computes it again.
    Each only *permits*: what the backward pass never reads is neither kept nor recomputed.

    >>> stronger(Decision.RECOMPUTE, Decision.OFFLOAD)
    <Decision.OFFLOAD: 'offload'>
    """

    SAVE = "save"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


SAVE, OFFLOAD, RECOMPUTE = Decision.SAVE, Decision.OFFLOAD, Decision.RECOMPUTE

_STRENGTH = {RECOMPUTE: 0, OFFLOAD: 1, SAVE: 2}


def stronger(*decisions: Decision) -> Decision:
    """The decision that keeps the value nearest: SAVE over OFFLOAD over RECOMPUTE.

    >>> stronger(SAVE, OFFLOAD, RECOMPUTE)
    <Decision.SAVE: 'save'>
    """
    return max(decisions, key=_STRENGTH.__getitem__)
