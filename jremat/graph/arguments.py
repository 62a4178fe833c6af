"""Which of a call's arguments are arrays, and which are fixed: flags, strings, functions, whatever is named static."""

import contextlib
import difflib
import functools
import inspect
import numbers
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, SequenceKey

from jremat.graph.nnx_modules import named_modules


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
        """``f`` of the arrays given, the fixed leaves in their places; its result as ``held``."""
        given = iter(arrays)
        leaves = [next(given) if traced else leaf for leaf, traced in zip(self.leaves, self.traced)]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        with named_modules((args, kwargs)):
            out = self.f(*args, **kwargs)
        return held(out)

    def result(self, tree: Any, outs: Sequence[Any]) -> Any:
        """What ``f`` returns, of the arrays and the structure that tracing it gave."""
        packed = jax.tree.unflatten(tree, outs)
        return packed if all(self.traced) else released(packed)

    def to_trace(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to trace with, argument by argument: one that holds fixed leaves becomes the list of its arrays."""
        args, kwargs = jax.tree.unflatten(self.tree, self.leaves)
        flags = iter(self.traced)

        def arrays_of(argument: Any) -> Any:
            leaves = jax.tree.leaves(argument)
            traced = [next(flags) for _ in leaves]
            return argument if all(traced) else [leaf for leaf, array in zip(leaves, traced) if array]

        return tuple(map(arrays_of, args)), {key: arrays_of(kwargs[key]) for key in sorted(kwargs)}

    def over_arrays(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run(*arrays)`` as a function of what ``to_trace`` returns.

        It has the parameters of ``f``, which JAX's messages name.
        """

        def traced(*args: Any, **kwargs: Any) -> Any:
            return run(*jax.tree.leaves((args, kwargs)))

        return like(traced, self.f)

    @contextlib.contextmanager
    def naming_parameters(self) -> Iterator[None]:
        """Inside, ``f`` is traced by ``over_arrays`` or as it is.

        Raises:
            ValueError: ``f`` reads the value of an argument in Python, where it must be fixed; in place of JAX's error.
        """
        try:
            yield
        except (TypeError, IndexError) as error:  # as all of JAX's of this kind are; the latter names no argument
            found = _DEPENDS.search(str(error))
            read = [re.split(r"[\[.]", name)[0] for name in re.split(r",? and |, ", found[1])] if found else []
            if isinstance(error, IndexError) and "Tracer" in str(error):
                read = self._numbers()
            names = [name for name in dict.fromkeys(read) if name in (_parameters(self.f) or {})]
            if not names:
                raise
            cure = f"static_argnames={names[0] if len(names) == 1 else tuple(names)!r}"
            reader = getattr(self.f, "__name__", self.f)
            raise ValueError(
                f"{', '.join(names)}: {reader!s} reads the value in Python, where a traced array has none; hold it "
                f"fixed, by {cure} (or static_argnums) where that is taken, in a jax.jit around it too, or by "
                f"functools.partial({reader!s}, {names[0]}=...): {str(error).splitlines()[0]}"
            ) from error

    def _numbers(self) -> list[str]:
        """Parameters that are given Python's numbers, traced."""
        by_position = list(_parameters(self.f) or ())
        given = [
            path.removeprefix("argument ") for path, leaf in zip(self.array_paths, self.arrays) if isinstance(leaf, int)
        ]
        return [by_position[int(name)] if name.isdigit() and int(name) < len(by_position) else name for name in given]


# How JAX's errors say which arguments a value comes from.
_DEPENDS = re.compile(r"depends on the values? of the arguments? (.+?)\.(?:\s|$)", re.DOTALL)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def like(call: Callable[..., Any], f: Callable[..., Any], *more: str) -> Callable[..., Any]:
    """``call`` with the name and the parameters of ``f``, after ``more`` of its own, as far as Python knows them."""
    plain = f.func if isinstance(f, functools.partial) else f
    name = getattr(plain, "__name__", type(plain).__name__)
    call.__name__, call.__qualname__ = name, getattr(f, "__qualname__", name)
    parameters = _parameters(f)
    if parameters is not None:
        own = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in more]
        rest = [p.replace(default=p.empty) if own and p.kind in _POSITIONAL else p for p in parameters.values()]
        call.__signature__ = inspect.Signature([*own, *rest], __validate_parameters__=False)  # type: ignore[attr-defined]
    return call


def _parameters(f: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(f).parameters
    except (TypeError, ValueError):  # some of C's have none that Python knows
        return None


def take_apart(
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
) -> Arguments:
    """The arguments of ``f(*args, **kwargs)``, arrays apart from the rest.

    Arrays are what has a shape and a dtype JAX knows, and numbers that are given as they are or in a list, tuple or
    dict. Everything else is fixed: booleans, strings, functions, the numbers among a module's attributes (a rate of an
    Equinox layer), and what ``static_argnames`` and ``static_argnums`` name.

    Raises:
        ValueError: ``static_argnames`` or ``static_argnums`` names no parameter of ``f``.

    >>> call = take_apart(lambda x, mode, n: x * n, (1.0, "fast"), {"n": 2}, static_argnames=["n"])
    >>> call.arrays, call.call(3.0)
    ([1.0], 6.0)
    """
    return take_apart_at(f, args, kwargs, static_places(f, args, kwargs, static_argnames, static_argnums))


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
        traced.append(key not in static and _is_traced(rest, leaf))
        paths.append(f"argument {key}{jax.tree_util.keystr(tuple(rest))}")
    return Arguments(f, tree, tuple(leaves), tuple(traced), tuple(paths))


def is_array(leaf: Any) -> bool:
    """Whether JAX can trace it: an array, a shape, a number.

    >>> is_array(1.5), is_array("mean"), is_array(np.float32), is_array(np.array(["a"]))
    (True, False, False, False)
    """
    if isinstance(leaf, type):  # NumPy's scalar types have a shape and a dtype, too
        return False
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype in (np.bool_, jax.dtypes.float0) or jax.dtypes.issubdtype(leaf.dtype, np.number)
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or isinstance(leaf, numbers.Number)


def _is_traced(path: Sequence[Any], leaf: Any) -> bool:
    if isinstance(leaf, bool | np.bool_):  # a flag: nothing is differentiated by it
        return False
    if isinstance(leaf, numbers.Number):
        return all(isinstance(key, SequenceKey | DictKey) for key in path)  # else a module's attribute
    return is_array(leaf)


def _is_flag(path: Sequence[Any], leaf: Any) -> bool:
    """Whether it is a boolean that no module has."""
    return isinstance(leaf, bool | np.bool_) and all(isinstance(key, SequenceKey | DictKey) for key in path)


def array_leaves(tree: Any) -> list[bool]:
    """For each leaf of a pytree, whether it is an array to trace; see ``take_apart``.

    >>> array_leaves({"w": np.ones(2), "rate": 0.5, "act": np.tanh, "on": True})
    [False, False, True, True]
    """
    return [_is_traced(path, leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def map_arrays(change: Callable[[Any], Any], tree: Any) -> Any:
    """A pytree with its arrays changed; what is no array stays as it is."""
    leaves, structure = jax.tree.flatten(tree)
    new = [change(leaf) if array else leaf for leaf, array in zip(leaves, array_leaves(tree))]
    return jax.tree.unflatten(structure, new)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class _Fixed:
    """In place of a leaf that is no array: part of a pytree's structure, which JAX compares and hashes."""

    leaf: Any

    def tree_flatten(self) -> tuple[tuple[()], "_Fixed"]:
        return (), self

    @classmethod
    def tree_unflatten(cls, own: "_Fixed", _: Any) -> "_Fixed":
        return own

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Fixed):
            return NotImplemented
        if self.leaf is other.leaf:
            return True
        return type(self.leaf) is type(other.leaf) and _hash(self.leaf) is not None and bool(self.leaf == other.leaf)

    def __hash__(self) -> int:
        return _hash(self.leaf) or id(self.leaf)


def _hash(leaf: Any) -> int | None:
    try:
        return hash(leaf)
    except TypeError:
        return None


def held(tree: Any, *, flags: bool = False) -> Any:
    """A pytree whose leaves are arrays alone: what is no array becomes part of its structure.

    Args:
        tree: a result or a carry, of which numbers and booleans are arrays unless a module has them.
        flags: whether all booleans are fixed, as in arguments.

    >>> tree = held({"w": 2.0, "act": abs, "on": True})
    >>> jax.tree.leaves(tree), released(tree)["act"]
    ([True, 2.0], <built-in function abs>)
    """
    with_paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    arrays = [_is_traced(path, leaf) or (not flags and _is_flag(path, leaf)) for path, leaf in with_paths]
    if all(arrays):
        return tree
    return jax.tree.unflatten(structure, [x if array else _Fixed(x) for array, (_, x) in zip(arrays, with_paths)])


def released(tree: Any) -> Any:
    """What ``held`` was given."""
    is_fixed = lambda node: isinstance(node, _Fixed)
    return jax.tree.map(lambda node: node.leaf if is_fixed(node) else node, tree, is_leaf=is_fixed)


def arrays_alone(block: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A block of held pytrees, and its arguments as such; both as they are where there is nothing to hold.

    Args:
        block: ``block(layer_parameters, carry, *shared)``.
        args: its arguments.

    >>> block, args = arrays_alone(lambda layer, x: layer["act"](x * layer["w"]), ({"w": 2.0, "act": abs}, -1.0))
    >>> block(*args), jax.tree.leaves(args)
    (2.0, [2.0, -1.0])
    """
    given = arrays_of_block(args)
    return block if given is args else of_held(block), given


def arrays_of_block(args: Sequence[Any]) -> tuple[Any, ...]:
    """A block's arguments, held; ``args`` itself where there is nothing to hold."""
    given = tuple(held(arg, flags=place != 1) for place, arg in enumerate(args))
    return args if isinstance(args, tuple) and all(map(operator.is_, given, args)) else given


def of_held(block: Callable[..., Any]) -> Callable[..., Any]:
    """``block`` as a function of held pytrees to a held one."""
    return like(lambda *args: held(block(*map(released, args))), block)


def static_places(
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    names: str | Sequence[str] = (),
    nums: int | Sequence[int] = (),
) -> set[int | str]:
    """The positions and keywords that ``static_argnames`` and ``static_argnums`` fix in a call of ``f``.

    The name of ``*args`` or ``**kwargs`` stands for all that is passed there.

    Raises:
        ValueError: ``f`` has no such parameter, or none that Python knows.
    """
    names = (names,) if isinstance(names, str) else tuple(names)
    numbers_given = (nums,) if isinstance(nums, int | np.integer) else tuple(nums)
    if not names and not numbers_given:
        return set()
    parameters = _parameters(f)
    if names and parameters is None:
        raise ValueError(
            f"static_argnames: expected a function whose parameters Python knows, got {f!r}; static_argnums takes "
            "positions"
        )
    by_position = [p.name for p in (parameters or {}).values() if p.kind in _POSITIONAL]
    found: set[int | str] = set()
    for number in numbers_given:
        place = _place(f, number, by_position if parameters is not None else None, parameters, len(args))
        found |= {place, *by_position[place : place + 1]}
    for name in names:
        assert parameters is not None, "checked above"
        kind = parameters[name].kind if name in parameters else None
        if kind is inspect.Parameter.VAR_POSITIONAL:
            found |= set(range(len(by_position), len(args)))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            found |= set(kwargs) - set(parameters)
        elif kind is None:
            found.add(_unlisted(f, name, parameters, kwargs))
        else:
            found |= {name, *(k for k, own in enumerate(by_position) if own == name)}
    return found


def _place(f: Any, number: Any, by_position: list[str] | None, parameters: Any, num_args: int) -> int:
    """A position of ``static_argnums``, counted from the front."""
    open_ended = by_position is None or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    most = max(num_args, len(by_position or ())) if open_ended else len(by_position or ())
    if isinstance(number, int | np.integer) and not isinstance(number, bool) and -most <= number < most:
        return int(number) % most
    listed = f" ({', '.join(f'{k}: {name}' for k, name in enumerate(by_position))})" if by_position else ""
    raise ValueError(
        f"static_argnums: expected positions of the {most} parameters of {getattr(f, '__name__', f)!s}{listed}, "
        f"got {number!r}"
    )


def _unlisted(f: Any, name: Any, parameters: Mapping[str, Any], kwargs: Mapping[str, Any]) -> str:
    """A name that is no parameter: a keyword for ``**kwargs``, or a mistake."""
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    near = difflib.get_close_matches(str(name), [*parameters, *kwargs], n=1, cutoff=0.8 if takes_any else 0.6)
    if name in kwargs or (takes_any and not near):
        return str(name)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"static_argnames: expected parameters of {getattr(f, '__name__', f)!s} "
        f"({', '.join(parameters)}), got {name!r}{hint}"
    )
