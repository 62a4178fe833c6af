"""Protobuf's wire format, read without its schema: fields by number.

XLA leaves the scheduled program and its buffer assignment as protobuf, and neither JAX nor we depend on a protobuf
library. Format: protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Iterator

Fields = dict[int, list[int | bytes]]


def fields(message: bytes) -> Fields:
    """Every field of one message by its number, in order: integers for varints, bytes for the rest.

    Raises:
        ValueError: the bytes end inside a field, or hold a wire type that protobuf no longer writes.

    >>> fields(b"\\x08\\x96\\x01\\x12\\x02hi")
    {1: [150], 2: [b'hi']}
    """
    found: Fields = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        match key & 7:
            case 0:
                value, at = _varint(message, at)
                found.setdefault(key >> 3, []).append(value)
                continue
            case 1:
                size = 8
            case 2:
                size, at = _varint(message, at)
            case 5:
                size = 4
            case other:
                raise ValueError(f"message: wire type {other} at byte {at}")
        if at + size > len(message):
            raise ValueError(f"message: field {key >> 3} ends behind the message's {len(message)} bytes")
        found.setdefault(key >> 3, []).append(message[at : at + size])
        at += size
    return found


def number(message: Fields, field: int) -> int:
    """The last integer of that field; absent is zero, as in proto3."""
    values = message.get(field)
    return int(values[-1]) if values else 0


def numbers(message: Fields, field: int) -> tuple[int, ...]:
    """A repeated integer field, packed or not."""
    return tuple(
        n for value in message.get(field, ()) for n in ((value,) if isinstance(value, int) else _packed(value))
    )


def text(message: Fields, field: int) -> str:
    """The last string of that field, or the empty one."""
    values = message.get(field)
    return values[-1].decode(errors="replace") if values and isinstance(values[-1], bytes) else ""


def messages(message: Fields, field: int) -> Iterator[Fields]:
    """The messages of a repeated field."""
    for value in message.get(field, ()):
        if isinstance(value, bytes):
            yield fields(value)


def message(outer: Fields, field: int) -> Fields:
    """The last message of that field, or an empty one."""
    values = outer.get(field)
    return fields(values[-1]) if values and isinstance(values[-1], bytes) else {}


def _packed(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError(f"message: a number ends behind the message's {len(data)} bytes")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
