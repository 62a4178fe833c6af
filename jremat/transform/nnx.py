"""Remat of what takes Flax NNX modules: their state goes in and comes out, so that each change happens once."""

import functools
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from flax import nnx

from jremat.graph.arguments import Arguments, like, static_places, take_apart_at
from jremat.graph.nnx_modules import named_modules
from jremat.policy.policy import Policy
from jremat.transform.checkpoint import call_rematted, expect_policy
from jremat.transform.closures import has_state, refuse_nnx


def remat_nnx(
    f: Callable[..., Any],
    policy: Policy,
    *,
    strict: bool = True,
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    prevent_cse: bool = True,
) -> Callable[..., Any]:
    """A function like ``f`` of NNX modules and arrays, whose gradient keeps just the values that ``policy`` keeps.

    Batch statistics, counters, random streams and sown values change once, not again in the backward pass, wherever in
    the arguments they stand. What is not NNX state (a plain Python attribute that the call sets) does not come out.

    Args:
        f: a function, some of whose arguments are NNX modules: ``Block.__call__``, or a user's own.
        policy, strict, static_argnames, static_argnums, prevent_cse: as of ``jremat.checkpoint``.

    Raises:
        ValueError: ``f`` closes over a module: it would be remembered as it was, and its changes lost.

    >>> import jax.numpy as jnp
    >>> from jremat.policy import Policy
    >>> layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    >>> remat_nnx(nnx.Linear.__call__, Policy())(layer, jnp.ones((2, 4))).shape
    (2, 4)
    """
    expect_policy(policy)
    if policy.is_identity:
        return f
    refuse_nnx(f)

    @functools.wraps(f)
    def rematted(*args: Any, **kwargs: Any) -> Any:
        static = static_places(f, args, kwargs, static_argnames, static_argnums)
        run = functools.partial(call_rematted, policy=policy, strict=strict, prevent_cse=prevent_cse)
        return over_state(f, args, kwargs, static, run)

    return rematted


def over_state(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static: Collection[int | str],
    run: Callable[[Arguments], Any],
) -> Any:
    """``f(*args, **kwargs)`` of NNX modules and arrays, called by ``run`` as a function of arrays.

    The modules' state goes in and comes out, so that each change happens once.

    Args:
        f, args, kwargs: the call.
        static: places and names of arguments to hold fixed.
        run: makes the call of what is taken apart.
    """
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=has_state)
    nodes = tuple(leaf for leaf in leaves if has_state(leaf))
    if not nodes:  # a function of arrays: trace it itself, so that the trace is found again
        return run(take_apart_at(f, args, kwargs, static))
    graphdef, state = nnx.split(nodes)

    def pure(state: Any, *args: Any, **kwargs: Any) -> Any:
        before = _arrays(state)  # now, since what is merged shares its variables with the state
        inner = nnx.merge(graphdef, state)
        given = iter(inner)
        others = jax.tree.leaves((args, kwargs), is_leaf=_is_gap)
        args, kwargs = jax.tree.unflatten(tree, [next(given) if _is_gap(leaf) else leaf for leaf in others])
        with named_modules(inner):
            out = f(*args, **kwargs)
        return out, _changed(before, nnx.split(inner)[1])

    args, kwargs = jax.tree.unflatten(tree, [_GAP if has_state(leaf) else leaf for leaf in leaves])
    moved = {place + 1 if isinstance(place, int) else place for place in static}
    out, state = run(take_apart_at(like(pure, f, "state"), (state, *args), kwargs, moved))
    if state:  # a module that nothing changed may belong to an outer trace, and is left alone
        nnx.update(nodes, nnx.from_flat_state(state))
    return out


def _arrays(state: Any) -> dict[Any, list[Any]]:
    return {path: jax.tree.leaves(leaf) for path, leaf in nnx.to_flat_state(state)}


def _changed(before: dict[Any, list[Any]], after: Any) -> dict[Any, Any]:
    """The variables of ``after`` that do not hold the very arrays of ``before``, by path."""

    def same(path: Any, leaf: Any) -> bool:
        arrays = jax.tree.leaves(leaf)
        return len(before.get(path, ())) == len(arrays) and all(map(operator.is_, before[path], arrays))

    return {path: leaf for path, leaf in nnx.to_flat_state(after) if not same(path, leaf)}


class _Gap:
    """Stands in the place of a module while the arrays are traced; no array, so held fixed."""


_GAP = _Gap()


def _is_gap(leaf: Any) -> bool:
    return isinstance(leaf, _Gap)
