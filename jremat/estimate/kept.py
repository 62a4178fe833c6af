"""What a policy keeps of a block, and what it makes again, from the block's list of tensors."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from jremat.estimate.block import PARAMETERS, SHARED, Block, Tensor
from jremat.policy.decision import RECOMPUTE, SAVE, Decision
from jremat.policy.ops import SELECTABLE
from jremat.policy.policy import Policy


@dataclass(frozen=True)
class Kept:
    """What crosses from the forward to the backward pass of one block.

    Args:
        tensors: made by the block and kept, each with SAVE or OFFLOAD, in program order.
        inputs: ids of what the block was handed and its backward pass reads, parameters left out.
        recomputed: tensors made again.
    """

    tensors: tuple[tuple[Tensor, Decision], ...]
    inputs: tuple[str, ...]
    recomputed: tuple[Tensor, ...]


def kept_by(block: Block, policy: Policy) -> Kept:
    """What ``policy`` keeps of ``block``, as ``jremat.checkpoint`` does.

    Raises:
        ValueError: a planned policy, whose values are those of a traced graph; a name that no tensor bears, or
            selectors that all match nothing.

    >>> from jremat.estimate.block import block_of
    >>> from jremat.estimate.config import TransformerConfig
    >>> config = TransformerConfig(vocab_size=8, num_layers=1, hidden=4, heads=2, kv_heads=2, head_dim=2, mlp_hidden=16,
    ...                            max_seq=4)
    >>> kept = kept_by(block_of(config), Policy.save("attn_out", "mlp_out"))
    >>> [t.id for t, _ in kept.tensors], kept.inputs  # nobody reads mlp_out
    (['attn_out'], ('x',))
    """
    if policy.values:
        raise ValueError(
            f"policy: {policy.spec!r} names values of a traced graph, which a closed form can't look up; count it with "
            "jremat.residuals(block, ..., policy=policy)"
        )
    _check(block, policy)
    if policy.keeps_everything:
        return _reached(block, dict.fromkeys(block.tensors, SAVE))
    return _reached(block, _decisions(block, policy))


def without_parameters_alone(kept: Kept, block: Block) -> Kept:
    """The same, less what is made from parameters and what layers share alone: the chain makes these again."""
    own = {PARAMETERS, *SHARED}
    for tensor in block.tensors.values():
        if set(tensor.needs) <= own:
            own.add(tensor.id)
    again = tuple(t for t, _ in kept.tensors if t.id in own)
    return Kept(tuple((t, d) for t, d in kept.tensors if t.id not in own), kept.inputs, (*kept.recomputed, *again))


def _decisions(block: Block, policy: Policy) -> Mapping[str, Decision]:
    """The fate of every value that the policy keeps, for as long as the backward pass reads it."""
    families = (*SELECTABLE, *(family for family, _ in policy.families))
    ruled, readers = dict(policy.names), _tag_that_reads(block)
    needed = _needed(block) if policy.strict_only else None
    found: dict[str, Decision] = {}
    for tensor in block.tensors.values():
        if tensor.inside and tensor.tag is None:
            continue
        if tensor.tag is None and readers.get(tensor.id) in ruled:
            continue  # the tag that reads this value carries the decision
        decision = policy.decide(
            names=[tensor.tag] if tensor.tag else [],
            families=[f.name for f in families if f.matches(tensor.primitive, tensor.params)],
        )
        if decision is not RECOMPUTE and (needed is None or _mark(tensor) in needed):
            found[tensor.id] = decision
    return found


def _needed(block: Block) -> frozenset[str]:
    """The marks of the values that the backward pass reads where all may be kept."""
    candidates = [t for t in block.tensors.values() if t.tag or not t.inside]
    return frozenset(_mark(t) for t, _ in _reached(block, {t.id: SAVE for t in candidates}).tensors)


def _mark(tensor: Tensor) -> str:
    """How a policy keeps a value: one by one outside kernels, by tag inside."""
    return f"tag {tensor.tag}" if tensor.inside else tensor.id


def _tag_that_reads(block: Block) -> Mapping[str, str]:
    """For each value that a tag names, the first such tag."""
    found: dict[str, str] = {}
    for tensor in block.tensors.values():
        if tensor.tag and not tensor.inside:
            found.setdefault(tensor.needs[0], tensor.tag)
    return found


def _reached(block: Block, decisions: Mapping[str, Decision]) -> Kept:
    """Back from what the backward pass reads, through what is made again, to what is kept or was handed in."""
    seen: set[str] = set()
    waiting = list(block.reads)
    while waiting:
        key = waiting.pop()
        if key in seen:
            continue
        seen.add(key)
        if key in block.tensors and key not in decisions:
            waiting += block.tensors[key].needs
    tensors = [block.tensors[key] for key in block.tensors if key in seen]
    return Kept(
        tuple((t, decisions[t.id]) for t in tensors if t.id in decisions),
        tuple(sorted(seen - block.tensors.keys() - {PARAMETERS})),
        tuple(t for t in tensors if t.id not in decisions),
    )


def _check(block: Block, policy: Policy) -> None:
    """Raise where a selector matches nothing, as ``jremat.checkpoint`` does."""
    tags = block.tags
    missing = [name for name, _ in policy.names if name not in tags and name not in policy.optional]
    if missing:
        near = difflib.get_close_matches(missing[0], sorted(tags), 1)
        hint = f"did you mean {near[0]!r}?" if near else f"names in this block: {', '.join(sorted(tags))}"
        raise ValueError(f"policy: {policy.spec!r} names {', '.join(map(repr, missing))}, which no value bears; {hint}")
    tensors = block.tensors.values()
    by_family = any(
        f.name in block.inner_families or any(f.matches(t.primitive, t.params) for t in tensors)
        for f, _ in policy.families
    )
    by_name = any(name in tags for name, _ in policy.names)
    if (policy.names or policy.families) and not (by_family or by_name):
        raise ValueError(
            f"policy: {policy.spec!r} matches nothing in this block; names in it: {', '.join(sorted(tags))}"
        )
