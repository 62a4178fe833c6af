"""A block of pytrees as one of flat lists, traced once: what differs from layer to layer, and what doesn't."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jremat.graph.arguments import array_leaves, map_arrays, take_apart_at
from jremat.graph.effects import rerunnable
from jremat.graph.trace import Program
from jremat.transform.layer import Flat, Leaves


@dataclass(frozen=True)
class FlatBlock:
    """A block on flat lists, and the values that a stack of it starts from.

    Args:
        call: (one layer's parameters, what all layers share, carry) to the next carry.
        shared: what all layers share: the arguments, what the block closed over, and what of the carry it hands on
            unchanged (positions, a step's dropout key), which would otherwise be kept once a layer.
        carry: the rest of the carry.
        finish: the last carry as the caller's pytree.
    """

    call: Flat
    shared: Leaves
    carry: Leaves
    finish: Callable[[Leaves], Any]


def flatten(block: Callable[..., Any], parameters: Any, carry: Any, shared: tuple[Any, ...]) -> FlatBlock:
    """Trace ``block`` for one layer of ``parameters``.

    Args:
        block: ``block(layer_parameters, carry, *shared)`` to the next carry.
        parameters: stacked over the layers.
        carry, shared: arrays or numbers, in pytrees.

    Raises:
        ValueError: the block's result isn't like its carry.
    """
    one, closed, out_shape = _traced(block, parameters, carry, shared)
    _check_carry(carry, out_shape)
    leaves, tree = jax.tree.flatten(carry)
    jaxpr, num_layer = closed.jaxpr, len(jax.tree.leaves(one))
    layer, states, arguments = _cut(jaxpr.invars, num_layer, len(leaves))
    moves = [before is not after for before, after in zip(states, jaxpr.outvars, strict=True)]
    still = [not move for move in moves]
    values = [jnp.asarray(leaf) for leaf in (*jax.tree.leaves(shared), *closed.consts, *_those(still, leaves))]
    common = [*arguments, *jaxpr.constvars, *_those(still, states)]
    flat = jaxpr.replace(
        constvars=[], invars=[*layer, *common, *_those(moves, states)], outvars=_those(moves, jaxpr.outvars)
    )
    run = core.jaxpr_as_fun(core.ClosedJaxpr(flat, ()))

    def finish(last: Leaves) -> Any:
        supply = iter(last)
        return jax.tree.unflatten(tree, [next(supply) if move else leaf for move, leaf in zip(moves, leaves)])

    def call(layer: Leaves, common: Leaves, state: Leaves) -> Leaves:
        return list(run(*layer, *common, *state))

    return FlatBlock(call, values, [jnp.asarray(leaf) for leaf in _those(moves, leaves)], finish)


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


def writes_beside(block: Callable[..., Any], parameters: Any, carry: Any, shared: tuple[Any, ...]) -> bool:
    """Whether a block returns ``(carry, writes)``: what a layer writes beside the carry, such as batch statistics.

    Told by structure: a pair whose first half is built like the carry, where the whole isn't.

    Raises:
        ValueError: as ``flatten``.

    >>> batch = jnp.ones((2, 3))
    >>> writes_beside(lambda w, x: (x * w, x.mean()), jnp.ones(4), batch, ())
    True
    >>> writes_beside(lambda w, x: (x[0] * w, x[1]), jnp.ones(4), (batch, batch), ())  # a carry of two
    False
    """
    _, _, out = _traced(block, parameters, carry, shared)
    own: Any = jax.tree.structure(carry)
    if jax.tree.structure(out) == own or not (isinstance(out, tuple) and len(out) == 2):
        return False
    if jax.tree.structure(out[0]) != own:
        return False
    _check_carry(carry, out[0])
    return True


def _traced(block: Callable[..., Any], parameters: Any, carry: Any, shared: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """One layer's shapes, the block's program and the shape of what it returns; JAX remembers the trace."""
    one = one_layer(parameters)
    closed, out = jax.make_jaxpr(block, return_shape=True)(one, carry, *shared)
    paths = take_apart_at(block, (one, carry, *shared), {}, ()).paths
    program = rerunnable(Program(closed.jaxpr, tuple(closed.consts), None, paths), "block")
    return one, core.ClosedJaxpr(program.jaxpr, program.consts), out


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


def _those(flags: list[bool], values: Any) -> list[Any]:
    return [value for flag, value in zip(flags, values, strict=True) if flag]


def _cut(values: Any, first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    values = list(values)
    return values[:first], values[first : first + second], values[first + second :]
