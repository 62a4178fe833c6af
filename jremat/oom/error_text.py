"""Out-of-memory errors of XLA for GPUs and TPUs, and the report of the GPU allocator, as they stand in a log.

Sources: xla/service/buffer_assignment.cc (``StatsString``, ``Buffer N:``) and xla/tsl/framework/bfc_allocator.cc
(``DumpMemoryLog``); the TPU compiler's text is described in OpenXLA's documentation of error code 1000.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from jremat.measure.buffers import Buffer
from jremat.oom.dump import SIZE, Dump, array_of, size_bytes

MARKS = (
    "RESOURCE_EXHAUSTED",
    "Ran out of memory in memory space",
    "ran out of memory trying to allocate",
    "Peak buffers:",
)
"""One of these is in every such text."""

_STATS = {
    "argument_bytes": rf"parameter allocation:\s+{SIZE}",
    "output_bytes": rf"maybe_live_out allocation:\s+{SIZE}|Output size {SIZE}",
    "temp_bytes": rf"preallocated temp allocation:\s+{SIZE}|HLO temp\s+{SIZE}",
    "alias_bytes": rf"shares {SIZE} with arguments",
    "fragmentation_bytes": rf"preallocated temp fragmentation:\s+{SIZE}|fragmentation \({SIZE}\)",
    "requested_bytes": rf"(?i:trying|failed) to allocate(?: request for)? {SIZE}|Used {SIZE} of",
    "in_use_bytes": r"InUse:\s+(\d+)()",
    "limit_bytes": rf"Limit:\s+(\d+)()|Used [\d.]+[KMGT]? of {SIZE} (?:hbm|HBM)",
}


def read_error(text: str) -> Dump:
    """The error, and the largest buffers that it lists.

    >>> found = read_error("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.0GiB.")
    >>> found.requested_bytes == 2 * 2**30, found.buffers
    (True, ())
    """
    figures = {}
    for name, pattern in _STATS.items():
        if match := re.search(pattern, text):
            number, unit = [group for group in match.groups() if group is not None][:2]
            figures[name] = size_bytes(number, unit)
    if not figures.get("argument_bytes") and (match := re.search(rf"^\W*arguments\s+{SIZE}", text, re.M)):
        figures["argument_bytes"] = size_bytes(match[1], match[2])
    padding = re.findall(rf"Extra memory due to padding: {SIZE}", text)
    if padding:
        figures["padding_bytes"] = sum(size_bytes(*match) for match in padding)
    buffers = sorted(_listed(text), key=lambda buffer: -buffer.nbytes)
    tpu = "memory space" in text
    return Dump(f"XLA's out-of-memory error for a {'TPU' if tpu else 'GPU'}", tuple(buffers), **figures)


_SIZE_LINE = re.compile(rf"(?<![\w ])\s*(?:\d+\. )?Size: {SIZE}\s*$")
_FIELD = re.compile(r"\b(Operator|XLA [Ll]abel|Shape|Entry Parameter Subshape|Allocation type): ?(.*)$")


def _listed(text: str) -> Iterator[Buffer]:
    """The buffers of the list, each from its ``Size:`` line to the next one's."""
    nbytes, fields = 0, dict[str, str]()
    for line in text.splitlines():
        if match := _SIZE_LINE.search(line):
            if nbytes:
                yield _buffer(nbytes, fields)
            nbytes, fields = size_bytes(match[1], match[2]), {}
        elif "==========" in line:
            if nbytes:
                yield _buffer(nbytes, fields)
            nbytes = 0
        elif nbytes and (match := _FIELD.search(line)):
            fields[match[1].lower()] = match[2].strip()
    if nbytes:
        yield _buffer(nbytes, fields)


def _buffer(nbytes: int, fields: dict[str, str]) -> Buffer:
    argument = fields.get("entry parameter subshape", "")
    dtype, shape = array_of(argument or fields.get("shape", ""))
    operator = fields.get("operator", "")
    label = fields.get("xla label", "")
    kind = "argument" if argument or "argument" in fields.get("allocation type", "") else "temp"
    return Buffer(
        nbytes=nbytes,
        kind=kind,
        dtype=dtype,
        shape=shape,
        what=quoted(operator, "op_name") or quoted(label, "op_name"),
        source=source_of(operator) or source_of(label),
        tag=None,
        instruction=label.lstrip("%").partition(" ")[0],
    )


def quoted(metadata: str, name: str) -> str:
    """A field of XLA's metadata.

    >>> quoted('op_name="jit(f)/dot" source_line=3', "op_name")
    'jit(f)/dot'
    """
    match = re.search(rf'\b{name}="((?:[^"\\]|\\.)*)"?', metadata)
    return match[1] if match else ""


def source_of(metadata: str) -> str:
    """File and line in XLA's metadata, as ``model.py:12``; nothing where it has none.

    >>> source_of('source_file="/home/me/model.py" source_line=12')
    'model.py:12'
    """
    line = re.search(r"\bsource_line=(\d+)", metadata)
    file = Path(quoted(metadata, "source_file")).name
    return f"{file}:{line[1]}" if file and line else ""
