"""What one device holds beside its share of the program because arrays are gathered, summed or cut over devices.

Read from steps that XLA compiled for eight H200s, arrays cut by named shardings along their longest axis;
``benchmarks/estimate_peak_devices.py`` measures what is left over.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from jremat.estimator.config import TransformerConfig
from jremat.estimator.ledger import Line, Phase
from jremat.estimator.parallel import Parallel
from jremat.graph.letters import Numbers

ASSUMPTIONS = (
    "what is shared out is cut along its longest axis; of a weight cut elsewhere than along its first axis a copy is "
    "made for the gather",
    "weights are gathered a layer at a time, in the compute dtype; other buffers of collectives are not counted",
)
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_LAYERS: tuple[Phase, ...] = ("recompute", "backward")
Beside = Iterator[tuple[Line, tuple[str, ...]]]
"""Lines, each with the spans (``Timeline.spans``) in which it is alive."""


@dataclass(frozen=True)
class Spread:
    """A run on several devices.

    Args:
        config, parallel: of the run.
        own: sizes of one device.
        chunk: positions whose logits are alive at a time.
        num_params: on the device, ZeRO left out.
        shares_moments: whether the optimizer has a state that replicas can share out.
        projects_again: whether attention's keys and values are recomputed from their matmuls.
    """

    config: TransformerConfig
    parallel: Parallel
    own: Numbers
    chunk: int | None
    num_params: int
    shares_moments: bool
    projects_again: bool

    def lines(self) -> Beside:
        """All of them."""
        yield from self._updates()
        yield from self._gathered()
        yield from self._streams()

    def _updates(self) -> Beside:
        """Each replica updates its share of the weights; then all of them are gathered, into memory of their own."""
        p, item = self.parallel, ITEM_BYTES[self.config.param_dtype]
        whole = item * -(-self.num_params // p.fsdp)
        share = -(-whole // p.data)
        if p.zero == 2 or (p.zero == 1 and self.shares_moments):
            yield _line("updates, this device's share", share, f"{item}·P"), ("update",)
            yield _line("weights updated, gathered", whole, f"{item}·P"), ("update",)
        if p.zero == 1:
            yield _line("gradients, this device's share", share - whole, f"{item}·P"), ("update",)

    def head_bytes(self) -> int:
        """What of the head is there at least while the layers' backward pass runs.

        The head's gradient, where it is summed over devices before it is shared out, comes after the layers'. Until
        then the logits' gradient waits for it; or, where embedding and head are one table, XLA adds the embedding's
        part before it sums over devices, and the whole table is there.
        """
        c, p, own = self.config, self.parallel, self.own
        logits = ITEM_BYTES[c.compute_dtype] * own["b"] * own["s"] * own["v"] // p.split("bsv")
        waits = logits if self.chunk is None and (p.sequence or ((p.zero or p.fsdp > 1) and p.tensor == 1)) else 0
        whole = c.tied_embeddings and (p.sequence or ((p.zero == 2 or p.fsdp > 1) and p.tensor == 1))
        return max(waits, ITEM_BYTES[c.param_dtype] * c.vocab_size * c.hidden * whole)

    def _gathered(self) -> Beside:
        c, p = self.config, self.parallel
        if p.fsdp == 1:
            return
        size, item = ITEM_BYTES[c.compute_dtype], ITEM_BYTES[c.param_dtype]
        layer = size * (c.block_params() // p.tensor)
        yield _line("weights of one layer, gathered", layer, f"{size}·P/L"), _LAYERS
        across = c.num_layers * self._cut_across() * item // (p.tensor * p.fsdp)
        yield _line("weights laid out for the gather", across, f"{item}·L·(..)"), ("forward", *_LAYERS)

    def _cut_across(self) -> int:
        """Parameters of one layer's matrices whose longest axis that tensor parallelism leaves isn't their first.

        Of [h, f] the second where it is longer; of attention's output [n, d, h] the last.
        """
        c, tensor = self.config, self.parallel.tensor
        wide = (2 if c.mlp == "swiglu" else 1) * c.hidden * c.mlp_hidden
        out = c.heads * c.head_dim * c.hidden
        across = wide if c.mlp_hidden > c.hidden and tensor == 1 else 0
        return across + (out if c.hidden > max(c.heads if tensor == 1 else 0, c.head_dim) else 0)

    def _streams(self) -> Beside:
        """Whole streams that collectives read or write in the MLP's backward pass.

        Its input's gradient is a partial sum on each device, of gate and up one each, which are added before the
        devices' are. Where the sequence is split too, the MLP's input and its output's gradient are gathered, and if
        attention's projections are recomputed, so is theirs, as it comes and laid out anew, and the sum is laid out
        before it is split.
        """
        c, p, own = self.config, self.parallel, self.own
        if p.tensor == 1:
            return
        count = 2 if c.mlp == "swiglu" else 1
        if p.sequence:
            count += 2 + 3 * self.projects_again
        size = ITEM_BYTES[c.compute_dtype] * own["b"] * own["s"] * c.hidden // p.context
        yield _line("stream, gathered or in partial sums", count * size, f"{2 * count}·b·s·h"), ("mlp",)


def _line(name: str, nbytes: int, formula: str) -> Line:
    return Line("other", name, nbytes, nbytes, formula)
