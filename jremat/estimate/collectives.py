"""What one device holds beside its share because arrays are gathered, summed or cut over devices.

Read from steps that XLA compiled for eight H200s, arrays cut by named shardings along their longest axis;
``benchmarks/estimate_peak_devices.py`` measures what is left over.
"""

import math
from collections.abc import Iterable, Mapping

from jremat.estimate.block import Tensor, item_bytes
from jremat.estimate.config import TransformerConfig
from jremat.estimate.ledger import Line, Moment
from jremat.estimate.parallel import Parallel

ASSUMPTIONS = (
    "what is shared out is cut along its longest axis; of a weight cut elsewhere than along its first axis a copy is "
    "made for the gather",
    "weights are gathered a layer at a time, in the compute dtype; other buffers of collectives are not counted",
)
_BACKWARD: tuple[Moment, ...] = ("mlp", "attention")


def gathered(
    config: TransformerConfig,
    parallel: Parallel,
    sizes: Mapping[str, int],
    recomputed: Iterable[Tensor],
    held: int,
    moments: int,
    head_last: bool,
) -> Iterable[Line]:
    """Lines beside the ledger's shares; all of part ``layer``.

    Args:
        config, parallel: of the run.
        sizes: the value of every symbol.
        recomputed: of one layer, what its backward pass makes again.
        held: parameters on the device, ZeRO left out.
        moments: running means a parameter.
        head_last: the head's gradient is taken after the layers'.
    """
    p, item = parallel, item_bytes("param", config)
    shares = p.zero == 2 or (p.zero == 1 and moments > 0)
    if shares:
        # Each replica updates its share of the weights; then all of them are gathered, into memory of their own.
        yield _line("updates, this device's share", item * -(-held // p.data), f"{item}·P", ("P",), ("update",))
        yield _line("weights updated, gathered", item * held, f"{item}·P", ("P",), ("update",))
    if p.zero == 1:
        yield _line("gradients, this device's share", item * -(-held // p.data), f"{item}·P", ("P",), ("update",))
    if config.tied_embeddings and (p.sequence or (p.zero >= 2 and p.tensor == 1)):
        # XLA adds the embedding's part before it sums over devices, so until then the whole table is there.
        whole = item * sizes["v"] * sizes["h"]
        # Or it isn't yet, and the logits' gradient waits for it.
        waits = item_bytes("compute", config) * math.prod(sizes[axis] for axis in "bsv") // p.divisor("bsv")
        more = whole - (waits if head_last else whole // (p.tensor if p.sequence else p.data))
        alive: tuple[Moment, ...] = ("turn", *_BACKWARD)
        if more > 0:
            yield _line("gradient of the tied table, whole", more, f"{item}·v·h", ("v", "h"), alive)
    if p.zero >= 3:
        if not any(_is_weight(tensor) for tensor in recomputed):  # else they are told among what is made again
            size = item_bytes("compute", config)
            layer = size * (config.block_params() // p.tensor)
            yield _line("weights of one layer, gathered", layer, f"{size}·P_blocks/L", ("P",), _BACKWARD)
        across = config.num_layers * _cut_across(config, p) * item // (p.tensor * p.data)
        if across:
            yield _line(
                "weights laid out for the gather", across, f"{item}·L·(..)", ("L",), ("loss", "turn", *_BACKWARD)
            )
    if p.tensor > 1:
        count = _streams(config, p, recomputed)
        stream = item_bytes("compute", config) * math.prod(sizes[axis] for axis in "bsh")
        size = stream // (p.data * p.context)
        alive = ("mlp",)
        yield _line("stream, gathered or in partial sums", count * size, f"2·{count}·b·s·h", ("b", "s", "h"), alive)


def _streams(config: TransformerConfig, parallel: Parallel, recomputed: Iterable[Tensor]) -> int:
    """Whole streams that collectives read or write in the MLP's backward pass.

    Its input's gradient is a partial sum on each device, of gate and up one each, which are added before the devices'
    are. Where the sequence is split too, the MLP's input and its output's gradient are gathered, and if attention's
    projections are made again, so is theirs, as it comes and laid out anew, and the sum is laid out before it is split.
    """
    partial = 2 if config.mlp == "swiglu" else 0
    if not parallel.sequence:
        return partial
    again = any(tensor.id == "query.dot" for tensor in recomputed)
    return max(partial, 1) + 2 + 3 * again


def _line(name: str, nbytes: int, formula: str, scales: tuple[str, ...], alive: tuple[Moment, ...]) -> Line:
    return Line("layer", name, nbytes, nbytes, formula, scales, alive)


def _is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is made from parameters alone, so that all replicas make the same."""
    return tensor.primitive == "convert_element_type" and "s" not in tensor.axes


def _cut_across(config: TransformerConfig, parallel: Parallel) -> int:
    """Parameters of one layer's matrices whose longest axis that tensor parallelism leaves isn't their first.

    Of [h, f] the second where it is longer; of attention's output [n, d, h] the last.
    """
    c = config
    wide = (2 if c.mlp == "swiglu" else 1) * c.hidden * c.mlp_hidden
    out = c.heads * c.head_dim * c.hidden
    across = wide if c.mlp_hidden > c.hidden and parallel.tensor == 1 else 0
    return across + (out if c.hidden > max(c.heads if parallel.tensor == 1 else 0, c.head_dim) else 0)
