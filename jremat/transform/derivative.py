"""A stack's derivatives: its own loops in reverse mode, scans in forward mode and when differentiated again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jremat.graph.differentiate import is_inexact, zero_tangent
from jremat.graph.residuals import UNREAD
from jremat.transform.flat import selected
from jremat.transform.layer import Active, Flat, Leaves, SplitLayer, split
from jremat.transform.linear_map import LinearMap
from jremat.transform.loops import Gradients, Loop, Weights, backward_all, forward_all, run


def differentiable(
    block: Flat,
    num_layers: int,
    cut_up: Callable[[Callable[[Flat], SplitLayer]], tuple[Loop, ...]],
    scan: Flat,
    say: Callable[[], None],
) -> Flat:
    """The stack as a function of (stacked parameters, what the layers share, carry).

    The first derivative in reverse mode runs the loops, with what they keep between their two passes. Forward mode and
    second derivatives run ``scan``, whose program is traced for them alone.

    Args:
        block: the layer as written.
        cut_up: the plan's loops, given how a layer is cut in two.
        scan: the same function, made of scans, on the same lists.
        say: called where ``scan`` is run instead.
    """

    @jax.custom_jvp
    def chain(stacked: Leaves, shared: Leaves, carry: Leaves) -> Leaves:
        return run(block, Weights(stacked, shared), 0, carry, num_layers)

    def tangents_of(primals: Any, tangents: Any) -> tuple[Leaves, list[Any]]:
        stacked, shared, carry = primals
        moved = [[_moves(t) for t in some] for some in tangents]
        # The carry of a later layer is differentiated even where the first one's isn't: all of it that can be.
        active = Active(tuple(moved[0]), tuple(moved[1]), tuple(map(is_inexact, carry)))
        # Types, not shapes: under explicit sharding and in a shard_map they say more.
        types = jax.eval_shape(Weights(stacked, shared).layer, 0), shared, carry
        loops = cut_up(lambda rematted: split(rematted, *types, active))
        passes = _Passes(loops, active, moved, scan, say)
        out, saved = passes.forward(stacked, shared, carry)
        fixed, tree = jax.tree.flatten((saved, stacked, shared, passes.unheld(carry)))
        both = LinearMap(
            lambda fixed, given: passes.push(given, *jax.tree.unflatten(tree, fixed)),
            lambda fixed, cts: passes.pull(*jax.tree.unflatten(tree, fixed), cts),
        )
        given = [t for some in tangents for t in some if _moves(t)]
        supply = iter(both(fixed, given, like=selected(active.carry, out)))
        return out, [next(supply) if flag else zero_tangent(x) for flag, x in zip(active.carry, out)]

    chain.defjvp(tangents_of, symbolic_zeros=True)
    return chain


@dataclass(frozen=True, eq=False)
class _Passes:
    """The two passes of reverse mode. Differentiated again, they are the scan's.

    The scan starts from the first carry. Where the plan doesn't keep it, it goes from pass to pass under a name of its
    own: the backward pass doesn't read it, so a compiled step doesn't keep it either.

    Args:
        loops: of the plan, cut in two.
        active: which leaves have gradients inside of the loops.
        moved: which of (stacked, shared, carry) are differentiated.
        scan, say: as of ``differentiable``.
    """

    loops: tuple[Loop, ...]
    active: Active
    moved: Sequence[Sequence[bool]]
    scan: Flat
    say: Callable[[], None]

    def unheld(self, carry: Leaves) -> Leaves:
        """What of the first carry isn't among what the loops save."""
        return [
            checkpoint_name(x, UNREAD) for place, x in zip(self.loops[0].carried, carry, strict=True) if place is None
        ]

    def forward(self, *at: Leaves) -> tuple[Leaves, Any]:
        """(stacked, shared, carry) to the last carry, and what the loops save."""

        @jax.custom_jvp
        def forward(stacked: Leaves, shared: Leaves, carry: Leaves) -> tuple[Leaves, Any]:
            return forward_all(self.loops, Weights(stacked, shared), 0, carry)

        def tangents_of(primals: Any, tangents: Any) -> Any:
            out_tangents = self._scanned_jvp(self.scan, primals, tangents)[1]
            out, saved = forward(*primals)
            leaves, tree = jax.tree.flatten(saved)
            along: list[Any] = [zero_tangent(x) for x in leaves]
            # Of what is saved the backward pass reads the first carry's tangent alone.
            for place, t in zip(self.loops[0].carried, tangents[2], strict=True):
                if place is not None and _moves(t):
                    along[place] = lax.dynamic_update_index_in_dim(jnp.zeros_like(leaves[place]), t, 0, 0)
            return (out, saved), (out_tangents, jax.tree.unflatten(tree, along))

        forward.defjvp(tangents_of, symbolic_zeros=True)
        return forward(*at)

    def pull(self, *at: Any) -> Leaves:
        """(saved, stacked, shared, unheld, cotangents of the last active carry) to gradients by what is moved."""

        @jax.custom_jvp
        def backward(saved: Any, stacked: Leaves, shared: Leaves, unheld: Leaves, cts: Leaves) -> Leaves:
            start = Gradients(
                cts,
                [jnp.zeros_like(leaf) for leaf in selected(self.active.layer, stacked)],
                [jnp.zeros_like(leaf) for leaf in selected(self.active.shared, shared)],
            )
            end = backward_all(self.loops, Weights(stacked, shared), 0, saved, start)
            wanted = selected(self.active.carry, self.moved[2])
            return [*end.stacked, *end.shared, *selected(wanted, end.carry)]

        def tangents_of(primals: Any, tangents: Any) -> Any:
            (saved, stacked, shared, unheld, cts), (saved_t, stacked_t, shared_t, unheld_t, cts_t) = primals, tangents
            carry = self._first(saved, unheld)
            carry_t = self._first_tangents(saved_t, unheld_t, carry)
            along = stacked_t, shared_t, carry_t, cts_t
            out_tangents = self._scanned_jvp(self._scanned_vjp, (stacked, shared, carry, cts), along)[1]
            # Not the scan's own primal results: under vmap in a jit JAX takes a rule's results to be batched along the
            # axes of the function's, and a scan stacks gradients along another.
            return backward(*primals), out_tangents

        backward.defjvp(tangents_of, symbolic_zeros=True)
        return backward(*at)

    def push(self, given: Leaves, saved: Any, stacked: Leaves, shared: Leaves, unheld: Leaves) -> Leaves:
        """Tangents of what is moved, ``given``, to those of the last active carry."""
        at, supply = (stacked, shared, self._first(saved, unheld)), iter(given)
        along = [[next(supply) if flag else zero_tangent(x) for flag, x in zip(*pair)] for pair in zip(self.moved, at)]
        return selected(self.active.carry, self._scanned_jvp(self.scan, at, along)[1])

    def _scanned_jvp(self, f: Callable[..., Any], at: Sequence[Any], along: Sequence[Any]) -> tuple[Any, Any]:
        self.say()
        return _jvp(f, at, along)

    def _scanned_vjp(self, stacked: Leaves, shared: Leaves, carry: Leaves, cts: Leaves) -> Leaves:
        at = stacked, shared, carry

        def of_moved(*given: Any) -> Leaves:
            supply = iter(given)
            filled = [[next(supply) if flag else x for flag, x in zip(*pair)] for pair in zip(self.moved, at)]
            return selected(self.active.carry, self.scan(*filled))

        given = [x for pair in zip(self.moved, at) for x in selected(*pair)]
        return list(jax.vjp(of_moved, *given)[1](cts))

    def _first(self, saved: Any, unheld: Leaves) -> Leaves:
        """The first carry."""
        leaves, supply = jax.tree.leaves(saved), iter(unheld)
        return [next(supply) if place is None else _head(leaves[place]) for place in self.loops[0].carried]

    def _first_tangents(self, saved: Any, unheld: Sequence[Any], carry: Leaves) -> list[Any]:
        """Its tangents, from those of what was saved and what wasn't."""
        leaves, supply = jax.tree.leaves(saved), iter(unheld)
        found = [next(supply) if place is None else leaves[place] for place in self.loops[0].carried]
        at_first = [place is not None for place in self.loops[0].carried]
        return [
            (_head(t) if head else t) if _moves(t) else zero_tangent(x) for t, head, x in zip(found, at_first, carry)
        ]


def _jvp(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """``jax.jvp`` by the inputs that move."""
    at, tree = jax.tree.flatten(tuple(primals))
    along = jax.tree.leaves(tuple(tangents))
    flags = [_moves(t) for t in along]

    def of_moved(*given: Any) -> Any:
        supply = iter(given)
        return f(*jax.tree.unflatten(tree, [next(supply) if flag else x for flag, x in zip(flags, at, strict=True)]))

    return jax.jvp(of_moved, selected(flags, at), selected(flags, along))


def _head(stacked: jax.Array) -> jax.Array:
    return lax.index_in_dim(stacked, 0, keepdims=False)


def _moves(tangent: Any) -> bool:
    return not isinstance(tangent, SymbolicZero) and tangent.dtype != jax.dtypes.float0
