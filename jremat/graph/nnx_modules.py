"""The modules inside a Flax NNX module, and their names on JAX's name stack, where Linen writes its own."""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import jax

_SCOPE = "_jremat_scope"


def submodules(module: Any) -> Iterator[tuple[str, Any]]:
    """Every NNX module inside one, itself first, with its path: attributes, keys and places in lists.

    A module that stands in several places is found once.

    >>> from flax import nnx
    >>> [path for path, _ in submodules(nnx.Sequential(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), jax.nn.relu))]
    ['', 'layers', 'layers/0']
    """
    yield from _submodules("", module, set())


def _submodules(path: str, node: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(node) in seen:
        return
    seen.add(id(node))
    if is_module(node):
        yield path, node
        inside = {name: child for name, child in vars(node).items() if not name.startswith("_")}
    elif isinstance(node, dict):
        inside = node
    elif isinstance(node, list | tuple):
        inside = dict(enumerate(node))
    else:
        return
    for name, child in inside.items():
        yield from _submodules(f"{path}/{name}" if path else str(name), child, seen)


def is_module(node: Any) -> bool:
    """Whether a value is an NNX module; Flax isn't loaded to find out."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Module)


def has_modules(tree: Any) -> bool:
    """Whether a pytree holds an NNX module."""
    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


@contextlib.contextmanager
def named_modules(tree: Any) -> Iterator[None]:
    """Inside, each call of an NNX module in a pytree runs under ``jax.named_scope`` with its name.

    The modules must be the caller's own, as those that a trace unflattens: their classes are changed meanwhile.
    """
    changed: list[tuple[Any, type]] = []
    try:
        for root in filter(is_module, jax.tree.leaves(tree, is_leaf=is_module)):
            called: list[str] = []  # paths of the modules that are called, outer ones first
            for path, node in submodules(root):
                block: Any = type(node)
                if callable(node) and not hasattr(block, _SCOPE):
                    around = next((outer for outer in reversed(called) if path.startswith(outer)), "")
                    called.append(f"{path}/" if path else "")
                    name = path.removeprefix(around) or block.__name__
                    object.__setattr__(node, "__class__", _in_scope(block, name))
                    changed.append((node, block))
        yield
    finally:
        for node, block in changed:
            object.__setattr__(node, "__class__", block)


@functools.lru_cache(maxsize=4096)
def _in_scope(block: Any, name: str) -> type:
    """A subclass whose call runs under a name scope."""

    @functools.wraps(block.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(name):
            return block.__call__(self, *args, **kwargs)

    made = type(block)(block.__name__, (block,), {"__call__": call, "__module__": block.__module__})
    made.__qualname__ = block.__qualname__
    setattr(made, _SCOPE, name)
    return made
