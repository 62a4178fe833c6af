"""A stack's derivatives: its own loops in reverse mode, scans in forward mode and when differentiated again."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

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
    second derivatives run ``scan``, whose program is traced for them alone. That needs the first carry. Where a plan
    doesn't keep it anyway it isn't kept for them: JAX then differentiates the loops themselves a second time.

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
        moved = tuple([_moves(t) for t in some] for some in tangents)
        # The carry of a later layer is differentiated even where the first one's isn't: all of it that can be.
        active = Active(tuple(moved[0]), tuple(moved[1]), tuple(map(_real, carry)))
        # Types, not shapes: under explicit sharding and in a shard_map they say more.
        types = jax.eval_shape(Weights(stacked, shared).layer, 0), shared, carry
        loops = cut_up(lambda rematted: split(rematted, *types, active))
        unheld = [x for place, x in zip(loops[0].carried, carry, strict=True) if place is None]
        forward, backward = _passes(loops, active, moved)
        if not unheld:
            forward, backward = _again(loops, active, moved, scan, say)
        out, saved = forward(stacked, shared, carry)
        fixed, tree = jax.tree.flatten((saved, stacked, shared))

        def push(fixed: Leaves, unheld: Leaves, given: Leaves) -> Leaves:
            say()
            saved, stacked, shared = jax.tree.unflatten(tree, fixed)
            at = stacked, shared, _first(loops, saved, unheld)
            supply = iter(given)
            along = [[next(supply) if flag else _zero(x) for flag, x in zip(*pair)] for pair in zip(moved, at)]
            return _those(active.carry, _jvp(scan, at, along)[1])

        both = LinearMap(push, lambda fixed, cts: backward(*jax.tree.unflatten(tree, fixed), cts))
        given = [t for some in tangents for t in some if _moves(t)]
        supply = iter(both(fixed, unheld, given, like=_those(active.carry, out)))
        return out, [next(supply) if flag else _zero(x) for flag, x in zip(active.carry, out)]

    chain.defjvp(tangents_of, symbolic_zeros=True)
    return chain


def _passes(
    loops: tuple[Loop, ...], active: Active, moved: Sequence[list[bool]]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two passes of reverse mode."""

    def forward(stacked: Leaves, shared: Leaves, carry: Leaves) -> tuple[Leaves, Any]:
        return forward_all(loops, Weights(stacked, shared), 0, carry)

    def backward(saved: Any, stacked: Leaves, shared: Leaves, cts: Leaves) -> Leaves:
        start = Gradients(
            cts,
            [jnp.zeros_like(leaf) for leaf in _those(active.layer, stacked)],
            [jnp.zeros_like(leaf) for leaf in _those(active.shared, shared)],
        )
        end = backward_all(loops, Weights(stacked, shared), 0, saved, start)
        wanted = _those(active.carry, moved[2])
        return [*end.stacked, *end.shared, *_those(wanted, end.carry)]

    return forward, backward


def _again(
    loops: tuple[Loop, ...], active: Active, moved: Sequence[list[bool]], scan: Flat, say: Callable[[], None]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two passes, which are differentiated again as the scan's; the first carry is among what is saved."""
    forward, backward = map(jax.custom_jvp, _passes(loops, active, moved))

    def forward_tangents(primals: Any, tangents: Any) -> Any:
        say()
        out, out_tangents = _jvp(scan, primals, tangents)
        _, saved = forward(*primals)
        leaves, tree = jax.tree.flatten(saved)
        along: list[Any] = [_zero(x) for x in leaves]
        # Of what is saved the backward pass reads the first carry's tangent alone.
        for place, t in zip(loops[0].carried, tangents[2], strict=True):
            if place is not None and _moves(t):
                along[place] = jnp.zeros_like(leaves[place]).at[0].set(t)
        return (out, saved), (out_tangents, jax.tree.unflatten(tree, along))

    def backward_tangents(primals: Any, tangents: Any) -> Any:
        (saved, stacked, shared, cts), (saved_t, stacked_t, shared_t, cts_t) = primals, tangents
        if not any(map(_moves, jax.tree.leaves(tangents[:-1]))):  # else the forward pass has said so
            say()

        def pulled(stacked: Leaves, shared: Leaves, carry: Leaves, cts: Leaves) -> Leaves:
            at = stacked, shared, carry

            def of_moved(*given: Any) -> Leaves:
                supply = iter(given)
                filled = [[next(supply) if flag else x for flag, x in zip(*pair)] for pair in zip(moved, at)]
                return _those(active.carry, scan(*filled))

            given = [x for pair in zip(moved, at) for x in _those(*pair)]
            return list(jax.vjp(of_moved, *given)[1](cts))

        carry = _first(loops, saved, ())
        carry_t = _first_tangents(loops, saved_t, carry)
        return _jvp(pulled, (stacked, shared, carry, cts), (stacked_t, shared_t, carry_t, cts_t))

    forward.defjvp(forward_tangents, symbolic_zeros=True)
    backward.defjvp(backward_tangents, symbolic_zeros=True)
    return forward, backward


def _first(loops: tuple[Loop, ...], saved: Any, unheld: Sequence[Any]) -> Leaves:
    """The first carry, from what was saved and what wasn't."""
    leaves, supply = jax.tree.leaves(saved), iter(unheld)
    return [next(supply) if place is None else leaves[place][0] for place in loops[0].carried]


def _first_tangents(loops: tuple[Loop, ...], saved: Any, carry: Leaves) -> list[Any]:
    """The first carry's tangents, from those of what was saved, which is all of it."""
    leaves = jax.tree.leaves(saved)
    held = [leaves[place] for place in loops[0].carried if place is not None]
    return [t[0] if _moves(t) else _zero(x) for t, x in zip(held, carry, strict=True)]


def _jvp(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """``jax.jvp`` by the inputs that move."""
    at, tree = jax.tree.flatten(tuple(primals))
    along = jax.tree.leaves(tuple(tangents))
    flags = [_moves(t) for t in along]

    def of_moved(*given: Any) -> Any:
        supply = iter(given)
        return f(*jax.tree.unflatten(tree, [next(supply) if flag else x for flag, x in zip(flags, at, strict=True)]))

    return jax.jvp(of_moved, _those(flags, at), _those(flags, along))


def _moves(tangent: Any) -> bool:
    return not isinstance(tangent, SymbolicZero) and tangent.dtype != jax.dtypes.float0


def _zero(x: Any) -> SymbolicZero:
    return SymbolicZero(jax.typeof(x).to_tangent_aval())


def _real(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _those(flags: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    return [value for flag, value in zip(flags, values, strict=True) if flag]
