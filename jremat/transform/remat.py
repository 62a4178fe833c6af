"""One door for all that can be rematted: Linen classes, NNX modules and classes, functions."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import flax.linen as nn
import jax
from flax import nnx

from jremat.jax_internals import is_pytree_class
from jremat.policy.policy import Policy
from jremat.transform.closures import is_bound, refuse_linen
from jremat.transform.linen import remat_linen, remat_over_module
from jremat.transform.nnx import remat_nnx
from jremat.transform.subclass import in_place_of, rematted_class

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


@overload
def remat(
    target: type[T],
    policy: Policy,
    *,
    strict: bool = True,
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    prevent_cse: bool = True,
) -> type[T]: ...


@overload
def remat(
    target: Callable[P, R],
    policy: Policy,
    *,
    strict: bool = True,
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    prevent_cse: bool = True,
) -> Callable[P, R]: ...


def remat(
    target: Any,
    policy: Policy,
    *,
    strict: bool = True,
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    prevent_cse: bool = True,
) -> Any:
    """``target``, whose gradient keeps just the values that ``policy`` keeps and recomputes the others.

    ``jremat.checkpoint`` is the same function, by JAX's name. The target is traced to its graph and each value gets its
    decision, so the policy holds value by value, under every JAX version and under ``jax_remat3``.

    Args:
        target: a Linen module class; an NNX module class or module; any other class of pytrees with a ``__call__``, or
            an instance of it (Equinox modules); or a function of arrays and pytrees, NNX modules among them or a Linen
            module first.
        policy: of one block, e.g. ``policies.get("dots_saveable")``.
        strict: a selector that matches nothing raises; if False, it warns.
        static_argnames: parameters to hold fixed, e.g. ``"deterministic"``; see ``jremat.checkpoint``.
        static_argnums: the same by position; of a class or a module, ``self`` is 0, as under ``nn.remat``.
        prevent_cse: as of ``jax.checkpoint``; False is right inside a scan alone.

    Returns:
        A class for a class, with its name, so that parameters are named as without remat; a function for a function or
        a module. The target itself is left as it is.

    Raises:
        ValueError: ``target`` is none of these; ``policy`` is a plan over layers; at the call, as of
            ``jremat.checkpoint``, or a function closes over a module that it would write traced values into.

    >>> import jax.numpy as jnp
    >>> from jremat.policy import Policy
    >>> remat(jnp.sin, Policy())(0.0).item()
    0.0

    Source: the selective recomputation of Chen et al. 2016, arXiv 1604.06174, section 4, decided per value.
    """
    options: dict[str, Any] = {"strict": strict, "prevent_cse": prevent_cse}
    options["static_argnames"] = static_argnames if isinstance(static_argnames, str) else tuple(static_argnames)
    options["static_argnums"] = static_argnums if isinstance(static_argnums, int) else tuple(static_argnums)
    if isinstance(target, functools.partial) and inspect.isclass(target.func):
        return functools.partial(remat(target.func, policy, **options), *target.args, **target.keywords)
    if inspect.isclass(target):
        if issubclass(target, nn.Module):
            return remat_linen(target, policy, **options)
        if is_pytree_class(target) or issubclass(target, nnx.Module):
            cached: Any = _remat_class
            return cached(target, policy, **options)
    elif isinstance(target, nn.Module):
        raise ValueError(
            f"target: expected the Linen class {type(target).__name__}, got a module of it; "
            f"use jremat.remat({type(target).__name__}, policy)(...)"
        )
    elif inspect.ismethod(target) and isinstance(target.__self__, nnx.Module):
        return functools.partial(remat_nnx(target.__func__, policy, **options), target.__self__)
    elif isinstance(target, nnx.Module):
        return functools.partial(remat_nnx(type(target).__call__, policy, **options), target)
    elif callable(target) and is_pytree_class(type(target)):
        return jax.tree_util.Partial(remat_nnx(type(target).__call__, policy, **options), target)
    elif callable(target):
        return _remat_function(target, policy, **options)
    raise ValueError(
        "target: expected a Linen or NNX module class, an NNX module, a class or an instance of pytrees that is called "
        f"(an Equinox module), or a function, got {target!r}"
    )


@functools.lru_cache(maxsize=512)  # the same class again, as jax.jit, copies and pickles need it
def _remat_class(block: Any, policy: Policy, **options: Any) -> type:
    """A class like ``block`` whose ``__call__`` is rematted; ``block`` itself where nothing is to be done."""
    call = remat_nnx(block.__call__, policy, **options)
    if call is block.__call__:
        return block
    made = rematted_class(block, call)
    return in_place_of(made, block, functools.partial(_remat_class, block, policy, **options))


def _remat_function(f: Callable[..., Any], policy: Policy, **options: Any) -> Callable[..., Any]:
    """A function like ``f`` of arrays, pytrees and NNX modules, or of a Linen module first."""
    of_arrays = remat_nnx(f, policy, **options)
    if of_arrays is f:
        return f

    @functools.wraps(f)
    def rematted(*args: Any, **kwargs: Any) -> Any:
        if args and is_bound(args[0]):
            refuse_linen(f)
            return remat_over_module(f, policy, **options)(*args, **kwargs)
        refuse_linen(f, args, kwargs)
        return of_arrays(*args, **kwargs)

    return rematted
