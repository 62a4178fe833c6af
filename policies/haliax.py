"""haliax's scan checkpoints: what of a block's carry and internals is kept or offloaded."""

from jremat.policy import FULL, NONE, Policy
from policies.builtin import ALL
from policies.costs import cost_of
from policies.entry import Cost, Entry


def _entry(name: str, policy: Policy, kept: str, recomputed: str, costs: tuple[Cost, Cost], setting: str) -> Entry:
    spec = f"haliax:{name}"
    source = "haliax, nn.ScanCheckpointPolicy"
    return Entry(spec, policy.labelled(spec), kept, recomputed, *costs, f"haliax {setting}", source)


ENTRIES = (
    _entry(
        "save_carries",
        FULL,
        "each block's input, which is the scan's carry",
        "the whole block, but for its last matmul",
        cost_of([]),
        "save_carries=True (its True, and 'recompute')",
    ),
    _entry(
        "offload_carries",
        Policy.offload("block_in"),
        "in host memory each block's input",
        "the whole block, but for its last matmul",
        cost_of([], on_host=["block_in"]),
        "save_carries='offload'",
    ),
    _entry(
        "save_all",
        NONE,
        "everything that the backward pass reads",
        "nothing",
        cost_of(ALL, stats=True),
        "disable=True (its False)",
    ),
)
"""The settings of one block; block internals by name are ``save:NAME…``, ``nested=True`` is ``sqrt``, ``nested=K``
``every_k`` of the group length."""
