"""Remat of a Flax Linen module class, held to its word."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import flax.linen as nn
import jax
from flax.core import lift
from flax.linen.transforms import lift_transform

from jremat.graph.arguments import static_places, take_apart_at
from jremat.policy.policy import Policy
from jremat.transform.checkpoint import call_rematted, expect_policy

Block = TypeVar("Block", bound=type[nn.Module])


def remat_linen(
    block: Block,
    policy: Policy,
    *,
    strict: bool = True,
    static_argnames: str | Sequence[str] = (),
    prevent_cse: bool = True,
    method: str = "__call__",
) -> Block:
    """A Linen class like ``block``, whose gradient keeps just the values that ``policy`` keeps.

    Collections that the block writes (batch statistics, sown values) are written once; dropout's keys are inputs, so
    that its masks are the same when made again.

    Args:
        block: a Linen module class; it is left as it is.
        policy: of one block.
        strict: a selector that matches nothing raises; if False, it warns.
        static_argnames: parameters of ``method`` to hold fixed.
        prevent_cse: as of ``jax.checkpoint``; False is right inside ``nn.scan`` alone.
        method: the method to remat.

    Returns:
        A new class with the same parameters under the same names.

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
    parameters_of = getattr(block, method)

    def lifted(fn: Callable[..., Any]) -> Callable[..., Any]:
        def inner(scope_fn: Any, repack_fn: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            # The method's own first parameter is the module, which stands in no place here.
            places = static_places(parameters_of, (None, *args), static_argnames)
            static = {place + 1 if isinstance(place, int) else place for place in places}

            def call(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
                scope = scope_fn(variables, rngs)
                return fn(scope, *args, **kwargs), repack_fn(scope)

            arguments = take_apart_at(call, (variables, rngs, *args), kwargs, static)
            # Parameters are often made on a batch of one: a plan is held to the shapes of what is differentiated.
            making = any(scope.get_flag("initializing", False) for scope in jax.tree.leaves(scope_fn(variables, rngs)))
            held = replace(policy, made_for=None) if making else policy
            return call_rematted(arguments, held, strict=strict, prevent_cse=prevent_cse)

        return lift.pack(inner, (True,), (True,), (True,), name="remat", enable_kwargs=True)

    lifted.__name__ = "checkpoint"  # Flax names submodules after it: as under nn.remat, so that parameters interchange
    return lift_transform(lifted, block, methods=[method])
