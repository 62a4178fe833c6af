"""Remat of what takes Flax NNX modules: their state goes in and comes out, so that each change happens once."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from jremat.graph.arguments import static_places, take_apart_at
from jremat.policy.policy import Policy
from jremat.transform.checkpoint import call_rematted, expect_policy


def remat_nnx(
    f: Callable[..., Any],
    policy: Policy,
    *,
    strict: bool = True,
    static_argnames: str | Sequence[str] = (),
    prevent_cse: bool = True,
) -> Callable[..., Any]:
    """A function like ``f`` of NNX modules and arrays, whose gradient keeps just the values that ``policy`` keeps.

    Batch statistics, counters and sown values change once, not again in the backward pass.

    Args:
        f: a function, some of whose arguments are NNX modules: ``Block.__call__``, or a user's own.
        policy, strict, static_argnames, prevent_cse: as of ``jremat.checkpoint``.

    >>> import jax.numpy as jnp
    >>> from jremat.policy import Policy
    >>> layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    >>> remat_nnx(nnx.Linear.__call__, Policy())(layer, jnp.ones((2, 4))).shape
    (2, 4)
    """
    expect_policy(policy)
    if policy.keeps_everything:
        return f

    @functools.wraps(f)
    def rematted(*args: Any, **kwargs: Any) -> Any:
        static = static_places(f, args, static_argnames)
        places = [(k, v) for k, v in (*enumerate(args), *kwargs.items()) if isinstance(v, nnx.Module)]
        if not places:  # a function of arrays: trace it itself, so that the trace is found again
            return call_rematted(take_apart_at(f, args, kwargs, static), policy, strict=strict, prevent_cse=prevent_cse)
        modules = tuple(module for _, module in places)
        graphdef, state = nnx.split(modules)

        def pure(state: Any, *args: Any, **kwargs: Any) -> Any:
            inner = nnx.merge(graphdef, state)
            given = dict(zip((place for place, _ in places), inner))
            args = tuple(given.get(k, arg) for k, arg in enumerate(args))
            out = f(*args, **{name: given.get(name, value) for name, value in kwargs.items()})
            return out, nnx.split(inner)[1]

        args = tuple(None if isinstance(arg, nnx.Module) else arg for arg in args)
        kwargs = {name: None if isinstance(value, nnx.Module) else value for name, value in kwargs.items()}
        moved = {place + 1 if isinstance(place, int) else place for place in static}
        arguments = take_apart_at(pure, (state, *args), kwargs, moved)
        out, state = call_rematted(arguments, policy, strict=strict, prevent_cse=prevent_cse)
        nnx.update(modules, state)
        return out

    return rematted


def remat_nnx_class(block: type[nnx.Module], policy: Policy, **options: Any) -> type[nnx.Module]:
    """A subclass of an NNX module class whose ``__call__`` is rematted; ``block`` is left as it is."""
    call = remat_nnx(block.__call__, policy, **options)
    metaclass: Any = type(block)
    return metaclass(block.__name__, (block,), {"__call__": call, "__module__": block.__module__})
