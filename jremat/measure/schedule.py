"""The compiled program as XLA scheduled it: instructions with their source, buffers with their lives.

XLA dumps an ``HloProto`` for a compiled program: the module after all its passes, and the buffer assignment with the
trace of its heap simulation, in which every allocation and release stands in the program's order. Replaying the
trace gives what is alive at the peak, exactly as the compiler planned it.
"""

import dataclasses
from collections.abc import Iterator
from functools import cached_property

from jremat.measure import wire

# Field numbers: xla/service/hlo.proto and xla/xla_data.proto, unchanged since 2018 except stack frames (2023).
_HLO = {"module": 1, "assignment": 3}
_MODULE = {"entry": 6, "computations": 3, "stack_frames": 17}
_COMPUTATION = {"name": 1, "instructions": 2, "id": 5, "root": 6}
_INSTRUCTION = {"name": 1, "opcode": 2, "shape": 3, "metadata": 7, "tuple_index": 13, "parameter": 9, "id": 35,
                "operands": 36, "called": 38}  # fmt: skip
_METADATA = {"op_name": 2, "file": 3, "line": 4, "frame": 15}
_SHAPE = {"type": 2, "dims": 3, "tuple": 4}
_FRAMES = {"files": 1, "functions": 2, "locations": 3, "frames": 4}
_ASSIGNMENT = {"buffers": 1, "allocations": 3, "traces": 4}
_BUFFER = {"id": 1, "size": 2, "defined_at": 3, "color": 4}
_ALLOCATION = {"size": 2, "parameter": 6, "is_parameter": 5, "live_out": 7, "color": 8, "assigned": 9}
_TRACE = {"events": 1}
_EVENT = {"kind": 1, "buffer": 2, "share_with": 5}
_FREE, _SHARE = 1, 2  # of an event; 0 is an allocation
DEVICE = 0
"""The memory space of device memory; 5 is the host's, others lie on the chip (xla/layout.h)."""

# PrimitiveType of xla_data.proto, by the names that NumPy gives them where it has one.
_TYPES = {1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "uint8", 7: "uint16", 8: "uint32", 9: "uint64",
          10: "float16", 11: "float32", 12: "float64", 13: "tuple", 15: "complex64", 16: "bfloat16", 17: "token",
          18: "complex128", 19: "float8_e5m2", 20: "float8_e4m3fn", 21: "int4", 22: "uint4"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of the compiled program.

    Attributes:
        id: unique in the module.
        name, opcode: XLA's.
        shape: XLA's shape message; ``shape_at`` reads it.
        op_name: JAX's path of scopes: ``jit(step)/transpose(jvp())/while/body/dot_general``.
        lines: the user's stack, innermost first: ``(file, line, function)``.
        operands, called: ids of the instructions that it reads and of the computations that it runs.
        index: which element a get-tuple-element takes, or which parameter a parameter is.
    """

    id: int
    name: str
    opcode: str
    shape: wire.Fields
    op_name: str
    lines: tuple[tuple[str, int, str], ...]
    operands: tuple[int, ...]
    called: tuple[int, ...]
    index: int

    def shape_at(self, index: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """dtype and dimensions of the element of its result at ``index`` (empty for the whole)."""
        shape = self.shape
        for i in index:
            shape = list(wire.messages(shape, _SHAPE["tuple"]))[i]
        return _array(shape)

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """dtype and dimensions of every array in its result."""
        return [_array(s) for s in wire.messages(self.shape, _SHAPE["tuple"])] or [_array(self.shape)]


def _array(shape: wire.Fields) -> tuple[str, tuple[int, ...]]:
    kind = wire.number(shape, _SHAPE["type"])
    return _TYPES.get(kind, f"type{kind}"), wire.numbers(shape, _SHAPE["dims"])


@dataclasses.dataclass(frozen=True)
class Life:
    """One buffer of the program: the value that it was made for, and XLA's number of its memory space."""

    nbytes: int
    instruction: Instruction
    shape_index: tuple[int, ...]
    space: int = 0


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A compiled program with its buffer assignment, from the bytes of an ``HloProto``."""

    data: bytes

    @cached_property
    def _hlo(self) -> wire.Fields:
        return wire.fields(self.data)

    @cached_property
    def _module(self) -> wire.Fields:
        return wire.message(self._hlo, _HLO["module"])

    @cached_property
    def _assignment(self) -> wire.Fields:
        return wire.message(self._hlo, _HLO["assignment"])

    @cached_property
    def instructions(self) -> dict[int, Instruction]:
        """Every instruction of every computation, by id."""
        return {i.id: i for computation in self.computations.values() for i in computation}

    @cached_property
    def computations(self) -> dict[int, tuple[Instruction, ...]]:
        """Every computation's instructions, in the order in which they run, by the computation's id."""
        return {
            wire.number(c, _COMPUTATION["id"]): tuple(
                self._instruction(i) for i in wire.messages(c, _COMPUTATION["instructions"])
            )
            for c in wire.messages(self._module, _MODULE["computations"])
        }

    @cached_property
    def roots(self) -> dict[int, int]:
        """The id of every computation's result, by the computation's id."""
        return {
            wire.number(c, _COMPUTATION["id"]): wire.number(c, _COMPUTATION["root"])
            for c in wire.messages(self._module, _MODULE["computations"])
        }

    @cached_property
    def entry_ids(self) -> frozenset[int]:
        """Ids of the instructions of the computation that the program starts in."""
        return frozenset(i.id for i in self.computations.get(wire.number(self._module, _MODULE["entry"]), ()))

    @cached_property
    def loop_results(self) -> dict[int, Instruction]:
        """What a loop's body gives for its next turn, by the id of the body's parameter."""
        bodies = [c for i in self.instructions.values() if i.opcode == "while" for c in i.called]
        return {
            i.id: self.instructions[self.roots[body]]
            for body in bodies
            if self.instructions[self.roots[body]].opcode == "tuple"
            for i in self.computations[body]
            if i.opcode == "parameter"
        }

    def result(self, caller: Instruction, is_tuple: bool = False) -> Instruction:
        """The result of what ``caller`` runs; of a loop's two computations, the body gives a tuple."""
        results = [self.instructions[self.roots[c]] for c in caller.called if c in self.roots]
        return next((r for r in results if r.shape.get(_SHAPE["tuple"])), results[0]) if is_tuple else results[0]

    @cached_property
    def _frames(self) -> list[tuple[tuple[str, int, str], int]]:
        """Stack frames: ((file, line, function), the parent's number), numbered from 1; 0 is none."""
        index = wire.message(self._module, _MODULE["stack_frames"])
        files = [v.decode(errors="replace") for v in index.get(_FRAMES["files"], ()) if isinstance(v, bytes)]
        functions = [v.decode(errors="replace") for v in index.get(_FRAMES["functions"], ()) if isinstance(v, bytes)]
        at = [
            (files[wire.number(m, 1) - 1], wire.number(m, 3), functions[wire.number(m, 2) - 1])
            for m in wire.messages(index, _FRAMES["locations"])
        ]
        return [(at[wire.number(m, 1) - 1], wire.number(m, 2)) for m in wire.messages(index, _FRAMES["frames"])]

    def _lines(self, metadata: wire.Fields) -> tuple[tuple[str, int, str], ...]:
        number, found = wire.number(metadata, _METADATA["frame"]), []
        while 0 < number <= len(self._frames):
            line, number = self._frames[number - 1]
            found.append(line)
        if not found and wire.text(metadata, _METADATA["file"]):
            found.append((wire.text(metadata, _METADATA["file"]), wire.number(metadata, _METADATA["line"]), ""))
        return tuple(found)

    def _instruction(self, m: wire.Fields) -> Instruction:
        metadata, opcode = wire.message(m, _INSTRUCTION["metadata"]), wire.text(m, _INSTRUCTION["opcode"])
        return Instruction(
            id=wire.number(m, _INSTRUCTION["id"]),
            name=wire.text(m, _INSTRUCTION["name"]),
            opcode=opcode,
            shape=wire.message(m, _INSTRUCTION["shape"]),
            op_name=wire.text(metadata, _METADATA["op_name"]),
            lines=self._lines(metadata),
            operands=wire.numbers(m, _INSTRUCTION["operands"]),
            called=wire.numbers(m, _INSTRUCTION["called"]),
            index=wire.number(m, _INSTRUCTION["parameter" if opcode == "parameter" else "tuple_index"]),
        )

    @cached_property
    def _buffers(self) -> dict[int, Life]:
        found = {}
        for m in wire.messages(self._assignment, _ASSIGNMENT["buffers"]):
            at = wire.message(m, _BUFFER["defined_at"])
            instruction = self.instructions.get(wire.number(at, 4))
            if instruction is not None:
                number = wire.number(m, _BUFFER["id"])
                found[number] = Life(
                    nbytes=wire.number(m, _BUFFER["size"]),
                    instruction=instruction,
                    shape_index=wire.numbers(at, 3),
                    space=wire.number(m, _BUFFER["color"]),
                )
        return found

    def held(self) -> Iterator[Life]:
        """Buffers outside the heap, held from start to end: arguments, and results that have a place of their own."""
        for allocation in wire.messages(self._assignment, _ASSIGNMENT["allocations"]):
            if wire.number(allocation, _ALLOCATION["is_parameter"]) or wire.number(allocation, _ALLOCATION["live_out"]):
                lives = [
                    self._buffers[number]
                    for assigned in wire.messages(allocation, _ALLOCATION["assigned"])
                    if (number := wire.number(assigned, 1)) in self._buffers
                ]
                if lives and lives[0].space == DEVICE:
                    yield max(lives, key=self._telling)

    def _telling(self, life: Life) -> tuple[bool, bool, int]:
        """Of several values in one place, an argument names it best, then what computes, then what only carries."""
        at = life.instruction
        return (
            at.id in self.entry_ids and at.opcode == "parameter",
            at.opcode not in ("parameter", "tuple"),
            life.nbytes,
        )

    def alive_at_peak(self) -> tuple[int, list[Life]]:
        """Bytes of the heap at its peak, and the buffers alive then.

        A buffer may share another's place (an update in place); the place is free when the last that shares it is.
        XLA simulates each memory space apart; the host's and a TPU's on-chip memory are left out.
        """
        replays = [self._replay(trace) for trace in wire.messages(self._assignment, _ASSIGNMENT["traces"])]
        return max(
            ((peak, alive) for peak, alive in replays if alive and alive[0].space == DEVICE),
            key=lambda found: found[0],
            default=(0, []),
        )

    def _replay(self, trace: wire.Fields) -> tuple[int, list[Life]]:
        place: dict[int, int] = {}
        sharers: dict[int, int] = {}
        alive: dict[int, None] = {}
        now = peak = 0
        at_peak: list[int] = []
        for event in wire.messages(trace, _TRACE["events"]):
            kind, buffer = wire.number(event, _EVENT["kind"]), wire.number(event, _EVENT["buffer"])
            if buffer not in self._buffers:
                continue
            if kind == _FREE:
                sharers[place[buffer]] -= 1
                alive.pop(buffer, None)
                if not sharers[place[buffer]]:
                    now -= self._buffers[place[buffer]].nbytes
                continue
            place[buffer] = place[wire.number(event, _EVENT["share_with"])] if kind == _SHARE else buffer
            sharers[place[buffer]] = sharers.get(place[buffer], 0) + 1
            alive[buffer] = None
            if sharers[place[buffer]] == 1:
                now += self._buffers[place[buffer]].nbytes
            if now > peak:
                peak, at_peak = now, list(alive)
        newest = {place[buffer]: buffer for buffer in at_peak}
        return peak, [self._buffers[buffer] for buffer in newest.values()]
