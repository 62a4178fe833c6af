"""One door for all that can be rematted: Linen classes, NNX modules and classes, functions."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import flax.linen as nn
from flax import nnx

from jremat.policy.policy import Policy
from jremat.transform.linen import remat_linen
from jremat.transform.nnx import remat_nnx, remat_nnx_class

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
    prevent_cse: bool = True,
) -> type[T]: ...


@overload
def remat(
    target: Callable[P, R],
    policy: Policy,
    *,
    strict: bool = True,
    static_argnames: str | Sequence[str] = (),
    prevent_cse: bool = True,
) -> Callable[P, R]: ...


def remat(
    target: Any,
    policy: Policy,
    *,
    strict: bool = True,
    static_argnames: str | Sequence[str] = (),
    prevent_cse: bool = True,
) -> Any:
    """``target``, whose gradient keeps just the values that ``policy`` keeps and recomputes the others.

    Args:
        target: a Linen module class; an NNX module class or module; or a function of arrays, NNX modules among its
            arguments or not.
        policy: of one block, e.g. ``policies.get("dots_saveable")``.
        strict: a selector that matches nothing raises; if False, it warns.
        static_argnames: parameters to hold fixed, e.g. ``"deterministic"``.
        prevent_cse: as of ``jax.checkpoint``; False is right inside a scan alone.

    Returns:
        A class for a class, a function for a function or a module; the target itself is left as it is.

    Raises:
        ValueError: ``target`` is none of these; ``policy`` is a plan over layers.

    >>> import jax.numpy as jnp
    >>> from jremat.policy import Policy
    >>> remat(jnp.sin, Policy())(0.0).item()
    0.0
    """
    options: dict[str, Any] = {"strict": strict, "static_argnames": static_argnames, "prevent_cse": prevent_cse}
    if inspect.isclass(target):
        if issubclass(target, nn.Module):
            return remat_linen(target, policy, **options)
        if issubclass(target, nnx.Module):
            return remat_nnx_class(target, policy, **options)
    elif inspect.ismethod(target) and isinstance(target.__self__, nnx.Module):
        return functools.partial(remat_nnx(target.__func__, policy, **options), target.__self__)
    elif isinstance(target, nnx.Module):
        return functools.partial(remat_nnx(type(target).__call__, policy, **options), target)
    elif isinstance(target, nn.Module):
        raise ValueError(
            f"target: expected the Linen class {type(target).__name__}, got a module of it; "
            f"use jremat.remat({type(target).__name__}, policy)(...)"
        )
    elif callable(target):
        return remat_nnx(target, policy, **options)
    raise ValueError(f"target: expected a Linen or NNX module class, an NNX module or a function, got {target!r}")
