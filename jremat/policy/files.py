"""Files that a reader finds whole: the old one or the new one, never half of either."""

import os
import tempfile
from pathlib import Path


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


def _mode(target: Path) -> int:
    """Of the file that is there, or as ``open`` would make one."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)  # there is no other way to read it
    os.umask(mask)
    return 0o666 & ~mask
