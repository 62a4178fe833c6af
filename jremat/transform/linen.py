"""Remat of a Flax Linen module class, held to its word."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import flax.linen as nn
import jax

from jremat.graph.arguments import like, static_places, take_apart_at
from jremat.jax_internals import is_initializing, lift_linen
from jremat.policy.policy import Policy
from jremat.transform.checkpoint import call_rematted, expect_policy
from jremat.transform.subclass import in_place_of

Block = TypeVar("Block", bound=type[nn.Module])


def remat_linen(
    block: Block,
    policy: Policy,
    *,
    strict: bool = True,
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    prevent_cse: bool = True,
    method: str = "__call__",
) -> Block:
    """A Linen class like ``block``, whose gradient keeps just the values that ``policy`` keeps.

    Collections that the block writes (batch statistics, sown values) are written once; dropout's keys are inputs, so
    that the recompute draws the same masks.

    Args:
        block: a Linen module class; it is left as it is.
        policy: of one block.
        strict: a selector that matches nothing raises; if False, it warns.
        static_argnames: parameters of ``method`` to hold fixed.
        static_argnums: the same by position; ``self`` is 0, as under ``nn.remat``.
        prevent_cse: as of ``jax.checkpoint``; False is right inside ``nn.scan`` alone.
        method: the method to remat.

    Returns:
        A new class of the same name, so that its submodules and those around it bear the names, and parameters the
        values, that they have without remat: one snapshot serves every policy. (``nn.remat`` renames them.)

    >>> import jax, jax.numpy as jnp
    >>> from jremat.policy import Policy, tag
    >>> class MLP(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return nn.Dense(4)(jnp.sin(tag(nn.Dense(8)(x), "up")))
    >>> remat_linen(MLP, Policy.save("up"))().init(jax.random.key(0), jnp.ones((2, 4)))["params"].keys()
    dict_keys(['Dense_0', 'Dense_1'])
    """
    expect_policy(policy)
    if policy.is_identity:
        return block
    names = static_argnames if isinstance(static_argnames, str) else tuple(static_argnames)
    nums = static_argnums if isinstance(static_argnums, int) else tuple(static_argnums)
    cached: Any = _class
    return cached(block, method, policy, strict, names, nums, prevent_cse)


@functools.lru_cache(maxsize=512)  # the same class again, as jax.jit, copies and pickles need it
def _class(block: Any, method: str, *options: Any) -> Any:
    made = lift_linen(_rematted(getattr(block, method), *options), block, methods=[method])
    return in_place_of(made, block, functools.partial(_class, block, method, *options))


def remat_over_module(f: Callable[..., Any], policy: Policy, **options: Any) -> Callable[..., Any]:
    """``f(module, ...)`` of a Linen module inside ``init`` or ``apply``, with remat.

    What the module reads and writes goes in and comes out.
    """
    return lift_linen(_rematted(f, policy, **options), f)


def _rematted(
    parameters_of: Callable[..., Any],
    policy: Policy,
    strict: bool,
    static_argnames: str | Sequence[str],
    static_argnums: int | Sequence[int],
    prevent_cse: bool,
) -> Callable[..., Any]:
    """A transformation for Flax to lift, of a function with the parameters of ``parameters_of``, ``self`` the first."""

    def transform(fn: Callable[..., Any]) -> Callable[..., Any]:
        def inner(scope_fn: Any, repack_fn: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            # The method's own first parameter is the module, which stands in no place here.
            places = static_places(parameters_of, (None, *args), kwargs, static_argnames, static_argnums)
            static = {place + 1 if isinstance(place, int) else place for place in places}

            def call(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
                scope = scope_fn(variables, rngs)
                return fn(scope, *args, **kwargs), repack_fn(scope)

            call = like(call, _without_self(parameters_of), "variables", "rngs")
            arguments = take_apart_at(call, (variables, rngs, *args), kwargs, static)
            # Parameters are made by a program of its own, often on a batch of one, and nothing is differentiated
            # then: a plan speaks of the values of what is.
            making = any(is_initializing(scope) for scope in jax.tree.leaves(scope_fn(variables, rngs)))
            held = replace(policy, values=(), fingerprint=None, planned_for=None) if making else policy
            return call_rematted(arguments, held, strict=strict, prevent_cse=prevent_cse)

        return inner

    return transform


def _without_self(method: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(method, None)
