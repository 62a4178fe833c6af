"""Selectors of a policy by place: the module that makes a value, or the line.

A value's *path* is JAX's name stack where it is made, in which Flax writes the modules: ``layers_0/attn/q_proj``. Its
*source* is the user's line, ``modeling.py:41``. Neither needs a tag, so both work on a model of somebody else.
"""

import difflib
import fnmatch
import re
from collections.abc import Iterable, Sequence

from jremat.policy.messages import near
from jremat.policy.names import identifier


def is_place(selector: str) -> bool:
    """Whether a selector is a path (it has a ``*``) or a line (it has a ``:``); else it is a tag.

    >>> is_place("*/attn/*"), is_place("modeling.py:41"), is_place("encoder/out")
    (True, True, False)
    """
    return "*" in selector or ":" in selector


def checked_selector(text: str) -> str:
    """``text`` itself, if a policy spec can spell it: a tag, a path with ``*``, or ``file.py:line``.

    Raises:
        ValueError: it is none of these.

    >>> checked_selector("*/attn/*"), checked_selector("modeling.py:41")
    ('*/attn/*', 'modeling.py:41')
    >>> checked_selector("modeling.py:")
    Traceback (most recent call last):
    ...
    ValueError: place: expected file.py:line or a path such as */attn/*, got 'modeling.py:'
    """
    if not isinstance(text, str) or not is_place(text):
        return identifier(text)
    file, colon, line = text.rpartition(":")
    if colon and not (file and re.fullmatch(r"[0-9*]{1,18}", line)):
        raise ValueError(f"place: expected file.py:line or a path such as */attn/*, got {text!r}")
    literal = re.sub(r"[*:<>]", "", text)
    if not literal.strip("/"):
        raise ValueError(f"place: expected a path with names, such as */attn/*, got {text!r}, which is every value")
    identifier(literal)
    return text


def matches(place: str, path: str, source: str) -> bool:
    """Whether a value that is made in ``path`` at ``source`` is one that ``place`` selects.

    ``*`` stands for any text, ``/`` included. A path is matched from the whole model, or from what that holds, to the
    module that makes the value: ``encoder/*`` is what the model's ``encoder`` makes and all inside it, ``*/attn`` what
    a module ``attn`` makes itself.

    >>> matches("*/attn/*", "layers_0/attn", ""), matches("*/attn", "layers_0/attn/q_proj", "")
    (True, False)
    >>> matches("encoder/*", "T5/encoder/mlp", ""), matches("encoder/*", "T5/decoder/encoder/mlp", "")
    (True, False)
    >>> matches("net.py:1*", "", "net.py:12 (__call__)")
    True
    """
    if ":" in place:
        return fnmatch.fnmatchcase(source.partition(" ")[0], place)
    pattern = "/" * (not place.startswith("*")) + place + "/" * (not place.endswith("*"))
    return any(fnmatch.fnmatchcase(f"/{own}/", pattern) for own in (path, path.partition("/")[2]))


def specificity(place: str) -> tuple[bool, int, str]:
    """What orders the places that match one value: a line before a path, then the one that spells more of it.

    >>> max(["*/mlp/*", "*/layers_1/mlp/*"], key=specificity)
    '*/layers_1/mlp/*'
    """
    return ":" in place, len(place.replace("*", "")), place


def numbered_alike(path: str) -> str:
    """A path with ``*`` in the place of numbers: what it shares with the same module of other layers.

    >>> numbered_alike("Net/layers_10/attn"), numbered_alike("Net/layers/3/mlp")
    ('Net/layers_*/attn', 'Net/layers/*/mlp')
    """
    return re.sub(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])", "*", path)


def nothing_there(place: str, made: Iterable[tuple[str, str]]) -> str:
    """What to say of a place where nothing is made.

    Args:
        place: that selects nothing.
        made: path and source of every value.

    >>> nothing_there("*/atn/*", [("layers_0/attn", "net.py:3 (f)"), ("layers_0/mlp", "net.py:5 (f)")])
    "'*/atn/*', where no value is made (did you mean '*/attn/*'?); paths in this function: layers_*/attn, layers_*/mlp"
    """
    pairs = tuple(made)
    if ":" in place:
        lines = list(dict.fromkeys(source.partition(" ")[0] for _, source in pairs if source))
        file, _, line = place.rpartition(":")
        same = [own for own in lines if own.rpartition(":")[0] == file]
        if same and line.isdigit():
            same.sort(key=lambda own: abs(int(own.rpartition(":")[2]) - int(line)))
        listed = f"lines that make values: {_few(same or lines)}"
        return f"{place!r}, where no value is made{near(place, lines) if not same else ''}; {listed}"
    paths = list(dict.fromkeys(numbered_alike(path) for path, _ in pairs if path))
    if not paths:
        return (
            f"{place!r}, where no value is made; this function has no paths: they come from Flax's modules and "
            "jax.named_scope; file.py:line selects by source"
        )
    steps = {step for path in paths for step in path.split("/")}
    guess = "/".join(_nearest(step, steps) for step in place.split("/"))
    found = guess != place and any(matches(guess, path, "") for path, _ in pairs)
    hint = f" (did you mean {guess!r}?)" if found else ""
    return f"{place!r}, where no value is made{hint}; paths in this function: {_few(paths)}"


def _nearest(step: str, steps: Iterable[str]) -> str:
    if "*" in step or not step:
        return step
    return next(iter(difflib.get_close_matches(step, list(steps), n=1)), step)


def _few(items: Sequence[str], most: int = 8) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
