"""Which of a call's arguments are arrays, and which are fixed: flags, strings, functions, whatever is named static."""

import difflib
import inspect
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Arguments:
    """One call's arguments, taken apart.

    Args:
        f: the function called.
        tree: of (args, kwargs).
        leaves: every leaf.
        traced: for each leaf, whether it is an array to trace; the others are fixed.
        paths: a readable path of each leaf, e.g. ``argument 0['w']``.
    """

    f: Callable[..., Any]
    tree: Any
    leaves: tuple[Any, ...]
    traced: tuple[bool, ...]
    paths: tuple[str, ...]

    @property
    def arrays(self) -> list[Any]:
        """The leaves to trace."""
        return [leaf for leaf, traced in zip(self.leaves, self.traced) if traced]

    @property
    def array_paths(self) -> tuple[str, ...]:
        """Their paths."""
        return tuple(path for path, traced in zip(self.paths, self.traced) if traced)

    def call(self, *arrays: Any) -> Any:
        """``f`` of the arrays given, the fixed leaves in their places."""
        given = iter(arrays)
        leaves = [next(given) if traced else leaf for leaf, traced in zip(self.leaves, self.traced)]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return self.f(*args, **kwargs)


def take_apart(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], static_argnames: str | Sequence[str] = ()
) -> Arguments:
    """The arguments of ``f(*args, **kwargs)``, arrays apart from the rest.

    Arrays are what has a shape and a dtype, and numbers; everything else, and what ``static_argnames`` names, is fixed.

    Raises:
        ValueError: a name in ``static_argnames`` is no parameter of ``f``.

    >>> call = take_apart(lambda x, mode, n: x * n, (1.0, "fast"), {"n": 2}, static_argnames=["n"])
    >>> call.arrays, call.call(3.0)
    ([1.0], 6.0)
    """
    return take_apart_at(f, args, kwargs, static_places(f, args, static_argnames))


def take_apart_at(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], static: Collection[int | str]
) -> Arguments:
    """As ``take_apart``, what is fixed given by place: positions and keywords.

    Raises:
        ValueError: ``f`` is no function.
    """
    if not callable(f):
        raise ValueError(f"f: expected a function, got {f!r}")
    with_paths, tree = jax.tree_util.tree_flatten_with_path((tuple(args), dict(kwargs)))
    leaves, traced, paths = [], [], []
    for (_, place, *rest), leaf in with_paths:
        key = place.idx if hasattr(place, "idx") else place.key
        leaves.append(leaf)
        traced.append(key not in static and is_array(leaf))
        paths.append(f"argument {key}{jax.tree_util.keystr(tuple(rest))}")
    return Arguments(f, tree, tuple(leaves), tuple(traced), tuple(paths))


def is_array(leaf: Any) -> bool:
    """Whether JAX can trace it: an array, a shape, a number.

    >>> is_array(1.5), is_array("mean")
    (True, False)
    """
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or isinstance(leaf, numbers.Number)


def static_places(f: Callable[..., Any], args: Sequence[Any], names: str | Sequence[str]) -> set[int | str]:
    """The positions and keywords that ``names`` fix in a call of ``f`` with ``args``.

    Raises:
        ValueError: ``f`` has no such parameter, or none that Python knows.
    """
    names = (names,) if isinstance(names, str) else tuple(names)
    if not names:
        return set()
    try:
        parameters = inspect.signature(f).parameters
    except ValueError as error:
        raise ValueError(f"static_argnames: expected a function whose parameters Python knows, got {f!r}") from error
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in names:
        if name not in parameters and not takes_any:
            near = difflib.get_close_matches(str(name), parameters, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"static_argnames: expected parameters of {getattr(f, '__name__', f)!s} "
                f"({', '.join(parameters)}), got {name!r}{hint}"
            )
    by_position = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    places = [k for k, name in enumerate(by_position) if name in names and k < len(args)]
    return {*names, *places}
