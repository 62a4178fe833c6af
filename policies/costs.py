"""What a policy costs per layer: formulas read off a block that is traced with letters for its sizes."""

from typing import Literal

from jremat.policy import Policy
from policies.entry import Entry

Family = Literal["gpt", "llama"]
Attention = Literal["dot", "blockwise"]


def cost(entry: Entry, family: Family, attention: Attention = "dot") -> tuple[str, str, str]:
    """Bytes kept, bytes of them in host memory and matmul FLOPs recomputed, in letters.

    Per layer, in bfloat16, dropout off: b batch, s sequence, h hidden, n query heads, k width of all keys, f MLP width.
    The block's input is kept too; parameters aren't counted. Every score is counted, masked ones too, and a fused
    attention's forward pass where it is run again.

    Args:
        entry: of the zoo; of a form its example, of a plan over layers its words.
        family: GPT with LayerNorm and biases, or Llama with grouped queries and a gated MLP.
        attention: materialised or fused.

    Returns:
        Three formulas; dashes where such a block has nothing that the policy names.

    >>> from policies import table
    >>> entry = next(entry for entry in table() if entry.spec == "dots_with_no_batch_dims_saveable")
    >>> cost(entry, "gpt")
    ('10·b·h·s + 2·b·f·s', '0', '4·b·h·s²')
    """
    if not isinstance(entry.policy, Policy):
        assert entry.words is not None, entry.spec
        return entry.words[0], "0", entry.words[1]
    from dataclasses import replace

    from jremat.estimator import block_cost  # loads JAX, which no spec needs

    config = replace({"gpt": block_cost.GPT, "llama": block_cost.LLAMA}[family], attention=attention)
    try:
        found = block_cost.block_cost(config, entry.policy)
    except ValueError:
        return "–", "–", "–"
    grouped = config.group > 1
    kept, host, again = (
        str(block_cost.named(x, grouped)) for x in (found.kept_bytes, found.host_bytes, found.recompute_flops)
    )
    return kept, host, again
