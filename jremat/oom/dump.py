"""What a report of memory says, whichever program wrote it."""

import re
from dataclasses import dataclass

from jremat.measure.buffers import Buffer
from jremat.measure.hlo_proto import PRIMITIVE_TYPES


@dataclass(frozen=True)
class Dump:
    """Memory of one device as one report states it; None where the report says nothing of it.

    Attributes:
        form: what the report is, such as ``XLA's out-of-memory error``.
        buffers: alive at the peak, largest first; in some forms the largest alone.
        argument_bytes, output_bytes, temp_bytes: of the program that failed.
        alias_bytes: of the results that take over a donated argument's place.
        fragmentation_bytes: lost between temporaries.
        padding_bytes: of the listed buffers, what a TPU's tiles add to them.
        requested_bytes: of the allocation that failed.
        in_use_bytes: that the allocator had given out when it failed.
        limit_bytes: that the device, or its allocator, has.
    """

    form: str
    buffers: tuple[Buffer, ...] = ()
    argument_bytes: int | None = None
    output_bytes: int | None = None
    temp_bytes: int | None = None
    alias_bytes: int | None = None
    fragmentation_bytes: int | None = None
    padding_bytes: int | None = None
    requested_bytes: int | None = None
    in_use_bytes: int | None = None
    limit_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Of the program where the report has it, of the listed buffers where not."""
        parts = [n for n in (self.argument_bytes, self.output_bytes, self.temp_bytes) if n]
        return max(sum(parts) - (self.alias_bytes or 0), self.listed_bytes) if parts else self.listed_bytes

    @property
    def listed_bytes(self) -> int:
        """Of the listed buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)


_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SIZE = r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:i?B\b|bytes\b|\b)"
"""A size as XLA writes it: ``6.00MiB``, ``21.95G``, ``0B``, ``6291456 bytes``; K is 1,024 everywhere."""


def size_bytes(number: str, unit: str) -> int:
    """The bytes of a match of ``SIZE``.

    >>> size_bytes("1.5", "K"), size_bytes("6291456", "")
    (1536, 6291456)
    """
    return int(float(number) * _SIZES[unit])


_SHORT = {"pred": "bool", "s": "int", "u": "uint", "bf": "bfloat", "f": "float", "c": "complex"}


def array_of(text: str) -> tuple[str, tuple[int, ...]]:
    """dtype and shape of the first array in XLA's spelling of a shape; ``("", ())`` where there is none.

    >>> array_of("bf16[8,4096,512]{2,1,0:T(8,128)(2,1)}")
    ('bfloat16', (8, 4096, 512))
    >>> array_of("(s32[], pred[3])"), array_of("token[]")
    (('int32', ()), ('', ()))
    """
    for kind, dims in re.findall(r"\b([a-z]+[0-9]*(?:e\d+m\d+\w*)?)\[([\d,<=?]*)\]", text):
        letters = kind.rstrip("0123456789")
        name = f"float8_{kind[2:]}" if kind.startswith("f8") else _SHORT.get(letters, "") + kind[len(letters) :]
        if name in _DTYPES:
            return name, tuple(int(n) for n in re.findall(r"\d+", dims))
    return "", ()


_DTYPES = {*PRIMITIVE_TYPES.values()} - {"tuple", "token"}
