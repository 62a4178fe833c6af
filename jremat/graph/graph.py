"""The flat graph of a function: its values and the operations that make them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jremat.jax_internals import CUSTOM_JVP, CUSTOM_VJP, REMAT
from jremat.policy.shown import aligned, human, human_flops

CUSTOM_RULES = frozenset({CUSTOM_VJP, CUSTOM_JVP, REMAT})
"""Primitives that run their inside once, so that their outputs are its outputs."""


@dataclass(frozen=True)
class Value:
    """One array that a function takes, makes or returns.

    Args:
        id: stable within equal graphs: ``"17"`` the output of op 17, ``"17:1"`` its second output, ``"17/3"`` the
            output of op 3 inside op 17; inputs are ``"in0"``, constants ``"const0"``.
        shape: of one copy.
        dtype: its NumPy name.
        nbytes: of one copy.
        name: the user's tag, or None; a value that a tag reads bears that name too.
        family: of the operation that made it (``jremat.policy.ops``); ``input`` and ``constant`` for those.
        primitive: that made it, or ``input``, ``constant``.
        source: the user's line, ``file.py:12 (function)``, or an input's path.
        repeats: how often it is made in one call: the product of the scan lengths around it.
        flops: of the operation that made it, in one run.
        path: the modules that make it, ``layers_0/attn/q_proj``, from JAX's name stack.
    """

    id: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    name: str | None = None
    family: str = "input"
    primitive: str = "input"
    source: str = ""
    repeats: int = 1
    flops: int = 0
    path: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of all its copies."""
        return self.nbytes * self.repeats


@dataclass(frozen=True)
class Op:
    """One operation of a graph.

    Args:
        id: its place, as in ``Value.id``.
        primitive: JAX's name of it.
        families: of ``jremat.policy.ops``, every one that it belongs to.
        inputs: ids of the values that it reads; literals are left out.
        outputs: ids of the values that it makes.
        matmul_flops: of its matmuls and convolutions in one run, inner graphs included.
        other_flops: of the rest.
        repeats: how often it runs in one call of the whole function.
        inner: the graphs that it holds: a scan's body, a cond's branches, a kernel's inside.
        source: the user's line.
        opaque: its inside can be seen but not changed: only the user's own tags in it can be kept.
    """

    id: str
    primitive: str
    families: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    matmul_flops: int = 0
    other_flops: int = 0
    repeats: int = 1
    inner: tuple["Graph", ...] = ()
    source: str = ""
    opaque: bool = False

    def inside(self, output: str) -> "Value | None":
        """The value inside a custom rule that this output is, where the two correspond one to one, else None."""
        if self.primitive not in CUSTOM_RULES or len(self.inner) != 1:
            return None
        inner = self.inner[0]
        return inner.values[inner.outputs[self.outputs.index(output)]]


@dataclass(frozen=True)
class Graph:
    """A function as values and operations, calls entered, loops and custom rules kept whole with their inside.

    Args:
        values: every value by id, inputs and constants first, then in the order in which they are made.
        ops: in program order.
        inputs, constants, outputs: ids, in order.
        program: the jaxpr that it was read from, for those who run it; not compared, not printed.
    """

    values: dict[str, Value]
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    constants: tuple[str, ...]
    outputs: tuple[str, ...]
    program: Any = field(default=None, compare=False, repr=False)

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that are equal for equal graphs: primitives, shapes, dtypes and who reads whom.

        Inputs and constants count in the order in which they are first read, whatever their order in the call: so a
        block has the fingerprint that it has as a layer of a stack, where its arguments are sorted anew.
        """
        heads, steps = self._text
        return hashlib.sha256(f"{heads};{';'.join(steps)}".encode()).hexdigest()[:16]

    @cached_property
    def signature(self) -> str:
        """The fingerprint, a dash, and two hex digits an operation, which tell where two graphs differ first."""
        _, steps = self._text
        codes = (hashlib.sha256(step.encode()).hexdigest()[:2] for step in steps)
        return f"{self.fingerprint}-{''.join(codes)}"

    def first_difference(self, signature: str) -> Op | None:
        """The first operation that isn't the one that another graph's ``signature`` has in its place, if any."""
        mine, theirs = (whole.partition("-")[2] for whole in (self.signature, signature))
        places = range(min(len(mine), len(theirs)) // 2)
        at = next((k for k in places if mine[2 * k : 2 * k + 2] != theirs[2 * k : 2 * k + 2]), len(places))
        return self.ops[at] if theirs and at < len(self.ops) else None

    def differs_from(self, signature: str) -> str:
        """What to say of a plan for the graph with another ``signature``: the first operation that differs."""
        why = "other shapes, another function or another JAX"
        differs = self.first_difference(signature)
        if "-" not in signature:  # written by hand
            return f"was planned for graph {signature}, the function's graph is {self.fingerprint}; {why}"
        if differs is None:
            return f"was planned for another program, which begins as this function does; {why}"
        made = ", ".join(f"{self.values[o].dtype}{list(self.values[o].shape)}" for o in differs.outputs)
        path = next((self.values[o].path for o in differs.outputs if self.values[o].path), "")
        where = (f" in {path}" if path else "") + (f" at {differs.source}" if differs.source else "")
        return (
            f"was planned for another program; the first operation that differs is {differs.primitive} to {made}"
            f"{where}; {why}"
        )

    @cached_property
    def _text(self) -> tuple[str, list[str]]:
        """What the fingerprint is made of: of what is given, and of each operation."""
        given: dict[str, str] = {}
        made = {out for op in self.ops for out in op.outputs}

        def called(value: str) -> str:
            return value if value in made else given.setdefault(value, f"given{len(given)}")

        steps = [
            f"{op.id} {op.primitive} {' '.join(map(called, op.inputs))} -> "
            + " ".join(f"{o}{self.values[o].dtype}{self.values[o].shape}" for o in op.outputs)
            + "".join(graph.fingerprint for graph in op.inner)
            for op in self.ops
        ]
        return " ".join(f"{self.values[i].dtype}{self.values[i].shape}" for i in given), steps

    def __str__(self) -> str:
        made = sorted((value for _, value in self.walk()), key=lambda value: -value.nbytes)[:8]
        heads = (
            ("graph", self.fingerprint, f"{len(self.ops)} operations, {len(self.inputs)} inputs"),
            ("matmuls", human_flops(self.matmul_flops), "in one run, traced, not run"),
        )
        rows = [(human(v.nbytes), f"{v.dtype}{list(v.shape)}", v.name or v.primitive, v.source) for v in made]
        return aligned(heads) + "\n" + aligned([("bytes", "largest values", "", "made at"), *rows], right=[0])

    __repr__ = __str__

    @property
    def matmul_flops(self) -> int:
        """Of one run of this graph."""
        return sum(op.matmul_flops for op in self.ops)

    @property
    def other_flops(self) -> int:
        """Of one run of this graph: everything but matmuls and convolutions."""
        return sum(op.other_flops for op in self.ops)

    def walk(self) -> Iterator[tuple[Op, Value]]:
        """Every value that an operation makes, inner graphs included, with the operation."""
        for op in self.ops:
            for value in op.outputs:
                yield op, self.values[value]
            for graph in op.inner:
                yield from graph.walk()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every tag in it, sorted."""
        return tuple(sorted({value.name for _, value in self.walk() if value.name}))

    @cached_property
    def families(self) -> tuple[str, ...]:
        """Every op family in it, sorted."""
        return tuple(sorted({value.family for _, value in self.walk()}))
