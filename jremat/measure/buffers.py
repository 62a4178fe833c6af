"""The largest buffers alive at the peak, each with the user's line and tag."""

import dataclasses
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from jremat.graph.graph import Graph
from jremat.jax_internals import REMAT_SCOPE, TRANSPOSE_SCOPE
from jremat.measure.hlo_schedule import HloSchedule, Instruction, Life

Tags = Mapping[tuple[str, int], tuple[str, ...]]
"""The names of values by their source, ``file.py:12 (function)``, and number of elements."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One buffer that is alive when the program's memory is at its peak.

    Attributes:
        nbytes: on one device.
        kind: ``argument``, ``output`` or ``temp``.
        dtype, shape: of the value that it was made for; a scan's stacked residual has the scan's length in front.
        what: JAX's path of the operation, ``jit(step)/jvp()/while/body/dot_general``, or the argument's path.
        source: the user's line, ``file.py:12 (function)``, or nothing where XLA lost it.
        tag: the name that the user's tag gave the value, or None.
        instruction: XLA's name of it in the compiled program.
    """

    nbytes: int
    kind: str
    dtype: str
    shape: tuple[int, ...]
    what: str
    source: str
    tag: str | None
    instruction: str

    @property
    def recomputed(self) -> bool:
        """Whether it was made by a recomputation in the backward pass."""
        return REMAT_SCOPE in self.what


def largest_at_peak(schedule: HloSchedule, tags: Tags, count: int) -> tuple[Buffer, ...]:
    """The ``count`` largest buffers alive at the peak of a compiled program, largest first."""
    heap = schedule.alive_at_peak()[1]
    rows = [(life, "temp") for life in heap] + [(life, _held_kind(schedule, life)) for life in schedule.held()]
    rows.sort(key=lambda row: -row[0].nbytes)
    return tuple(_buffer(schedule, life, kind, tags) for life, kind in rows[:count])


def tags_of(graph: Graph) -> dict[tuple[str, int], tuple[str, ...]]:
    """Names by source and size, over a function's graph and the graphs in it."""
    found: dict[tuple[str, int], tuple[str, ...]] = {}
    for one in _all_graphs(graph):
        for value in one.values.values():
            if value.name and value.source and not value.name.startswith(_OWN_NAMES):
                key = (value.source, prod(value.shape))
                found[key] = tuple(dict.fromkeys((*found.get(key, ()), value.name)))
    return found


def _all_graphs(graph: Graph) -> Iterator[Graph]:
    yield graph
    for op in graph.ops:
        for inner in op.inner:
            yield from _all_graphs(inner)


def _held_kind(schedule: HloSchedule, life: Life) -> str:
    entry = life.instruction.opcode == "parameter" and life.instruction.id in schedule.entry_ids
    return "argument" if entry else "output"


def _buffer(schedule: HloSchedule, life: Life, kind: str, tags: Tags) -> Buffer:
    made = life.instruction if kind == "argument" else origin(schedule, life)
    dtype, shape = life.instruction.shape_at(life.shape_index)
    lines = [
        f"{Path(file).name}:{line} ({function.rsplit('.', 1)[-1]})"
        for file, line, function in made.lines
        if not Path(file).is_relative_to(_OURS)
    ]
    # A tag names a value of the forward pass; a gradient of the same line and size does not bear it.
    gradient = TRANSPOSE_SCOPE in made.op_name and REMAT_SCOPE not in made.op_name
    sizes = {prod(shape), *(prod(s) for _, s in made.shapes())} if not gradient else set()
    return Buffer(
        nbytes=life.nbytes,
        kind=kind,
        dtype=dtype,
        shape=shape,
        what=made.op_name,
        source=lines[0] if lines else "",
        tag=_tag(made.op_name, lines, sorted(sizes, reverse=True), tags),
        instruction=life.instruction.name,
    )


def _tag(op_name: str, lines: list[str], sizes: list[int], tags: Tags) -> str | None:
    """The tag of a value by its line and size; where one line makes several of a size, by the path that names one."""
    for names in (tags[line, size] for line in lines for size in sizes if (line, size) in tags):
        in_path = [name for name in names if name in op_name.split("/")]
        return " or ".join(in_path or names)
    return None


# What passes a value on unchanged, or in another layout or precision.
_PASSES = ("bitcast", "copy", "reshape", "transpose", "convert", "optimization-barrier", "copy-start", "copy-done")


def origin(schedule: HloSchedule, life: Life) -> Instruction:
    """The instruction that computed what a buffer holds.

    A scan's stacked residual belongs to the loop as a whole; what is written into it is found by following the
    loop's body from its result through the update of a slice to the value that was sliced in. Where the trail ends at
    nothing that bears a source, the nearest instruction with one is returned.
    """
    best = last = life.instruction
    for last in _trail(schedule, life.instruction, life.shape_index):
        if last.lines and last.opcode != "parameter":
            best = last
    if best.lines or last.id in schedule.entry_ids:
        return best if best.lines else last  # the second: a copy of an argument
    return _any_inside(schedule, best)


def _trail(schedule: HloSchedule, at: Instruction, index: tuple[int, ...]) -> Iterator[Instruction]:
    """From a value back to what made it, through everything that only carries it."""
    inside: list[Instruction] = []  # fusions entered, innermost last
    turned: set[int] = set()  # loops whose carry was followed round once
    for _ in range(64):  # longer trails go in circles
        yield at
        operands = [schedule.instructions[i] for i in at.operands if i in schedule.instructions]
        match at.opcode:
            case "get-tuple-element":
                at, index = operands[0], (at.index, *index)
            case "tuple" if index:
                at, index = operands[index[0]], index[1:]
            case "while":
                at = schedule.result(at, is_tuple=True)
            case "call" | "fusion" | "async-start" | "conditional" if at.called:
                result = schedule.result(at)
                if at.opcode == "fusion" and result.opcode not in (*_PASSES, "dynamic-update-slice", "tuple"):
                    return
                inside.append(at)
                index = index[1:] if at.opcode == "async-start" and len(index) > 1 else index
                at = result
            case "async-done":
                at = operands[0]
            case "dynamic-update-slice":
                at = operands[1]
            case "parameter" if not inside and index and at.id not in turned and at.id in schedule.loop_results:
                turned.add(at.id)
                at = schedule.loop_results[at.id]
            case "parameter" if inside:
                caller = inside.pop()
                carried = [schedule.instructions[i] for i in caller.operands]
                if at.index >= len(carried):
                    return
                at = carried[at.index]
            case opcode if opcode in _PASSES and operands:
                at = operands[0]
            case _:
                return


_OWN_NAMES = "jremat."  # what jremat.checkpoint calls a value that it keeps; the user's own name says more
_OURS = Path(__file__).parents[1]  # a line of our own wrappers is no source of the user's


def _any_inside(schedule: HloSchedule, at: Instruction) -> Instruction:
    """The last instruction with a source in what ``at`` runs, or ``at``."""
    inner = [i for computation in at.called for i in schedule.computations.get(computation, ()) if i.lines]
    return inner[-1] if inner else at
