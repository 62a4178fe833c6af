"""A linear map whose transpose is computed another way: one derivative for forward mode and one for reverse mode.

``jax.custom_vjp`` has no forward mode. Here a function's tangents are one equation: evaluated where JAX runs forward
mode, transposed where it runs reverse mode. The way not taken isn't even traced.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.interpreters import ad, batching

from jremat.jax_internals import batched_type, new_primitive

Leaves = list[jax.Array]


@dataclass(frozen=True, eq=False)
class LinearMap:
    """Both directions of one map, which may read fixed values.

    Args:
        push: (fixed, tangents) to tangents, linear in these.
        pull: (fixed, cotangents) to cotangents: its transpose.
    """

    push: Callable[[Leaves, Leaves], Leaves]
    pull: Callable[[Leaves, Leaves], Leaves]

    def __call__(self, fixed: Leaves, tangents: Leaves, like: Sequence[jax.Array]) -> Leaves:
        """Tangents of the types of ``like``.

        >>> double = LinearMap(lambda _, t: [2 * t[0]], lambda _, ct: [2 * ct[0]])
        >>> run = lambda x: double([], [x], [x])[0]
        >>> float(run(3.0)), float(jax.linear_transpose(run, 0.0)(1.0)[0])
        (6.0, 2.0)
        """
        types = tuple(jax.typeof(x) for x in like)
        return _MAP.bind(*fixed, *tangents, both=self, num_fixed=len(fixed), types=types)


def _evaluate(*args: Any, both: LinearMap, num_fixed: int, types: Any) -> Leaves:
    return both.push(list(args[:num_fixed]), list(args[num_fixed:]))


def _transpose(cts: Any, *args: Any, both: LinearMap, num_fixed: int, types: Any) -> list[Any]:
    gradients = both.pull(list(args[:num_fixed]), [ad.instantiate_zeros(ct) for ct in cts])
    return [None] * num_fixed + list(gradients)


def _jvp(primals: Any, tangents: Any, *, both: LinearMap, num_fixed: int, types: Any) -> tuple[Leaves, Leaves]:
    apply = functools.partial(_MAP.bind, both=both, num_fixed=num_fixed, types=types)
    moved = [ad.instantiate_zeros(t) for t in tangents]
    if any(type(t) is not ad.Zero for t in tangents[:num_fixed]):  # of what it reads: JAX looks into it
        return jax.jvp(lambda *args: both.push(list(args[:num_fixed]), list(args[num_fixed:])), primals, tuple(moved))
    return apply(*primals), apply(*primals[:num_fixed], *moved[num_fixed:])


def _batch(axis: Any, args: Any, dims: Any, *, both: LinearMap, num_fixed: int, types: Any) -> tuple[Leaves, list[int]]:
    """Every tangent gets the axis: what it is broadcast from gets the sum back."""
    over = {"axis_size": axis.size, "axis_name": axis.name, "spmd_axis_name": axis.spmd_name}
    mapped = LinearMap(
        jax.vmap(both.push, in_axes=(list(dims[:num_fixed]), 0), **over),
        jax.vmap(both.pull, in_axes=(list(dims[:num_fixed]), 0), **over),
    )
    tangents = [batching.bdim_at_front(x, d, axis.size) for x, d in zip(args[num_fixed:], dims[num_fixed:])]
    made = tuple(batched_type(t, axis) for t in types)
    outs = _MAP.bind(*args[:num_fixed], *tangents, both=mapped, num_fixed=num_fixed, types=made)
    return outs, [0] * len(outs)


_MAP = new_primitive("linear_map", _evaluate, lambda *_, types, **__: list(types), _jvp, _transpose, _batch)
