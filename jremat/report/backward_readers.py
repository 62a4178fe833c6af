"""Who reads a value: its way through calls, loops and copies to the operations that need it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from jremat.graph.trace import user_line
from jremat.jax_internals import REMAT_SCOPE, inner_jaxprs, opened, scopes
from jremat.report.model_parts import module_of

MOVES = frozenset(
    {
        *("convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "name"),
        *("reduce_precision", "optimization_barrier", "copy", "copy_p", "device_put", "slice", "dynamic_slice"),
    }
)
"""Primitives that hand a value on: who reads their output reads the value."""

MATMULS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})


@dataclass(frozen=True)
class Reader:
    """An operation of the backward pass that reads a kept value.

    Args:
        primitive: JAX's name of it, or ``matmul``.
        place: the module or the line that it belongs to.
        again: whether it is part of a recompute, not of the derivative itself.
    """

    primitive: str
    place: str
    again: bool

    def __str__(self) -> str:
        return f"{'replay: ' if self.again else ''}{self.primitive}{f' of {self.place}' if self.place else ''}"


class Uses:
    """The equations that read each variable, of every jaxpr asked for, indexed once."""

    def __init__(self) -> None:
        self._index: dict[int, tuple[Any, dict[Any, list[Any]]]] = {}

    def of(self, jaxpr: Any, var: Any) -> list[Any]:
        """The equations of an open jaxpr that read ``var``."""
        if id(jaxpr) not in self._index:
            index: dict[Any, list[Any]] = {}
            for eqn in jaxpr.eqns:
                for given in {v for v in eqn.invars if not isinstance(v, core.Literal)}:
                    index.setdefault(given, []).append(eqn)
            self._index[id(jaxpr)] = jaxpr, index  # the jaxpr is held, so that its id stays its own
        return self._index[id(jaxpr)][1].get(var, [])

    def readers(self, jaxpr: Any, var: Any, among: frozenset[int], again: bool = False) -> Iterator[Reader]:
        """Every operation that reads ``var``.

        Args:
            jaxpr: open.
            var: one of its variables.
            among: ids of the equations that count at this level; empty for all.
            again: whether all of this jaxpr is a recompute.
        """
        for eqn in self.of(jaxpr, var):
            if not among or id(eqn) in among:
                yield from self._reader(jaxpr, eqn, var, again or REMAT_SCOPE in scopes(eqn))

    def _reader(self, jaxpr: Any, eqn: Any, var: Any, again: bool) -> Iterator[Reader]:
        inner = _inside(eqn)
        if inner is not None:
            for given, within in zip(eqn.invars, inner.invars):
                if given is var:
                    yield from self.readers(inner, within, frozenset(), again)
        elif eqn.primitive.name in MOVES:
            readers = [r for out in eqn.outvars for r in self.readers(jaxpr, out, frozenset(), again)]
            yield from readers or [_reader_of(eqn, again)]
        else:
            yield _reader_of(eqn, again)


def _inside(eqn: Any) -> Any:
    """The one jaxpr whose inputs are the equation's, or None."""
    inner = [opened(jaxpr) for jaxpr, _ in inner_jaxprs(eqn)]
    return inner[0] if len(inner) == 1 and len(inner[0].invars) == len(eqn.invars) else None


def _reader_of(eqn: Any, again: bool) -> Reader:
    name = eqn.primitive.name
    place = module_of(scopes(eqn)) or user_line(eqn).partition(" ")[0]
    return Reader("matmul" if name in MATMULS else name, place, again)
