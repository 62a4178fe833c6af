"""One executor for stacks of equal layers: any plan over the layers, and no copy of the parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jremat.policy import LayerPlan, Policy, Segment
from jremat.transform.checkpoint import checkpoint
from jremat.transform.flat import check_lengths, flatten
from jremat.transform.layer import Active, Flat, Leaves, SplitLayer, split
from jremat.transform.loops import (
    Gradients,
    Group,
    Loop,
    Repeat,
    Scheduled,
    Weights,
    backward_all,
    forward_all,
    run,
)
from jremat.transform.offload import boundary_on_host, inside_group, warn_where_ignored
from jremat.transform.revolve import binomial
from jremat.transform.schedule import tables


def stack(block: Callable[..., Any], plan: LayerPlan | Policy, *, num_layers: int) -> Callable[..., Any]:
    """``num_layers`` of ``block`` in a row, under a plan that may differ from layer to layer.

    Kept and recomputed is what the plan says, layer by layer; parameters are read where they stand and never kept, nor
    is what is computed from them alone (a cast to bfloat16). Matmuls of the replay stand under JAX's
    ``rematted_computation`` scope. The loop owns its backward pass (``jax.custom_vjp``), so there is no forward mode
    through it: use ``jremat.transform.scan.scan_stack``, which takes the same arguments, for that and for plans that
    have to be differentiated twice under their own policy.

    Args:
        block: pure function ``block(layer_parameters, carry, *shared)`` to the next carry; any pytrees.
        plan: over layers, or one policy for all of them.
        num_layers: L, at least 1.

    Returns:
        A function ``run(parameters, carry, *shared)`` to the last carry. ``parameters``: a pytree of arrays [L, ...],
        per-layer dropout keys, layer numbers and flags among them. ``carry``: what goes from layer to layer.
        ``shared``: what every layer reads, e.g. masks, positions, a conditioning; differentiated where it is asked for.
        Leaves that aren't differentiated (frozen parameters, integers, keys) get no gradient buffer.

    Raises:
        ValueError: the plan doesn't fit ``num_layers``; at the call, a leaf of ``parameters`` has another length, the
            block's result isn't like its carry, or a policy's selector matches nothing in the block.

    >>> from jremat.policy import FULL, NONE
    >>> plan = LayerPlan((Segment((FULL,), repeats=2), Segment((NONE,))), label="block:2")
    >>> run = stack(lambda w, x: jnp.tanh(x * w), plan, num_layers=3)
    >>> w, x = jnp.array([1.0, 2.0, 3.0]), jnp.float32(0.5)
    >>> bool(jnp.allclose(run(w, x), jnp.tanh(3 * jnp.tanh(2 * jnp.tanh(x)))))
    True

    Source: Chen et al. 2016, arXiv 1604.06174, for the segments; Griewank and Walther 2000 for the schedules.
    """
    segments = resolved(plan, num_layers)

    def stacked_blocks(parameters: Any, carry: Any, *shared: Any) -> Any:
        warn_where_ignored(policy for segment in segments for policy in segment.pattern)
        check_lengths(parameters, num_layers)
        flat = flatten(block, parameters, carry, shared)
        stacked = [jnp.asarray(leaf) for leaf in jax.tree.leaves(parameters)]
        return flat.finish(_chain(flat.call, segments, num_layers)(stacked, flat.shared, flat.carry))

    return stacked_blocks


def _chain(block: Flat, segments: Sequence[Segment], num_layers: int) -> Callable[[Leaves, Leaves, Leaves], Leaves]:
    """The stack as one function with a backward pass of its own."""

    @jax.custom_vjp
    def chain(stacked: Leaves, shared: Leaves, carry: Leaves) -> Leaves:
        return run(block, Weights(stacked, shared), 0, carry, num_layers)

    def forward(stacked: Any, shared: Any, carry: Any) -> tuple[Leaves, Any]:
        # The carry of a later layer is differentiated even where the first one's isn't: all of it that can be.
        active = Active(_active(stacked), _active(shared), tuple(map(_real, _values(carry))))
        weights = Weights(_values(stacked), _values(shared))
        # Types, not shapes: under explicit sharding and in a shard_map they say more.
        types = jax.eval_shape(weights.layer, 0), weights.shared, _values(carry)
        loops = _loops(block, segments, lambda rematted: split(rematted, *types, active))
        out, saved = forward_all(loops, weights, 0, _values(carry))
        return out, (_Static(loops, active), weights.stacked, weights.shared, saved)

    def backward(residuals: Any, ct: Any) -> tuple[Any, Any, Any]:
        static, stacked, shared, saved = residuals
        active = static.active
        start = Gradients(
            [_instantiated(c) for flag, c in zip(active.carry, ct, strict=True) if flag],
            [jnp.zeros_like(leaf) for flag, leaf in zip(active.layer, stacked, strict=True) if flag],
            [jnp.zeros_like(leaf) for flag, leaf in zip(active.shared, shared, strict=True) if flag],
        )
        end = backward_all(static.loops, Weights(stacked, shared), 0, saved, start)
        return (
            _placed(active.layer, end.stacked),
            _placed(active.shared, end.shared),
            _placed(active.carry, end.carry),
        )

    chain.defvjp(forward, backward, symbolic_zeros=True)
    return chain


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Static:
    """What the backward pass must know beside arrays."""

    loops: tuple[Loop, ...]
    active: Active


def _loops(call: Flat, segments: Sequence[Segment], cut: Callable[[Flat], SplitLayer]) -> tuple[Loop, ...]:
    """The plan as loops. Layers under equal policies share one trace.

    Args:
        call: the block as written.
        cut: makes the two halves of a block that is under its policy.
    """
    halves: dict[tuple[Policy, bool], SplitLayer] = {}

    def cut_under(policy: Policy, alone: bool) -> SplitLayer:
        key = policy, alone
        if key not in halves:
            # A loop of one turn is unrolled, and there XLA would merge the replay with the forward.
            halves[key] = cut(checkpoint(call, policy, prevent_cse=alone))
        return halves[key]

    def repeat(pattern: tuple[Policy, ...], repeats: int) -> Repeat:
        return Repeat(tuple(cut_under(policy, repeats == 1) for policy in pattern), repeats)

    def patterns(pattern: tuple[Policy, ...], length: int) -> tuple[Repeat, ...]:
        whole, rest = divmod(length, len(pattern))
        loops = (repeat(pattern, whole),) if whole else ()
        return (*loops, repeat(pattern[:rest], 1)) if rest else loops

    def replayed(pattern: tuple[Policy, ...], length: int) -> tuple[Repeat, ...]:
        """A group's loops. Its last layer stands alone: its output is read by nobody, so its end is not run."""
        last = repeat((pattern[(length - 1) % len(pattern)],), 1)
        return (*patterns(pattern, length - 1), last)

    def loops_of(segment: Segment) -> tuple[Loop, ...]:
        pattern, repeats = segment.pattern, segment.repeats
        assert repeats is not None, "a resolved segment is closed"
        length = len(pattern) * repeats
        if segment.slots is not None:
            if len(set(pattern)) > 1:
                raise ValueError(
                    f"plan: a schedule takes one policy for its layers, got {', '.join(map(str, pattern))}"
                )
            return (Scheduled(call, cut_under(pattern[0], length == 1), tables(binomial(length, segment.slots))),)
        if segment.group == 1:
            return (repeat(pattern, repeats),)
        if segment.group % len(pattern):
            raise ValueError(
                f"plan: a group must hold whole patterns, got groups of {segment.group} and {len(pattern)} policies"
            )
        host = any(boundary_on_host(policy) for policy in pattern)
        pattern = tuple(inside_group(policy) for policy in pattern)
        whole, rest = divmod(length, segment.group)
        full = (Group(call, replayed(pattern, segment.group), whole, host),) if whole else ()
        return (*full, Group(call, replayed(pattern, rest), 1, host)) if rest else full

    return tuple(loop for segment in segments for loop in loops_of(segment))


def resolved(plan: LayerPlan | Policy, num_layers: int) -> tuple[Segment, ...]:
    """A plan, or one policy for all layers, as closed segments."""
    if isinstance(plan, Policy):
        plan = LayerPlan((Segment((plan,)),), label=plan.spec)
    if not isinstance(plan, LayerPlan):
        raise ValueError(f"plan: expected a LayerPlan or a Policy, e.g. policies.get('every_k:4'), got {plan!r}")
    return plan.resolve(num_layers)


def _values(inputs: Any) -> Leaves:
    return [given.value for given in inputs]


def _real(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _active(inputs: Any) -> tuple[bool, ...]:
    return tuple(given.perturbed and _real(given.value) for given in inputs)


def _instantiated(ct: Any) -> Any:
    if not isinstance(ct, SymbolicZero):
        return ct
    aval: Any = ct.aval
    return jnp.zeros(aval.shape, aval.dtype)


def _placed(active: tuple[bool, ...], gradients: Leaves) -> list[Any]:
    supply = iter(gradients)
    return [next(supply) if flag else None for flag in active]
