"""Modules that a function closes over: what they write while it is traced would be lost or leak."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import nnx


def has_state(leaf: Any) -> bool:
    """Whether a value is NNX's: a module, a variable, a random stream."""
    return isinstance(leaf, nnx.Pytree | nnx.Variable)


def is_bound(leaf: Any) -> bool:
    """Whether a value is a Linen module inside ``init`` or ``apply``."""
    return isinstance(leaf, nn.Module) and leaf.scope is not None


def refuse_nnx(f: Callable[..., Any]) -> None:
    """Raise where ``f`` closes over an NNX module.

    Raises:
        ValueError: it does.
    """
    if not inspect.isfunction(f):
        return
    around = inspect.getclosurevars(f)
    for name, value in {**around.globals, **around.nonlocals}.items():
        if has_state(value):
            raise ValueError(
                f"f: {f.__name__} closes over the NNX {type(value).__name__} {name!r}, whose changes would be lost; "
                "pass it as an argument"
            )


def refuse_hijax(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise where an argument is a variable that holds more than an array: reading it is an effect.

    Raises:
        ValueError: it is.
    """
    for path, leaf in zip(paths, leaves):
        if isinstance(leaf, nnx.Variable):  # others are pytrees of their arrays
            raise ValueError(
                f"f: expected NNX variables that hold arrays, got the hijax {leaf.var_type.__name__} {path}, whose "
                "reads and writes are effects that a rerun in the backward pass would repeat; make the module with "
                "hijax=False and ref=False"
            )


def refuse_linen(f: Callable[..., Any], *given: Any) -> None:
    """Raise where ``f`` would write what it traces into a Linen module: at ``init``, or where collections are mutable.

    Args:
        f: a function that closes over modules, a bound method of one, or a partial of either.
        given: its arguments, where ``f`` can't be lifted over the modules among them.

    Raises:
        ValueError: naming the module, and what to do.
    """
    found = [("an argument", leaf) for leaf in jax.tree.leaves(given)]
    for name, module in [*found, *_closed_over(f, set())]:
        if is_bound(module) and module.scope.mutable not in (False, (), []):
            own = type(module).__name__
            raise ValueError(
                f"f: {getattr(f, '__name__', type(f).__name__)} holds the Linen module {own} ({name}), into which it "
                "would write traced values; make the module the first argument of a function that jremat.remat lifts, "
                f"jremat.remat(lambda module, x: module(x), policy)(module, x), or remat the class, "
                f"jremat.remat({own}, policy)"
            )


def _closed_over(f: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Names and modules that a function closes over, through the functions that it closes over too.

    A module is bound while Flax runs it, so that no global is.
    """
    if id(f) in seen:
        return
    seen.add(id(f))
    if isinstance(f, functools.partial):
        values: dict[str, Any] = {"a partial's argument": (f.args, f.keywords), "function": f.func}
    elif inspect.ismethod(f):
        values = {"self": f.__self__, "function": f.__func__}
    elif inspect.isfunction(f):
        values = dict(inspect.getclosurevars(f).nonlocals)
    else:
        return
    for name, value in values.items():
        if inspect.isroutine(value) or isinstance(value, functools.partial):
            yield from _closed_over(value, seen)
        else:
            yield from ((name, leaf) for leaf in jax.tree.leaves(value) if isinstance(leaf, nn.Module))
