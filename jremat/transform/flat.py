"""A block of pytrees as one of flat lists, traced once: what differs from layer to layer, and what doesn't."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jremat.graph.arguments import array_leaves, arrays_of_block, map_arrays, released, take_apart_at
from jremat.graph.effects import rerunnable
from jremat.graph.trace import Program
from jremat.transform.layer import Flat, Leaves


@dataclass(frozen=True)
class Layout:
    """How the inputs of a block's program divide into a layer's parameters, the carry, shared values and constants.

    Args:
        num_layer: leaves of one layer's parameters.
        moves: for each leaf of the carry, whether a layer changes it.
        writes: whether the block returns ``(carry, writes)``.
    """

    num_layer: int
    moves: tuple[bool, ...]
    writes: bool

    @property
    def still(self) -> tuple[bool, ...]:
        """For each leaf of the carry, whether a layer hands it on unchanged."""
        return tuple(not move for move in self.moves)

    @property
    def num_carry(self) -> int:
        """Leaves of the carry that a layer changes."""
        return sum(self.moves)


@dataclass(frozen=True)
class Call:
    """One call of a stack: its block, and the values that it starts from.

    Args:
        jaxpr: the block's program. JAX remembers traces, so equal calls of one function share this object.
        layout: of that program.
        stacked: parameters, [L, ...].
        shared: what all layers share: the arguments, what the block closed over, and what of the carry it hands on
            unchanged (positions, a step's dropout key), which would otherwise be kept once a layer.
        carry: the rest of the carry.
        finish: the last carry and what the layers wrote, as the caller's pytrees.
    """

    jaxpr: Any
    layout: Layout
    stacked: Leaves
    shared: Leaves
    carry: Leaves
    finish: Callable[[Leaves, Leaves], Any]


def take_call(
    block: Callable[..., Any],
    held_block: Callable[..., Any],
    parameters: Any,
    carry: Any,
    shared: tuple[Any, ...],
    num_layers: int,
) -> Call:
    """Trace ``block`` for one layer of ``parameters``.

    Args:
        block: ``block(layer_parameters, carry, *shared)`` to the next carry, or to ``(carry, writes)``.
        held_block: ``of_held(block)``, the same object in every call, so that its traces are found again.
        parameters: stacked over the layers.
        carry, shared: pytrees; what is no array is held fixed.
        num_layers: that ``parameters`` are for.

    Raises:
        ValueError: a leaf of ``parameters`` has another length, the block's result isn't like its carry, it reads an
            array's value in Python, or it has an effect that a rerun would repeat.
    """
    arguments = (parameters, carry, *shared)
    parameters, carry, *others = given = arrays_of_block(arguments)
    bare = block if given is arguments else held_block
    check_lengths(parameters, num_layers)
    one = one_layer(parameters)
    call = take_apart_at(bare, (one, carry, *others), {}, ())
    with call.naming_parameters():
        traced, out = jax.make_jaxpr(bare, return_shape=True)(one, carry, *others)
    closed = rerunnable(Program(traced.jaxpr, tuple(traced.consts), None, call.paths), "block")
    writes = _writes_beside(carry, out)
    _check_carry(carry, out[0] if writes else out)
    leaves, tree = jax.tree.flatten(carry)
    num_layer = len(jax.tree.leaves(one))
    states = closed.jaxpr.invars[num_layer : num_layer + len(leaves)]
    moves = tuple(before is not after for before, after in zip(states, closed.jaxpr.outvars))
    layout = Layout(num_layer, moves, writes)
    written = jax.tree.structure(out[1]) if writes else None
    values = (*jax.tree.leaves(others), *closed.consts, *selected(layout.still, leaves))

    def finish(last: Leaves, wrote: Leaves) -> Any:
        supply = iter(last)
        end = jax.tree.unflatten(tree, [next(supply) if move else leaf for move, leaf in zip(moves, leaves)])
        out = end if written is None else (end, jax.tree.unflatten(written, wrote))
        return out if bare is block else released(out)

    return Call(
        closed.jaxpr,
        layout,
        [jnp.asarray(leaf) for leaf in jax.tree.leaves(parameters)],
        [jnp.asarray(leaf) for leaf in values],
        [jnp.asarray(leaf) for leaf in selected(moves, leaves)],
        finish,
    )


def flat_call(jaxpr: Any, layout: Layout) -> Flat:
    """A block's program as a function of (one layer's parameters, what all layers share, carry).

    Returns:
        The next carry, then what the layer writes beside it. It doesn't hold ``jaxpr`` itself: a cache by that program,
        which this function is made for, would keep it alive.
    """
    ahead, written = jaxpr.outvars[: len(layout.moves)], jaxpr.outvars[len(layout.moves) :]
    invars = [v for some in _inputs(jaxpr, layout) for v in some]
    flat = jaxpr.replace(constvars=[], invars=invars, outvars=[*selected(layout.moves, ahead), *written])
    run = core.jaxpr_as_fun(core.ClosedJaxpr(flat, ()))

    def call(layer: Leaves, common: Leaves, state: Leaves) -> Leaves:
        return list(run(*layer, *common, *state))

    return call


def given(jaxpr: Any, layout: Layout) -> list[list[Any]]:
    """The types of what ``flat_call`` takes."""
    return [[v.aval for v in some] for some in _inputs(jaxpr, layout)]


def _inputs(jaxpr: Any, layout: Layout) -> tuple[list[Any], list[Any], list[Any]]:
    end = layout.num_layer + len(layout.moves)
    layer, states = jaxpr.invars[: layout.num_layer], jaxpr.invars[layout.num_layer : end]
    common = [*jaxpr.invars[end:], *jaxpr.constvars, *selected(layout.still, states)]
    return list(layer), common, selected(layout.moves, states)


def check_lengths(parameters: Any, num_layers: int) -> None:
    """Every leaf of ``parameters`` has one entry per layer, or a ValueError that names it."""
    leaves = jax.tree_util.tree_flatten_with_path(parameters)[0]
    for (path, leaf), array in zip(leaves, array_leaves(parameters)):
        shape = jnp.shape(leaf) if array else (num_layers,)
        if shape[:1] != (num_layers,):
            where = f"parameters{jax.tree_util.keystr(path)}"
            raise ValueError(f"{where}: expected [{num_layers}, ...], one entry per layer, got {list(shape)}")


def one_layer(parameters: Any) -> Any:
    """The shapes of one layer's parameters, of stacked ones; what is no array is every layer's."""
    return map_arrays(lambda leaf: jax.eval_shape(lambda leaf: leaf[0], leaf), parameters)


def _writes_beside(carry: Any, out: Any) -> bool:
    """Whether a block returns ``(carry, writes)``: what a layer writes beside the carry, such as batch statistics.

    Told by structure: a pair whose first half is built like the carry, where the whole isn't.
    """
    own: Any = jax.tree.structure(carry)
    if jax.tree.structure(out) == own or not (isinstance(out, tuple) and len(out) == 2):
        return False
    return jax.tree.structure(out[0]) == own


def _check_carry(carry: Any, out: Any) -> None:
    own, returned = str(jax.tree.structure(carry)), str(jax.tree.structure(out))
    if own != returned:
        raise ValueError(f"block: expected it to return a carry like its own, {own}, got {returned}")
    for (path, given), made in zip(jax.tree_util.tree_flatten_with_path(carry)[0], jax.tree.leaves(out)):
        shape, dtype = jnp.shape(given), jnp.result_type(given)
        if (shape, dtype) != (made.shape, made.dtype):
            raise ValueError(
                f"block: expected it to return a carry like its own, {dtype}{list(shape)} at "
                f"carry{jax.tree_util.keystr(path)}, got {made.dtype}{list(made.shape)}"
            )


def selected(flags: Sequence[bool], values: Any) -> list[Any]:
    """The values whose flag is set."""
    return [value for flag, value in zip(flags, values, strict=True) if flag]
