"""A program as operations, values and kernels: the data that the prediction of a peak works on."""

from dataclasses import dataclass, field
from typing import Any

from jremat.graph.trace import user_line
from jremat.jax_internals import scopes


@dataclass(eq=False)
class Value:
    """One array of a computation: what a kernel writes, or what is handed in.

    Attributes:
        aval: shape and dtype.
        nbytes: its size.
        maker: the operation that makes it; None for what is handed in.
        users: the operations that read it.
        tag: the user's name of it.
        held: it needs no memory of this computation: an argument, or a slice of what the caller holds.
        layout: how it lies in memory: ``""`` as its shape says, ``matmul`` the same, fresh from a matmul; ``turned`` a
            matmul's result, transposed without moving data; ``mixed`` such a one that not every matmul can read;
            ``settled`` laid out for its readers.
    """

    aval: Any
    nbytes: int
    maker: "Op | None" = None
    users: "list[Op]" = field(default_factory=list)
    tag: str | None = None
    held: bool = False
    layout: str = ""


@dataclass(eq=False)
class Op:
    """One operation, calls entered.

    Attributes:
        name: JAX's primitive, or ``slice of a stack``, ``write to a stack``, ``zeros``, ``result``.
        eqn, call: the equation, and the call that it is inside of.
        inputs, outputs: in the order of the equation.
        around: JAX's name scopes of the calls that it is inside of.
        inner: computations that it runs.
        in_place: which input each output takes the place of.
        fused: it has no kernel of its own.
        defines: bytes of the stack that it writes a slice of.
    """

    name: str
    eqn: Any
    call: Any
    inputs: list[Value]
    outputs: list[Value]
    around: str = ""
    inner: "tuple[Computation, ...]" = ()
    in_place: dict[int, int] = field(default_factory=dict)
    fused: bool = False
    defines: int = 0

    @property
    def scope(self) -> str:
        """JAX's name scopes around it, outermost first; a call's own stand outside of it."""
        return "/".join(filter(None, (self.around, scopes(self.eqn) if self.eqn is not None else "")))

    @property
    def source(self) -> str:
        """The user's line."""
        return user_line(self.eqn, self.call) if self.eqn is not None else ""


@dataclass(eq=False)
class Kernel:
    """One kernel, loop or call of a library.

    Attributes:
        op: whose result it writes.
        reads: materialised values.
        writes: materialised values.
        shares: for each value written, the values whose place it may take if they die here.
    """

    op: Op
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    shares: tuple[tuple[Value, ...], ...]


@dataclass(eq=False)
class Computation:
    """A program, a loop's body or a branch, as kernels in program order.

    Attributes:
        inputs, outputs: as of the jaxpr; an output may be an input.
        kernels: in program order.
        carried: of a loop's body, for each output its place among the inputs, or None where it is written to a stack.
        loops_wait: whether the greedy order counts what goes round in a loop as made by it.
    """

    inputs: list[Value]
    outputs: list[Value]
    kernels: list[Kernel]
    carried: tuple[int | None, ...] = ()
    loops_wait: bool = True
