"""``...buffer-assignment.txt``, which XLA writes under ``--xla_dump_to``.

The file gives each allocation's values with size and offset, and neither lives nor metadata: of the temporaries the
largest that do not overlap are listed, and their operations are read from the program's text beside it.
Source: xla/service/buffer_assignment.cc, ``BufferAllocation::ToString``.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from jremat.measure.buffers import Buffer
from jremat.oom.dump import Dump, array_of
from jremat.oom.error_text import quoted, source_of

MARK = "BufferAssignment:"
"""The file's first line."""
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*)$")
_VALUE = re.compile(r"^ *value: <\d+ (\S+)[^>]*> \(size=(\d+),offset=(\d+)\): (.*)$")


def read_assignment(lines: Iterable[str], metadata: Mapping[str, str] = {}) -> Dump:
    """What the file allocates.

    Args:
        lines: of the file.
        metadata: instruction -> XLA's metadata of it, by ``metadata_of``.

    >>> dump = read_assignment(["BufferAssignment:", "allocation 0: size 16, parameter 0, shape |f32[4]| at {}:",
    ...     " value: <1 x @0> (size=16,offset=0): f32[4]{0}"])
    >>> dump.argument_bytes, dump.buffers[0].kind, dump.buffers[0].shape
    (16, 'argument', (4,))
    """
    totals = {"argument": 0, "output": 0, "temp": 0, "constant": 0}
    alias, kind, buffers = 0, "", list[Buffer]()
    values: list[tuple[int, int, str, str]] = []  # size, offset, instruction, shape
    for line in [*lines, "allocation 0: size 0, end"]:
        if match := _ALLOCATION.match(line):
            buffers += [_buffer(kind, *value, metadata) for value in _side_by_side(values)]
            kind, values = _kind(match[2]), []
            if kind:
                totals[kind] += int(match[1])
            if kind == "argument" and "live-out" in match[2]:
                alias += int(match[1])
        elif kind and (match := _VALUE.match(line)):
            values.append((int(match[2]), int(match[3]), match[1], match[4]))
    return Dump(
        "XLA's buffer assignment",
        tuple(sorted(buffers, key=lambda buffer: -buffer.nbytes)),
        argument_bytes=totals["argument"],
        output_bytes=totals["output"] + alias,
        temp_bytes=totals["temp"] + totals["constant"],
        alias_bytes=alias,
    )


def _kind(rest: str) -> str:
    if ", parameter " in rest:
        return "argument"
    if "thread-local" in rest:
        return ""
    if "live-out" in rest:
        return "output"
    return "constant" if "constant" in rest else "temp"


def _side_by_side(values: list[tuple[int, int, str, str]]) -> list[tuple[int, int, str, str]]:
    """The largest values first, each that overlaps no larger one."""
    found: list[tuple[int, int, str, str]] = []
    for value in sorted(values, key=lambda v: (-v[0], v[1])):
        size, offset = value[:2]
        if size and all(offset >= o + s or o >= offset + size for s, o, *_ in found):
            found.append(value)
        if len(found) == 200:  # enough to name what is large, and the search stays linear
            break
    return found


def _buffer(kind: str, size: int, offset: int, name: str, shape: str, metadata: Mapping[str, str]) -> Buffer:
    instruction = name.partition("{")[0]
    dtype, dims = array_of(shape)
    known = metadata.get(instruction, "")
    return Buffer(size, kind, dtype, dims, quoted(known, "op_name"), source_of(known), None, instruction)


def metadata_of(program: Path) -> dict[str, str]:
    """Instruction -> metadata, of the text of a compiled program, ``...after_optimizations.txt``.

    A fusion that has none has that of the last instruction that it fuses.
    """
    found: dict[str, str] = {}
    last: dict[str, str] = {}  # computation -> the metadata that its last instruction has
    fused: dict[str, str] = {}  # instruction -> the computation that it calls
    computation = ""
    with program.open(errors="replace") as lines:
        for line in lines:
            if line.endswith("{\n") and (match := re.match(r"^(?:ENTRY )?%?([\w.-]+) ", line)):
                computation = match[1]
            elif match := re.match(r"^ +(?:ROOT )?%?([\w.-]+) = ", line):
                if metadata := re.search(r"\bmetadata=\{([^}]*op_name=[^}]*)\}", line):
                    found[match[1]] = last[computation] = metadata[1]
                elif called := re.search(r"\bcalls=%?([\w.-]+)", line):
                    fused[match[1]] = called[1]
    for instruction, called_name in fused.items():
        if called_name in last:
            found[instruction] = last[called_name]
    return found
