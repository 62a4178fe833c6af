"""Files that a reader finds whole, the old one or the new one and never half of either; and JSON from anywhere."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from jremat.policy.messages import shown

MAX_BYTES = 1 << 28
"""Of a JSON file that is read; what is larger is none of ours."""


def read_json(path: str | Path) -> Any:
    """The content of a JSON file (RFC 8259), which anybody may have written.

    A byte order mark is passed over. NaN, Infinity and a key that stands twice in an object are refused, since readers
    don't agree on them.

    Args:
        path: of the file.

    Raises:
        ValueError: it can't be read or isn't JSON, in one line that names it.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "plan.json").write_text('{"a": 1, "a": 2}')
    ...     read_json(f"{folder}/plan.json")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: .../plan.json is not JSON: expected each key of an object once, got 'a' twice
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a name that no file can have is a ValueError
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MAX_BYTES:
        raise ValueError(f"cannot read {path}: expected at most {MAX_BYTES >> 20} MiB of JSON")
    try:
        return parse_json(raw)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def parse_json(raw: bytes) -> Any:
    """The value that ``raw`` spells, as ``read_json`` reads it.

    Raises:
        ValueError: it isn't JSON in UTF-8, or is nested too deeply to be read.
    """
    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"expected each key of an object once, got {shown(twice)} twice")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"expected a number, got {name}")


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write ``content`` beside ``path`` and rename it there.

    A file that is there keeps its mode, a link its target; what is no regular file, e.g. ``/dev/stdout``, is written to
    as it stands.

    Args:
        path: of the file, overwritten.
        content: all of it; text is written in UTF-8.

    Raises:
        OSError: it can't be written, with ``path`` for a file name; what was there still is, and nothing beside it.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(f"{folder}/figures.json", "{}")
    ...     sorted(p.name for p in Path(folder).iterdir()), Path(folder, "figures.json").read_text()
    (['figures.json'], '{}')
    """
    data = content.encode() if isinstance(content, str) else content
    beside = ""
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            Path(path).write_bytes(data)
            return
        descriptor, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(beside).chmod(_mode(target))
        Path(beside).replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        if beside:
            Path(beside).unlink(missing_ok=True)


def write_json(path: str | Path, data: Any) -> None:
    """Write ``data`` as JSON, whole or not at all.

    Raises:
        OSError: as of ``write_whole``.
        ValueError: a number that JSON has no word for, or a value that is no JSON.
    """
    write_whole(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def check_file(name: str, path: Path | None) -> None:
    """Refuse a file that can't be written, before any work; None is no file.

    Raises:
        ValueError: its folder isn't there or takes no file, or it is a folder itself.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{name}: no such folder: {folder}")
    if path.is_dir():
        raise ValueError(f"{name}: expected a file, got a folder: {path}")
    if not path.exists() or path.is_file():  # what is no regular file, e.g. /dev/stdout, is written to as it stands
        _check_takes_files(name, folder)


def check_folder(name: str, path: Path | None) -> None:
    """Refuse a folder that files can't be written in; one that isn't there is made when there is something to write.

    Raises:
        ValueError: it is a file, or below one, or takes no file.
    """
    if path is not None:
        there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
        if not there.is_dir():
            raise ValueError(f"{name}: expected a folder, got a file: {there}")
        _check_takes_files(name, there)


def _check_takes_files(name: str, folder: Path) -> None:
    try:
        probe(folder)
    except OSError as error:
        raise ValueError(f"{name}: cannot write in {folder}: {error.strerror}") from None


def probe(folder: Path) -> None:
    """Write a byte in ``folder`` and take it away again; raises OSError where that can't be done."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0")
        file.flush()


def _mode(target: Path) -> int:
    """Of the file that is there, or as ``open`` would make one."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)  # there is no other way to read it
    os.umask(mask)
    return 0o666 & ~mask
