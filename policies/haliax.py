"""haliax's scan checkpoints: what of a block's carry and internals is kept or offloaded."""

from jremat.policy import FULL, NONE, Policy
from policies.entry import Entry


def _entry(name: str, policy: Policy, kept: str, recomputed: str, setting: str) -> Entry:
    spec = f"haliax:{name}"
    source = "haliax, nn.ScanCheckpointPolicy"
    return Entry(spec, policy.labelled(spec), kept, recomputed, f"haliax {setting}", source)


ENTRIES = (
    _entry(
        "save_carries",
        FULL,
        "each block's input, which is the scan's carry",
        "the whole block, but for its last matmul",
        "save_carries=True (its True, and 'recompute')",
    ),
    _entry(
        "offload_carries",
        Policy.offload("block_in"),
        "in host memory each block's input",
        "the whole block, but for its last matmul",
        "save_carries='offload'",
    ),
    _entry(
        "save_all",
        NONE,
        "everything that the backward pass reads",
        "nothing",
        "disable=True (its False)",
    ),
)
"""The settings of one block; block internals by name are ``save:NAME…``, ``nested=True`` is ``sqrt``, ``nested=K``
``every_k`` of the group length."""
