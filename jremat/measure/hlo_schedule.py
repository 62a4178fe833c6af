"""The compiled program as XLA scheduled it: instructions with their source, buffers with their lives.

XLA dumps an ``HloProto`` for a compiled program: the module after all its passes, and the buffer assignment with the
trace of its heap simulation, in which every allocation and release stands in the program's order. Replaying the
trace gives what is alive at the peak, exactly as the compiler planned it.
"""

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from jremat.measure.hlo_proto import FREE, PRIMITIVE_TYPES, SHARE, hlo_proto

DEVICE = 0
"""The memory space of device memory; 5 is the host's, others lie on the chip (xla/layout.h)."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of the compiled program.

    Attributes:
        id: unique in the module.
        name, opcode: XLA's.
        shape: XLA's ShapeProto; ``shape_at`` reads it.
        op_name: JAX's path of scopes: ``jit(step)/transpose(jvp())/while/body/dot_general``.
        lines: the user's stack, innermost first: ``(file, line, function)``.
        operands, called: ids of the instructions that it reads and of the computations that it runs.
        index: which element a get-tuple-element takes, or which parameter a parameter is.
    """

    id: int
    name: str
    opcode: str
    shape: Any
    op_name: str
    lines: tuple[tuple[str, int, str], ...]
    operands: tuple[int, ...]
    called: tuple[int, ...]
    index: int

    def shape_at(self, index: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """dtype and dimensions of the element of its result at ``index`` (empty for the whole)."""
        shape = self.shape
        for i in index:
            shape = shape.tuple_shapes[i]
        return _array(shape)

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """dtype and dimensions of every array in its result."""
        return [_array(shape) for shape in self.shape.tuple_shapes or [self.shape]]


def _array(shape: Any) -> tuple[str, tuple[int, ...]]:
    kind = shape.element_type
    return PRIMITIVE_TYPES.get(kind, f"type{kind}"), tuple(shape.dimensions)


@dataclasses.dataclass(frozen=True)
class Life:
    """One buffer of the program: the value that it was made for, and XLA's number of its memory space."""

    nbytes: int
    instruction: Instruction
    shape_index: tuple[int, ...]
    space: int = 0


@dataclasses.dataclass(frozen=True)
class HloSchedule:
    """A compiled program with its buffer assignment, from the bytes of an ``HloProto``."""

    data: bytes

    @cached_property
    def _hlo(self) -> Any:
        return hlo_proto(self.data)

    @cached_property
    def instructions(self) -> dict[int, Instruction]:
        """Every instruction of every computation, by id."""
        return {i.id: i for computation in self.computations.values() for i in computation}

    @cached_property
    def computations(self) -> dict[int, tuple[Instruction, ...]]:
        """Every computation's instructions, in the order in which they run, by the computation's id."""
        return {c.id: tuple(map(self._instruction, c.instructions)) for c in self._hlo.hlo_module.computations}

    @cached_property
    def roots(self) -> dict[int, int]:
        """The id of every computation's result, by the computation's id."""
        return {c.id: c.root_id for c in self._hlo.hlo_module.computations}

    @cached_property
    def entry_ids(self) -> frozenset[int]:
        """Ids of the instructions of the computation that the program starts in."""
        return frozenset(i.id for i in self.computations.get(self._hlo.hlo_module.entry_computation_id, ()))

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
        return next((r for r in results if r.shape.tuple_shapes), results[0]) if is_tuple else results[0]

    @cached_property
    def _frames(self) -> list[tuple[tuple[str, int, str], int]]:
        """Stack frames: ((file, line, function), the parent's number), numbered from 1; 0 is none."""
        index = self._hlo.hlo_module.stack_frame_index
        lines = [
            (index.file_names[at.file_name_id - 1], at.line, index.function_names[at.function_name_id - 1])
            for at in index.file_locations
        ]
        return [(lines[frame.file_location_id - 1], frame.parent_frame_id) for frame in index.stack_frames]

    def _lines(self, metadata: Any) -> tuple[tuple[str, int, str], ...]:
        number, found = metadata.stack_frame_id, []
        while 0 < number <= len(self._frames):
            line, number = self._frames[number - 1]
            found.append(line)
        if not found and metadata.source_file:
            found.append((metadata.source_file, metadata.source_line, ""))
        return tuple(found)

    def _instruction(self, m: Any) -> Instruction:
        return Instruction(
            id=m.id,
            name=m.name,
            opcode=m.opcode,
            shape=m.shape,
            op_name=m.metadata.op_name,
            lines=self._lines(m.metadata),
            operands=tuple(m.operand_ids),
            called=tuple(m.called_computation_ids),
            index=m.parameter_number if m.opcode == "parameter" else m.tuple_index,
        )

    @cached_property
    def _buffers(self) -> dict[int, Life]:
        return {
            m.id: Life(m.size, self.instructions[at.instruction_id], tuple(at.shape_index), m.color)
            for m in self._hlo.buffer_assignment.logical_buffers
            if (at := m.defined_at).instruction_id in self.instructions
        }

    def held(self) -> Iterator[Life]:
        """Buffers outside the heap, held from start to end: arguments, and results that have a place of their own."""
        for allocation in self._hlo.buffer_assignment.buffer_allocations:
            if allocation.is_entry_computation_parameter or allocation.maybe_live_out:
                numbers = [assigned.logical_buffer_id for assigned in allocation.assigned]
                lives = [self._buffers[number] for number in numbers if number in self._buffers]
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
        replays = [self._replay(trace) for trace in self._hlo.buffer_assignment.heap_simulator_traces]
        return max(
            ((peak, alive) for peak, alive in replays if alive and alive[0].space == DEVICE),
            key=lambda found: found[0],
            default=(0, []),
        )

    def _replay(self, trace: Any) -> tuple[int, list[Life]]:
        place: dict[int, int] = {}
        sharers: dict[int, int] = {}
        alive: dict[int, None] = {}
        now = peak = 0
        at_peak: list[int] = []
        for event in trace.events:
            kind, buffer = event.kind, event.buffer_id
            if buffer not in self._buffers:
                continue
            if kind == FREE:
                sharers[place[buffer]] -= 1
                alive.pop(buffer, None)
                if not sharers[place[buffer]]:
                    now -= self._buffers[place[buffer]].nbytes
                continue
            place[buffer] = place[event.share_with_canonical_id] if kind == SHARE else buffer
            sharers[place[buffer]] = sharers.get(place[buffer], 0) + 1
            alive[buffer] = None
            if sharers[place[buffer]] == 1:
                now += self._buffers[place[buffer]].nbytes
            if now > peak:
                peak, at_peak = now, list(alive)
        newest = {place[buffer]: buffer for buffer in at_peak}
        return peak, [self._buffers[buffer] for buffer in newest.values()]
