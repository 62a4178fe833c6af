"""One executor for stacks of equal layers: any plan over the layers, and no copy of the parameters."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jremat.policy import LayerPlan, Policy, Segment
from jremat.transform.checkpoint import checkpoint
from jremat.transform.derivative import differentiable
from jremat.transform.flat import check_lengths, flatten, writes_beside
from jremat.transform.layer import Flat, Leaves, SplitLayer
from jremat.transform.loops import Group, Loop, Repeat, Scheduled
from jremat.transform.offload import boundary_on_host, inside_group, warn_where_ignored
from jremat.transform.revolve import binomial
from jremat.transform.scan import copies_parameters, lost_schedules, resolved, scanned
from jremat.transform.schedule import tables


def stack(block: Callable[..., Any], plan: LayerPlan | Policy, *, num_layers: int) -> Callable[..., Any]:
    """``num_layers`` of ``block`` in a row, under a plan that may differ from layer to layer.

    Kept and recomputed is what the plan says, layer by layer; parameters are read where they stand and never kept, nor
    is what is computed from them alone (a cast to bfloat16). Matmuls of the replay stand under JAX's
    ``rematted_computation`` scope. All of that is of reverse mode, where loops of our own do the work. Forward mode
    (``jax.jvp``, ``jax.linearize``, ``jax.jacfwd``), second derivatives and blocks that write values beside the carry
    run as the scans of ``jremat.transform.scan.scan_stack``, and a warning says what that costs.

    Args:
        block: pure function ``block(layer_parameters, carry, *shared)`` to the next carry; any pytrees. Or to a pair of
            the next carry and what the layer writes beside it, e.g. Flax's mutable collections (``batch_stats``).
        plan: over layers, or one policy for all of them.
        num_layers: L, at least 1.

    Returns:
        A function ``run(parameters, carry, *shared)`` to the last carry, or to a pair of it and what all layers wrote,
        stacked [L, ...]. ``parameters``: a pytree of arrays [L, ...],
        per-layer dropout keys, layer numbers and flags among them. ``carry``: what goes from layer to layer.
        ``shared``: what every layer reads, e.g. masks, positions, a conditioning; differentiated where it is asked for.
        Leaves that aren't differentiated (frozen parameters, integers, keys) get no gradient buffer.

    Raises:
        ValueError: the plan doesn't fit ``num_layers``, or is a request that isn't resolved yet; at the call, a leaf of
            ``parameters`` has another length, the block's result isn't like its carry, or a policy's selector matches
            nothing in the block.

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
        if writes_beside(block, parameters, carry, shared):
            _say_scanned(plan, segments, "a block that writes values beside its carry")
            return scanned(block, segments, parameters, carry, shared)
        flat = flatten(block, parameters, carry, shared)

        def scan(stacked: Leaves, shared: Leaves, carry: Leaves) -> Leaves:
            layer = lambda own, carry, *shared: (flat.call(own, list(shared), carry), ())
            return scanned(layer, segments, stacked, carry, shared)[0]

        run = differentiable(
            flat.call,
            num_layers,
            lambda cut: _loops(flat.call, segments, cut),
            scan,
            lambda: _say_scanned(plan, segments, "forward mode or a second derivative"),
        )
        stacked = [jnp.asarray(leaf) for leaf in jax.tree.leaves(parameters)]
        return flat.finish(run(stacked, flat.shared, flat.carry))

    return stacked_blocks


def _say_scanned(plan: LayerPlan | Policy, segments: Sequence[Segment], what: str) -> None:
    price = "copy parameters and gradients" if copies_parameters(segments) else "copy nothing where one policy holds"
    lost = lost_schedules(segments)
    warnings.warn(
        f"stack: {what} runs {plan.spec!r} as scans, which {price}{f'; {lost}' if lost else ''}",
        UserWarning,
        stacklevel=2,
    )


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
