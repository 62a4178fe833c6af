"""Which form a report has, and its reader."""

import gzip
import io
import zlib
from pathlib import Path

from jremat.measure.buffers import largest_at_peak
from jremat.measure.hlo_schedule import HloSchedule
from jremat.oom import assignment_text, error_text
from jremat.oom.dump import Dump
from jremat.oom.profiles import read_device_profile, read_memory_viewer

READABLE = (
    "a log with XLA's RESOURCE_EXHAUSTED error, *buffer-assignment.txt or *.hlo.pb of --xla_dump_to (or that folder), "
    "a device memory profile of JAX, the JSON of XProf's memory viewer"
)
_MOST_BYTES = 4 << 30


def read_dump(path: Path | str) -> Dump:
    """What a report of memory says.

    Args:
        path: of the report, or of the folder that XLA dumped to, where the largest program is taken.

    Raises:
        ValueError: no such file, none of the forms that are read, or one that is damaged.
    """
    path = Path(path)
    if path.is_dir():
        path = _main_program(path)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"dump: {path.name} has over 4 GiB")
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"dump: {path}: {error.strerror or error}") from error
    beside = Path(str(path).replace("-buffer-assignment.txt", ".txt"))
    metadata = assignment_text.metadata_of(beside) if beside != path and beside.is_file() else {}
    return read_bytes(data, metadata)


def _main_program(folder: Path) -> Path:
    """The largest program that XLA dumped."""
    for pattern in ("*after_optimizations.hlo.pb", "*buffer-assignment.txt"):
        if found := sorted(folder.glob(pattern), key=lambda file: file.stat().st_size):
            return found[-1]
    raise ValueError(f"dump: no *after_optimizations.hlo.pb or *buffer-assignment.txt in the folder {folder}")


def read_bytes(data: bytes, metadata: dict[str, str] | None = None) -> Dump:
    """What a report of memory says.

    Args:
        data: of the file.
        metadata: instruction -> XLA's metadata, for a buffer assignment in text.

    Raises:
        ValueError: none of the forms that are read, or one that is damaged.

    >>> read_bytes(b"hello")
    Traceback (most recent call last):
    ...
    ValueError: dump: expected a log with XLA's RESOURCE_EXHAUSTED error, *buffer-assignment.txt or *.hlo.pb of --xla_dump_to (or that folder), a device memory profile of JAX, the JSON of XProf's memory viewer; got 5 bytes that are none of these
    """  # noqa: E501
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"dump: expected a whole gzipped file, got a damaged one: {error}") from error
        return read_device_profile(data)
    binary = b"\0" in data[:4096]
    if not binary and assignment_text.MARK.encode() in data[:4096] and b"\nallocation " in data:
        return assignment_text.read_assignment(io.StringIO(data.decode(errors="replace")), metadata or {})
    if not binary and data[:256].lstrip()[:1] in (b"{", b"["):
        return read_memory_viewer(data.decode(errors="replace"))
    if any(mark.encode() in data for mark in error_text.MARKS):
        return error_text.read_error(data.decode(errors="replace"))
    return _program(data)


def _program(data: bytes) -> Dump:
    none = f"dump: expected {READABLE}; got {len(data):,} bytes that are none of these"
    try:
        schedule = HloSchedule(data)
        if not schedule.computations:
            raise ValueError(none)
    except ValueError as error:
        raise ValueError(none) from error
    try:
        buffers = largest_at_peak(schedule, {}, 200)
        temp = schedule.alive_at_peak()[0]
    except (LookupError, ValueError, StopIteration, RecursionError) as error:  # ids that name nothing
        raise ValueError("dump: expected a whole HloProto of XLA, got a damaged one") from error
    total = lambda kind: sum(buffer.nbytes for buffer in buffers if buffer.kind == kind)
    return Dump(
        "XLA's compiled program",
        buffers,
        argument_bytes=total("argument"),
        output_bytes=total("output"),
        temp_bytes=temp,
    )
