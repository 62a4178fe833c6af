"""Collectives of a compiled program: how often each kind runs, loops counted by their turns, and the bytes it is given.

Read from XLA's text of the optimized program, in which a loop that JAX's ``scan`` made bears its trip count.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax

from jremat.policy.shown import aligned, human

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
_ITEM_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128}  # others by the digits in their name
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a program.

    Attributes:
        kind: one of ``KINDS``.
        executions: in one run of the program.
        nbytes: of one device, over all executions: the whole array, before a scatter or after a gather.
        unknown_turns: whether some are in a loop whose trip count XLA doesn't know; these count once.
    """

    kind: str
    executions: int
    nbytes: int
    unknown_turns: bool = False

    def __str__(self) -> str:
        least = "at least " if self.unknown_turns else ""
        return aligned([(self.kind, f"{least}{self.executions} ×", human(self.nbytes), "on each device")], right=[1, 2])

    __repr__ = __str__


def collectives_of(program: jax.stages.Compiled) -> tuple[Collective, ...]:
    """The collectives of a compiled program, by kind.

    Args:
        program: from ``jax.jit(f).lower(...).compile()``, or from ``jremat.measure.program`` for a described target.

    Returns:
        One for each kind that runs, in the order of ``KINDS``.

    >>> import jax.numpy as jnp
    >>> collectives_of(jax.jit(jnp.sin).lower(jnp.ones(3)).compile())
    ()
    """
    text = program.as_text()
    assert text is not None, "every backend of JAX has the text of its programs"
    return in_text(text)


def in_text(text: str) -> tuple[Collective, ...]:
    """The same of the text of an optimized HLO module."""
    found: dict[str, list[int]] = {}
    unknown: set[str] = set()
    for kind, times, nbytes, known in _executed(_computations(text)):
        executions = found.setdefault(kind, [0, 0])
        executions[0] += times
        executions[1] += times * nbytes
        if not known:
            unknown.add(kind)
    return tuple(Collective(kind, found[kind][0], found[kind][1], kind in unknown) for kind in KINDS if kind in found)


def _computations(text: str) -> Mapping[str, list[tuple[str, str, str]]]:
    """Shape, opcode and the rest of each instruction, by computation; the entry's is called ``ENTRY``."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    own: list[tuple[str, str, str]] = []
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            own = found.setdefault("ENTRY" if head[1] else head[2], [])
        elif match := _INSTRUCTION.match(line):
            own.append((match[1], match[2], match[3]))
    return found


def _executed(
    computations: Mapping[str, list[tuple[str, str, str]]], name: str = "ENTRY", times: int = 1, known: bool = True
) -> Iterator[tuple[str, int, int, bool]]:
    for shape, opcode, rest in computations.get(name, ()):
        kind = opcode.removesuffix("-start")
        if kind in KINDS:
            groups = _largest(rest.partition("),")[0]) if kind == "reduce-scatter" else 0
            yield kind, times, max(_largest(shape), groups), known
        called = _CALLED.findall(rest)
        called += [part.strip().lstrip("%") for part in "".join(_BRANCHES.findall(rest)).split(",") if part.strip()]
        turns = _TURNS.search(rest)
        for inner in called if kind not in KINDS else ():
            repeated = times * int(turns[1]) if opcode == "while" and turns else times
            yield from _executed(computations, inner, repeated, known and (opcode != "while" or turns is not None))


def _largest(text: str) -> int:
    """Bytes of the largest array that a shape or operands name; of a tuple of several arrays reduced together, of all.

    An asynchronous start has operand and result in its tuple: the larger is the whole array.
    """
    sizes = []
    for dtype, dims in _ARRAY.findall(text):
        bits = _ITEM_BITS.get(dtype) or int((re.findall(r"\d+", dtype) or ["0"])[0])
        count = 1
        for dim in filter(None, dims.split(",")):
            count *= int(dim)
        sizes.append(-(-count * bits // 8))
    return max(sizes, default=0)
