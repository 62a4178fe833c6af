"""The same stacks by ``jax.lax.scan`` and remat alone: every transformation of JAX, at the price of copies."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jremat.graph.arguments import of_held
from jremat.jax_internals import checks_key_reuse, compiled, weakly_cached
from jremat.policy import LayerPlan, NeedsShapes, Policy, Segment
from jremat.policy.whole_number import whole_number
from jremat.transform.checkpoint import checkpoint
from jremat.transform.flat import Layout, flat_call, take_call
from jremat.transform.layer import Flat, Leaves

Block = Callable[..., Any]
ONE_BY_ONE = jax.make_user_context(False)
"""Where it is True, a stack is traced as scans of layers, each alone under its policy: what the lint reads."""

_NOTHING = jax.checkpoint_policies.nothing_saveable  # None would mean the same, and reads as if it meant no remat


def scan_stack(block: Block, plan: LayerPlan | Policy, *, num_layers: int) -> Callable[..., Any]:
    """``chain.stack`` by scans: takes the same arguments and gives the same values and gradients.

    Kept and recomputed is what the plan says. Forward mode, second derivatives and per-layer policies all work. One
    scan of one policy copies nothing; several segments slice the parameters and groups nest scans, and both copy
    parameters and gradients (temporaries of 1.5 to 2.4 times the chain's, compiled for an H200).

    Args:
        block, plan, num_layers: as of ``chain.stack``. A binomial schedule can't be a scan: its layers run in groups
            of num_layers / slots instead, and a warning says so.

    Returns:
        A function ``run(parameters, carry, *shared)``, as of ``chain.stack``.

    Raises:
        ValueError: as ``chain.stack``.

    >>> from jremat.policy import FULL
    >>> run = scan_stack(lambda w, x: jnp.sin(x * w), FULL, num_layers=2)
    >>> _, slope = jax.jvp(lambda x: run(jnp.ones(2), x), (1.0,), (1.0,))  # forward mode
    >>> bool(jnp.allclose(slope, jnp.cos(jnp.sin(1.0)) * jnp.cos(1.0)))
    True
    """
    segments, held_block = resolved(plan, num_layers), of_held(block)

    def run(parameters: Any, carry: Any, *shared: Any) -> Any:
        if lost := lost_schedules(segments):
            warnings.warn(f"plan: {lost}", UserWarning, stacklevel=2)
        call = take_call(block, held_block, parameters, carry, shared, num_layers)
        as_planned = one_by_one(segments) if ONE_BY_ONE.value else segments
        run_scans = compiled_scans(call.jaxpr, call.layout, as_planned, planned_for(segments))
        return call.finish(*run_scans(call.stacked, call.shared, call.carry))

    return run


@weakly_cached
def compiled_scans(
    jaxpr: Any, layout: Layout, segments: tuple[Segment, ...], planned_for: tuple[Any, ...]
) -> Callable[[Leaves, Leaves, Leaves], tuple[Leaves, Leaves]]:
    """``scanned`` as one compiled function of flat lists, made once for a traced block and a plan."""
    run = flat_scans(flat_call(jaxpr, layout), layout.num_carry, segments)
    # The key-reuse checker knows that a remat's replay is no reuse, but not that one inside of a compiled function is.
    return run if checks_key_reuse() else compiled(run)


def flat_scans(
    call: Flat, num_carry: int, segments: Sequence[Segment]
) -> Callable[[Leaves, Leaves, Leaves], tuple[Leaves, Leaves]]:
    """``scanned`` on flat lists: (stacked, shared, carry) to the last carry and what the layers wrote.

    Args:
        call: the block; it returns its ``num_carry`` leaves of the next carry, then what it writes.
        num_carry: leaves of the carry.
        segments: closed.
    """

    def layer(own: Leaves, carry: Leaves, *shared: Any) -> tuple[Leaves, Leaves]:
        out = call(own, list(shared), carry)
        return out[:num_carry], out[num_carry:]

    return lambda stacked, shared, carry: scanned(layer, segments, stacked, carry, shared)


def one_by_one(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """The same policies layer by layer, without groups and schedules."""
    return tuple(replace(segment, group=1, slots=None) for segment in segments)


def planned_for(segments: Sequence[Segment]) -> tuple[Any, ...]:
    """What the policies of a plan were planned for, which doesn't count where policies are compared."""
    return tuple(policy.planned_for for segment in segments for policy in segment.pattern)


def resolved(plan: LayerPlan | Policy, num_layers: int) -> tuple[Segment, ...]:
    """A plan, or one policy for all layers, as closed segments.

    Raises:
        ValueError: neither of them, a plan for another number of layers, a segment that no stack can run, or
            ``num_layers`` that is no number of layers.
    """
    num_layers = whole_number("num_layers", num_layers)
    if isinstance(plan, NeedsShapes):
        raise ValueError(
            f"plan: {plan.spec!r} needs shapes before it is a plan; call policies.get({plan.spec!r})"
            f".resolve(block, *args, num_layers={num_layers}) and hand over what it returns"
        )
    if isinstance(plan, Policy):
        plan = LayerPlan((Segment((plan,)),), label=plan.spec)
    if not isinstance(plan, LayerPlan):
        raise ValueError(f"plan: expected a LayerPlan or a Policy, e.g. policies.get('every_k:4'), got {plan!r}")
    for segment in plan.segments:
        pattern = segment.pattern
        if segment.slots is not None and len(set(pattern)) > 1:
            raise ValueError(f"plan: a schedule takes one policy for its layers, got {', '.join(map(str, pattern))}")
        if segment.group > 1 and segment.group % len(pattern):
            raise ValueError(
                f"plan: a group must hold whole patterns, got groups of {segment.group} and {len(pattern)} policies"
            )
    return plan.resolve(num_layers)


def copies_parameters(segments: Sequence[Segment]) -> bool:
    """Whether scans of these segments slice the parameters or nest.

    >>> from jremat.policy import FULL, NONE
    >>> copies_parameters([Segment((FULL,), 4)]), copies_parameters([Segment((FULL, NONE), 2)])
    (False, True)
    """
    return len(segments) > 1 or any(s.group > 1 or s.slots is not None or len(s.pattern) > 1 for s in segments)


def lost_schedules(segments: Sequence[Segment]) -> str:
    """What is done in place of schedules, which scans can't follow; empty where there are none.

    >>> lost_schedules([Segment((Policy(),), 7, slots=2)])
    "a scan can't follow a schedule of 2 slots; its layers run in groups of 4"
    """
    lost = [
        f"a scan can't follow a schedule of {segment.slots} slots; its layers run in groups of {_in_place_of(segment)}"
        for segment in segments
        if segment.slots is not None
    ]
    return "; ".join(lost)


def _in_place_of(segment: Segment) -> int:
    """Layers of a group where a schedule's slots would be: as many boundaries."""
    assert segment.slots is not None
    return -(-segment.num_layers // segment.slots)


def scanned(
    block: Block, segments: Sequence[Segment], parameters: Any, carry: Any, shared: Sequence[Any]
) -> tuple[Any, Any]:
    """The stack by scans.

    Args:
        block: ``block(layer_parameters, carry, *shared)`` to the next carry and what the layer writes beside it.
        segments: closed.
        parameters, carry, shared: as of ``scan_stack``.

    Returns:
        The last carry, and what the layers wrote, stacked [L, ...].
    """
    written = []
    start, num_layers = 0, sum(segment.num_layers for segment in segments)
    for segment in segments:
        length = segment.num_layers
        # The whole stack is scanned as it stands: slicing it would copy it.
        own = parameters if length == num_layers else _slice(parameters, start, start + length)
        carry, out = _segment(block, segment, own, carry, shared)
        written.append(out)
        start += length
    return carry, _joined(written)


def _segment(block: Block, segment: Segment, parameters: Any, carry: Any, shared: Sequence[Any]) -> tuple[Any, Any]:
    pattern, length, group = segment.pattern, segment.num_layers, segment.group
    if segment.slots is not None:
        group = _in_place_of(segment)
    if group == 1:
        return _pattern(block, pattern, length, parameters, carry, shared)
    whole, rest = divmod(length, group)
    written = []

    def replayed(layers: int, alone: bool) -> Callable[[Any, Any], tuple[Any, Any]]:
        replay = lambda own, carry: _pattern(block, pattern, layers, own, carry, shared)
        # A loop of one turn is unrolled, and there XLA would merge the replay with the forward.
        return jax.checkpoint(replay, policy=_NOTHING, prevent_cse=alone)

    if whole:
        one = lambda carry, own: replayed(group, whole == 1)(own, carry)
        carry, out = lax.scan(one, carry, _rows(parameters, whole, group), length=whole)
        written.append(_flat_rows(out))
    if rest:
        carry, out = replayed(rest, True)(_slice(parameters, whole * group, length), carry)
        written.append(out)
    return carry, _joined(written)


def _pattern(
    block: Block, pattern: tuple[Policy, ...], length: int, parameters: Any, carry: Any, shared: Sequence[Any]
) -> tuple[Any, Any]:
    """``length`` layers under a repeated pattern, the last repeat cut short where they don't divide."""
    size = len(pattern)
    whole, rest = divmod(length, size)
    written = []

    def turns(carry: Any, rows: Any, policies: tuple[Policy, ...], *, alone: bool) -> tuple[Any, Any]:
        outs = []
        for k, policy in enumerate(policies):
            one = rows if size == 1 and not alone else jax.tree.map(lambda leaf, k=k: leaf[k], rows)
            carry, out = checkpoint(block, policy, prevent_cse=alone)(one, carry, *shared)
            outs.append(out)
        return carry, outs[0] if size == 1 and not alone else jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)

    if whole == 1:  # a loop of one turn is unrolled, and XLA would merge the replay with the forward
        carry, out = turns(carry, _slice(parameters, 0, size), pattern, alone=True)
        written.append(out)
    elif whole:
        rows = parameters if size == 1 else _rows(parameters, whole, size)
        carry, out = lax.scan(lambda carry, rows: turns(carry, rows, pattern, alone=False), carry, rows, length=whole)
        written.append(out if size == 1 else _flat_rows(out))
    if rest:
        carry, out = turns(carry, _slice(parameters, whole * size, length), pattern[:rest], alone=True)
        written.append(out)
    return carry, _joined(written)


def _rows(tree: Any, rows: int, size: int) -> Any:
    """[rows · size + …, ...] to [rows, size, ...]."""
    return jax.tree.map(lambda leaf: leaf[: rows * size].reshape(rows, size, *leaf.shape[1:]), tree)


def _flat_rows(tree: Any) -> Any:
    """[rows, size, ...] to [rows · size, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)


def _joined(trees: list[Any]) -> Any:
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)


def _slice(parameters: Any, start: int, stop: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[start:stop], parameters)
