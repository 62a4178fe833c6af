"""A function that is named on the command line, and what it is called with."""

import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from jremat.command.shapes import EXAMPLE, read_arguments
from jremat.graph.arguments import is_array
from jremat.policy.messages import near

FORM = "package.module:function or path/to/file.py:function"


def function_at(place: str) -> Any:
    """What ``package.module:function`` or ``file.py:function`` names; the current folder is looked in too.

    Raises:
        ValueError: no such module, file or function, or an error while it is imported.

    >>> function_at("math:sqrt")(4)
    2.0
    """
    home, colon, path = place.rpartition(":")
    if not colon or not home or not path:
        raise ValueError(f"function: expected {FORM}, got {place!r}")
    found: Any = _module(home)
    for name in path.split("."):
        if not hasattr(found, name):
            raise ValueError(f"function: {home} has no {name!r}{near(name, dir(found), 1)}")
        found = getattr(found, name)
    return found


def _module(home: str) -> ModuleType:
    folder = str(Path(home).parent if home.endswith(".py") else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if not home.endswith(".py"):
            return importlib.import_module(home)
        if not Path(home).is_file():
            raise ValueError(f"function: no file {home}")
        spec = importlib.util.spec_from_file_location(Path(home).stem, home)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(spec.name, module)  # so that its dataclasses find it
        spec.loader.exec_module(module)
        return module
    except ValueError:
        raise
    except ModuleNotFoundError as error:
        raise ValueError(f"function: no module {error.name!r}, looked for in {Path.cwd()} and sys.path") from error
    except Exception as error:
        raise ValueError(f"function: importing {home} raised {what(error)}") from error


def what(error: BaseException) -> str:
    """An error of the user's code in one line, with the last of their lines that it went through."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and not frame.filename.startswith((_OURS, "<"))
    ]
    place = f", {Path(frames[-1].filename).name}:{frames[-1].lineno} ({frames[-1].name})" if frames else ""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}{place}"


_OURS = str(Path(__file__).parents[1])


def called(
    found: Any, place: str, texts: Sequence[str], letters: bool = False
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function to explain and its arguments.

    With ``texts`` they are the arguments of ``found``. Without, ``found`` takes none and returns ``(f, args)`` or
    ``(f, args, kwargs)``: a way to hand over modules, parameters and what no text can spell. Words and numbers among
    the arguments are held fixed.

    Args:
        found: what was named.
        place: its name, for messages.
        texts: of ``--args``.
        letters: whether sizes may be letters.

    Raises:
        ValueError: no function; arguments missing; something else returned.
    """
    if not callable(found):
        raise ValueError(f"function: expected a function at {place}, got {type(found).__name__}")
    if texts:
        args, kwargs = read_arguments(texts, letters)
        return _fixed(found, args, kwargs)
    needed = _required(found)
    if needed:
        raise ValueError(
            f"args: {place} takes {', '.join(needed)}; describe them, as {EXAMPLE}, "
            "or name a function without arguments that returns (f, args)"
        )
    try:
        made = found()
    except Exception as error:
        raise ValueError(f"function: {place}() raised {what(error)}") from error
    if isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0]):
        f, args, kwargs = (*made, {}) if len(made) == 2 else made
        if isinstance(args, tuple | list) and isinstance(kwargs, dict):
            return _fixed(f, tuple(args), kwargs)
    raise ValueError(f"function: expected {place}() to return (f, args), args a tuple, got {_brief(made)}")


def _fixed(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Words and numbers held fixed, so that flags and sizes stay Python's."""
    places = [k for k, arg in enumerate(args) if not _holds_arrays(arg)]
    words = {name: value for name, value in kwargs.items() if not _holds_arrays(value)}
    rest = {name: value for name, value in kwargs.items() if name not in words}
    if not places and not words:
        return f, args, kwargs

    @functools.wraps(f)
    def call(*arrays: Any, **named: Any) -> Any:
        supply = iter(arrays)
        return f(*(arg if k in places else next(supply) for k, arg in enumerate(args)), **words, **named)

    return call, tuple(arg for k, arg in enumerate(args) if k not in places), rest


def _holds_arrays(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return (is_array(value) and hasattr(value, "shape")) or any(_holds_arrays(item) for item in items)


def _required(f: Any) -> list[str]:
    try:
        parameters = inspect.signature(f).parameters.values()
    except (ValueError, TypeError):
        return ["arguments that Python can't list"]
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in free]


def _brief(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__
