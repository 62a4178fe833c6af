"""One executor for stacks of equal layers: any plan over the layers, and no copy of the parameters."""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp

from jremat.policy import LayerPlan, Policy, Segment
from jremat.transform.checkpoint import checkpoint, expect_matches
from jremat.transform.derivative import differentiable
from jremat.transform.flat import check_lengths, flatten, one_layer, writes_beside
from jremat.transform.layer import Flat, Leaves, SplitLayer
from jremat.transform.loops import Group, Loop, Repeat, Scheduled
from jremat.transform.offload import boundary_on_host, inside_group, on_device, warn_where_ignored
from jremat.transform.revolve import binomial
from jremat.transform.scan import copies_parameters, lost_schedules, resolved, scanned
from jremat.transform.schedule import tables

P = ParamSpec("P")
R = TypeVar("R")


def stack(block: Callable[P, R], plan: LayerPlan | Policy, *, num_layers: int) -> Callable[P, R]:
    """``num_layers`` of ``block`` in a row, under a plan that may differ from layer to layer.

    Kept and recomputed is what the plan says, layer by layer; parameters are read where they stand and never kept, nor
    is what is computed from them alone (a cast to bfloat16). Matmuls of the replay stand under JAX's
    ``rematted_computation`` scope. All of that is of reverse mode, where loops of our own do the work. Forward mode
    (``jax.jvp``, ``jax.linearize``, ``jax.jacfwd``), second derivatives and blocks that write values beside the carry
    run as the scans of ``jremat.transform.scan.scan_stack``, and a warning says once a call what that costs; what the
    plan offloads stays on the device in the first two.

    Args:
        block: pure function ``block(layer_parameters, carry, *shared)`` to the next carry; any pytrees. Or to a pair of
            the next carry and what the layer writes beside it, e.g. Flax's mutable collections (``batch_stats``).
        plan: over layers, or one policy for all of them.
        num_layers: L, at least 1.

    Returns:
        A function ``run(parameters, carry, *shared)`` to the last carry, or to a pair of it and what all layers wrote,
        stacked [L, ...]. ``parameters``: a pytree of arrays [L, ...], per-layer dropout keys, layer numbers and flags
        among them. ``carry``: what goes from layer to layer.
        ``shared``: what every layer reads, e.g. masks, positions, a conditioning; differentiated where it is asked for.
        Leaves that aren't differentiated (frozen parameters, integers, keys) get no gradient buffer.

    Raises:
        ValueError: the plan doesn't fit ``num_layers``, or is a request that isn't resolved yet; at the first call,
            differentiated or not, a leaf of ``parameters`` has another length, the block's result isn't like its carry,
            or a policy's selector matches nothing in the block.

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
        used = dict.fromkeys(policy for segment in segments for policy in segment.pattern)
        warn_where_ignored(used)
        check_lengths(parameters, num_layers)
        if writes_beside(block, parameters, carry, shared):
            _say_scanned(plan, segments, "a block that writes values beside its carry")
            return scanned(block, segments, parameters, carry, shared)
        flat = flatten(block, parameters, carry, shared)
        stacked = [jnp.asarray(leaf) for leaf in jax.tree.leaves(parameters)]
        expect_matches(flat.call, used, one_layer(stacked), flat.shared, flat.carry)

        def scan(stacked: Leaves, shared: Leaves, carry: Leaves) -> Leaves:
            layer = lambda own, carry, *shared: (flat.call(own, list(shared), carry), ())
            # JAX can't differentiate what it offloads in reverse mode twice.
            kept = [replace(s, pattern=tuple(map(on_device, s.pattern))) for s in segments]
            return scanned(layer, kept, stacked, carry, shared)[0]

        @functools.cache  # once for all that a call's derivatives need of it
        def say() -> None:
            moved = "; what it offloads stays on the device" if any(policy.offloads for policy in used) else ""
            _say_scanned(plan, segments, "forward mode or a second derivative", moved)

        run = differentiable(flat.call, num_layers, lambda cut: _loops(flat.call, segments, cut), scan, say)
        return flat.finish(run(stacked, flat.shared, flat.carry))

    return cast(Callable[P, R], stacked_blocks)


def _say_scanned(plan: LayerPlan | Policy, segments: Sequence[Segment], what: str, more: str = "") -> None:
    price = "copy parameters and gradients" if copies_parameters(segments) else "copy nothing where one policy holds"
    lost = lost_schedules(segments)
    warnings.warn(
        f"stack: {what} runs {plan.spec!r} as scans, which {price}{f'; {lost}' if lost else ''}{more}",
        UserWarning,
        stacklevel=2,
    )


Cut = Callable[[Policy, bool], SplitLayer]
"""A layer cut in two, by its policy and whether it runs in a loop of one turn."""


def _loops(call: Flat, segments: Sequence[Segment], cut: Callable[[Flat], SplitLayer]) -> tuple[Loop, ...]:
    """The plan as loops. Layers under equal policies share one trace.

    Args:
        call: the block as written.
        cut: makes the two halves of a block that is under its policy.
    """

    @functools.cache
    def cut_under(policy: Policy, alone: bool) -> SplitLayer:
        # A loop of one turn is unrolled, and there XLA would merge the replay with the forward.
        return cut(checkpoint(call, policy, prevent_cse=alone))

    return tuple(loop for segment in segments for loop in _loops_of(call, segment, cut_under))


def _loops_of(call: Flat, segment: Segment, cut: Cut) -> tuple[Loop, ...]:
    pattern, repeats = segment.pattern, segment.repeats
    assert repeats is not None, "a resolved segment is closed"
    length = len(pattern) * repeats
    if segment.slots is not None:
        return (Scheduled(call, cut(pattern[0], length == 1), tables(binomial(length, segment.slots))),)
    if segment.group == 1:
        return (_repeat(pattern, repeats, cut),)
    host = any(boundary_on_host(policy) for policy in pattern)
    pattern = tuple(inside_group(policy) for policy in pattern)
    whole, rest = divmod(length, segment.group)
    full = (Group(call, _replayed(pattern, segment.group, cut), whole, host),) if whole else ()
    return (*full, Group(call, _replayed(pattern, rest, cut), 1, host)) if rest else full


def _repeat(pattern: tuple[Policy, ...], repeats: int, cut: Cut) -> Repeat:
    return Repeat(tuple(cut(policy, repeats == 1) for policy in pattern), repeats)


def _replayed(pattern: tuple[Policy, ...], length: int, cut: Cut) -> tuple[Repeat, ...]:
    """A group's loops. Its last layer stands alone: its output is read by nobody, so its end is not run."""
    whole, rest = divmod(length - 1, len(pattern))
    loops = (_repeat(pattern, whole, cut),) if whole else ()
    ends = (pattern[:rest],) if rest else ()
    return (*loops, *(_repeat(end, 1, cut) for end in (*ends, (pattern[rest],))))
