"""One executor for stacks of equal layers: any plan over the layers, and no copy of the parameters."""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, cast

from jremat.graph.arguments import of_held
from jremat.jax_internals import checks_key_reuse, compiled, weakly_cached
from jremat.policy import FULL, LayerPlan, Policy, Segment
from jremat.transform.checkpoint import checkpoint, expect_matches
from jremat.transform.derivative import differentiable
from jremat.transform.flat import Layout, flat_call, given, take_call
from jremat.transform.layer import Flat, Leaves, SplitLayer
from jremat.transform.loops import Group, Loop, Repeat, Scheduled
from jremat.transform.offload import boundary_on_host, inside_group, on_device, warn_where_ignored
from jremat.transform.reversal_schedule import tables
from jremat.transform.revolve import binomial
from jremat.transform.scan import (
    ONE_BY_ONE,
    compiled_scans,
    copies_parameters,
    flat_scans,
    lost_schedules,
    one_by_one,
    planned_for,
    resolved,
)

P = ParamSpec("P")
R = TypeVar("R")


def stack(block: Callable[P, R], plan: LayerPlan | Policy, *, num_layers: int) -> Callable[P, R]:
    """``num_layers`` of ``block`` in a row, under a plan that may differ from layer to layer.

    Kept and recomputed is what the plan says, layer by layer; parameters are read where they stand and never kept, nor
    is what is computed from them alone (a cast to bfloat16). Matmuls of the replay stand under JAX's
    ``rematted_computation`` scope. All of that is of reverse mode, where loops of our own do the work. Forward mode
    (``jax.jvp``, ``jax.linearize``, ``jax.jacfwd``), second derivatives and blocks that write values beside the carry
    run as the scans of ``jremat.transform.scan.scan_stack``, and a warning says when it is traced what that costs; what
    the plan offloads stays on the device in the first two. Under ``jax_debug_key_reuse`` it runs as scans, too.

    Traces are cached as by ``jax.jit``: a second call with equal shapes, outside of ``jit`` too, compiles nothing.

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

    >>> import jax.numpy as jnp
    >>> from jremat.policy import FULL, NONE
    >>> plan = LayerPlan((Segment((FULL,), repeats=2), Segment((NONE,))), label="block:2")
    >>> run = stack(lambda w, x: jnp.tanh(x * w), plan, num_layers=3)
    >>> w, x = jnp.array([1.0, 2.0, 3.0]), jnp.float32(0.5)
    >>> bool(jnp.allclose(run(w, x), jnp.tanh(3 * jnp.tanh(2 * jnp.tanh(x)))))
    True

    Source: Chen et al. 2016, arXiv 1604.06174, for the segments; Griewank and Walther 2000 for the schedules.
    """
    segments = resolved(plan, num_layers)

    used = tuple(dict.fromkeys(policy for segment in segments for policy in segment.pattern))

    held_block = of_held(block)

    def stacked_blocks(parameters: Any, carry: Any, *shared: Any) -> Any:
        warn_where_ignored(used)
        call = take_call(block, held_block, parameters, carry, shared, num_layers)
        _expect_matches(call.jaxpr, call.layout, used, planned_for(segments))
        if ONE_BY_ONE.value:
            run = compiled_scans(call.jaxpr, call.layout, one_by_one(segments), planned_for(segments))
        elif why := _only_scans(call.layout):
            as_scans = _scannable(segments)
            _say_scanned(plan, as_scans, why)
            run = compiled_scans(call.jaxpr, call.layout, as_scans, planned_for(as_scans))
        else:
            run = _compiled_loops(call.jaxpr, call.layout, plan, segments, planned_for(segments))
        return call.finish(*run(call.stacked, call.shared, call.carry))

    return cast(Callable[P, R], stacked_blocks)


def _only_scans(layout: Layout) -> str:
    """Why a stack runs as scans in reverse mode too; empty where it doesn't."""
    if layout.writes:
        return "a block that writes values beside its carry"
    if checks_key_reuse():  # which has no rule for a derivative of one's own, and takes a replay for reuse
        return "jax_debug_key_reuse"
    return ""


def _scannable(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """The plan as scans; under the key-reuse checker, which takes a group's replay for reuse, each layer alone."""
    if not checks_key_reuse():
        return segments
    alone = [replace(s, pattern=(FULL,) * len(s.pattern)) if s.group > 1 else s for s in segments]
    return one_by_one(alone)


@weakly_cached
def _expect_matches(jaxpr: Any, layout: Layout, policies: tuple[Policy, ...], planned_for: tuple[Any, ...]) -> None:
    lists = given(jaxpr, layout)
    expect_matches(flat_call(jaxpr, layout), policies, *lists)


@weakly_cached
def _compiled_loops(
    jaxpr: Any, layout: Layout, plan: LayerPlan | Policy, segments: tuple[Segment, ...], planned_for: tuple[Any, ...]
) -> Callable[[Leaves, Leaves, Leaves], tuple[Leaves, Leaves]]:
    """The stack as one compiled function of flat lists, made once for a traced block and a plan.

    Returns:
        A function of (stacked parameters, what the layers share, carry) to the last carry and what the layers wrote:
        nothing.
    """
    call = flat_call(jaxpr, layout)
    # JAX can't differentiate what it offloads in reverse mode twice.
    scans = flat_scans(call, layout.num_carry, [replace(s, pattern=tuple(map(on_device, s.pattern))) for s in segments])

    @functools.cache  # once for all that a call's derivatives need of it
    def say() -> None:
        offloads = any(policy.offloads for segment in segments for policy in segment.pattern)
        moved = "; what it offloads stays on the device" if offloads else ""
        _say_scanned(plan, segments, "forward mode or a second derivative", moved)

    num_layers = sum(segment.num_layers for segment in segments)
    loops = lambda cut: _loops(call, segments, cut)
    run = differentiable(call, num_layers, loops, lambda *lists: scans(*lists)[0], say)
    return compiled(lambda stacked, shared, carry: (run(stacked, shared, carry), []))


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
    length = segment.num_layers
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
