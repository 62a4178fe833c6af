"""XLA's own rematerialization: when it starts on a GPU, and what it recomputed in a compiled program."""

import re
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path

import jax.numpy as jnp

from jremat.measure.descriptions import parse
from jremat.measure.memory_analysis import Memory
from jremat.measure.targets import Target
from jremat.oom.dump import array_of

SLOP_PERCENT = 95
"""XLA's ``xla_gpu_memory_limit_slop_factor`` by default. Source: xla/debug_options_flags.cc"""
_XLA_PERCENT = 80
"""Share of a GPU that XLA's compiler plans with, whatever the allocator reserves.
Source: ``GetSchedulerMemoryLimit`` in xla/service/gpu/gpu_hlo_schedule.cc"""


@dataclass(frozen=True)
class Recomputed:
    """What XLA's own rematerialization pass recomputes in a compiled program.

    Attributes:
        count: instructions that it copied, those of a loop's body for each turn.
        nbytes: that they write.
        seconds: by roofline: their matmuls and the memory that they read and write; None for an unknown chip.
        what: the largest, by operation and source line.
    """

    count: int
    nbytes: int
    seconds: float | None
    what: tuple[str, ...]


def xla_limit_bytes(kind: Target, memory: Memory, slop_percent: int = SLOP_PERCENT) -> int:
    """Temporaries and results of a GPU's program above which XLA's own rematerialization starts.

    Args:
        kind: a described GPU.
        memory: of the program.
        slop_percent: ``xla_gpu_memory_limit_slop_factor``.

    Source: ``GetSchedulerMemoryLimit`` in xla/service/gpu/gpu_hlo_schedule.cc; what is donated counts once.
    """
    base = int(parse(kind.description)["gpu_device_info"]["device_memory_size"]) * _XLA_PERCENT // 100
    return max(0, base - memory.argument_bytes - memory.output_bytes + memory.alias_bytes) * slop_percent // 100


_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?([\w.-]+) = (\(?[a-z]+\d*\w*\[[^=]*?) ([\w-]+)\((.*)$")


def recomputed(text: str, kind: Target) -> Recomputed:
    """What XLA's rematerialization pass copied, in the text of a compiled program: it adds ``.remat`` to their names.

    Args:
        text: of ``...after_optimizations.txt``.
        kind: whose peaks the time is modelled by.
    """
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    copies: list[tuple[str, str, str, str]] = []  # computation, name, operands, the whole rest of the line
    turns: dict[str, int] = {}  # a loop's body -> its turns
    computation = ""
    for line in text.splitlines():
        if line.endswith("{") and (head := re.match(r"^(?:ENTRY )?%?([\w.-]+) ", line)):
            computation = head[1]
        elif match := _INSTRUCTION.match(line):
            name, shape, operation, rest = match.groups()
            shapes[name] = array_of(shape)
            if operation == "while" and (body := re.search(r"body=%?([\w.-]+)", rest)):
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', rest)
                turns[body[1]] = int(trips[1]) if trips else 1
            if ".remat" in name and operation not in ("bitcast", "get-tuple-element", "tuple", "parameter"):
                copies.append((computation, name, rest.partition(")")[0], rest))
    size = lambda name: prod(shapes[name][1]) * jnp.dtype(shapes[name][0] or "int8").itemsize
    count, nbytes, seconds = 0, 0, 0.0
    what: dict[str, int] = {}
    for inside, name, operands, rest in copies:
        times = turns.get(inside, 1)
        given = [operand for operand in re.findall(r"%?([\w.-]+)", operands) if operand in shapes]
        count, nbytes = count + times, nbytes + times * size(name)
        if kind.chip:
            moved = size(name) + sum(map(size, given))
            elements = [prod(shapes[operand][1]) for operand in (name, *given[:2])]
            # Of m×k by k×n: the root of the product of the three sizes is m·n·k.
            flops = 2 * sqrt(prod(elements)) if re.search(r"gemm|cublas|dot_general", name + rest) else 0
            peak = kind.chip.matmul_flops_per_second("float32" if shapes[name][0] == "float32" else "bfloat16")
            seconds += times * max(flops / peak, moved / kind.chip.hbm_bytes_per_second)
        path = re.search(r'op_name="([^"]*)"', rest)
        source = re.search(r'source_file="([^"]*)" source_line=(\d+)', rest)
        label = (path[1].rpartition("/")[2] if path else name) + (
            f" {Path(source[1]).name}:{source[2]}" if source else ""
        )
        what[label] = what.get(label, 0) + times * size(name)
    largest = tuple(sorted(what, key=lambda label: -what[label])[:4])
    return Recomputed(count, nbytes, seconds if kind.chip else None, largest)
