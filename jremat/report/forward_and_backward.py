"""A function and its backward pass as one program, in which what is kept can be followed to those who read it."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jremat.graph.arguments import Arguments, take_apart
from jremat.graph.differentiate import inexact_places, pullback
from jremat.graph.effects import refuse_refs
from jremat.graph.residuals import UNREAD, Origin, origin_of
from jremat.graph.trace import capture
from jremat.jax_internals import REMAT_SCOPE, TRANSPOSE_SCOPE, live, scopes


@dataclass(frozen=True, eq=False)
class BothWays:
    """Forward, backward and everything that goes from one to the other.

    Args:
        jaxpr: live; its inputs are the call's arrays, then the cotangents of its results.
        kept: where each value that the backward pass waits for was made, with the variables that hold it for it.
        backward: the equations of ``jaxpr`` that belong to the backward pass, by place.
        paths: of the call's arrays.
    """

    jaxpr: Any
    kept: tuple[tuple[Origin, tuple[Any, ...]], ...]
    backward: frozenset[int]
    paths: tuple[str, ...]

    @property
    def forward_equations(self) -> list[Any]:
        """Those of the forward pass."""
        return [eqn for k, eqn in enumerate(self.jaxpr.eqns) if k not in self.backward]

    @property
    def backward_equations(self) -> list[Any]:
        """Those of the backward pass."""
        return [eqn for k, eqn in enumerate(self.jaxpr.eqns) if k in self.backward]


def both_ways(arguments: Arguments) -> BothWays:
    """Trace a call and its pullback together, differentiated by every floating-point array among its arguments.

    The residuals are those of ``jremat.graph.residuals``: the same pullback's leaves.
    """
    arrays = arguments.arrays
    active = inexact_places(arrays)
    forward = capture(arguments)
    refuse_refs(forward.jaxpr, forward.paths)
    given, out_tree = [var.aval for var in forward.jaxpr.outvars], forward.out_tree
    real = inexact_places(given)

    def run(*leaves: Any) -> Any:
        inputs, cotangents = leaves[: len(arrays)], dict(zip(real, leaves[len(arrays) :]))
        out, pull = pullback(arguments.call, inputs, active)
        none = [np.zeros(o.shape, jax.dtypes.float0) for o in given]
        gradients = pull(jax.tree.unflatten(out_tree, [cotangents.get(k, none[k]) for k in range(len(given))]))
        return out, gradients, jax.tree.leaves(pull)

    program = capture(take_apart(run, (*arrays, *(given[k] for k in real)), {}))
    jaxpr = live(program.jaxpr)
    leaves = jaxpr.outvars[len(given) + len(active) :]
    kept: dict[Any, tuple[Origin, tuple[Any, ...]]] = {}  # two leaves that are one value are kept once
    for var in leaves:
        if not isinstance(var, core.Literal):
            origin = origin_of(jaxpr, var)
            if origin.mark != UNREAD:
                kept[origin.key] = origin, (*kept.get(origin.key, (origin, ()))[1], var)
    return BothWays(jaxpr, tuple(kept.values()), _backward(jaxpr, len(arrays)), arguments.array_paths)


def _backward(jaxpr: Any, num_arrays: int) -> frozenset[int]:
    """What needs a cotangent, or stands under the scope of a transpose or of a recompute."""
    needs, found = set(jaxpr.invars[num_arrays:]), set()
    for k, eqn in enumerate(jaxpr.eqns):
        around = scopes(eqn)
        scoped = TRANSPOSE_SCOPE in around or REMAT_SCOPE in around
        if scoped or any(var in needs for var in eqn.invars if not isinstance(var, core.Literal)):
            needs |= set(eqn.outvars)
            found.add(k)
    return frozenset(found)
