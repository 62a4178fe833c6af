"""A class whose one method is rematted, in the place of its base: the same name, the same pytree, the same pickle."""

from collections.abc import Callable
from typing import Any

import jax

from jremat.jax_internals import is_pytree_class


def _register_like(made: type, base: type) -> None:
    """Register a subclass as a pytree that is flattened as its base is, unless its own metaclass did."""
    if is_pytree_class(made) or not is_pytree_class(base):
        return

    def moved(x: Any, cls: type) -> Any:
        new: Any = object.__new__(cls)
        vars(new).update(vars(x))
        return new

    def flatten(x: Any) -> Any:
        plain = moved(x, base)
        children, tree = jax.tree_util.tree_flatten_with_path(plain, is_leaf=lambda leaf: leaf is not plain)
        return [(path[0], child) for path, child in children], tree

    jax.tree_util.register_pytree_with_keys(
        made, flatten, lambda tree, children: moved(jax.tree.unflatten(tree, children), made)
    )


def rematted_class(block: type, call: Callable[..., Any]) -> type:
    """A subclass of a class of pytrees (NNX, Equinox, a user's own) with ``call`` as its ``__call__``."""
    metaclass: Any = type(block)
    made: type = metaclass(block.__name__, (block,), {"__call__": call, "__module__": block.__module__})
    _register_like(made, block)
    return made


def in_place_of(made: Any, block: type, again: Callable[[], type]) -> Any:
    """``made`` under the name of ``block``.

    What is named after a class, such as Flax's submodules, then has the same name as without remat.

    Args:
        made: a subclass of ``block``.
        again: makes the same class, from a pickle.
    """
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(made, attribute, getattr(block, attribute))

    def reduce(self: Any, protocol: Any) -> Any:
        if type(self) is not made:  # a subclass of a user's, which pickle finds by its own name
            return super(made, self).__reduce_ex__(protocol)
        return _revived, (again,), vars(self)

    made.__reduce_ex__ = reduce
    return made


def _revived(again: Callable[[], type]) -> Any:
    return object.__new__(again())
