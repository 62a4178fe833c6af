"""A linear map whose transpose is computed another way: one derivative for forward mode and one for reverse mode.

``jax.custom_vjp`` has no forward mode. Here a function's tangents are one equation: evaluated where JAX runs forward
mode, transposed where it runs reverse mode. Neither way costs the other anything: it isn't even traced, and what the
forward direction alone reads isn't kept for the backward one.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from jremat.graph.trace import batched_type

Leaves = list[jax.Array]


@dataclass(frozen=True, eq=False)
class LinearMap:
    """Both directions of one map, which may read fixed values.

    Args:
        push: (fixed, spare, tangents) to tangents, linear in these.
        pull: (fixed, cotangents) to cotangents: its transpose. It reads no spare values.
    """

    push: Callable[[Leaves, Leaves, Leaves], Leaves]
    pull: Callable[[Leaves, Leaves], Leaves]

    def __call__(self, fixed: Leaves, spare: Leaves, tangents: Leaves, like: Sequence[jax.Array]) -> Leaves:
        """Tangents of the types of ``like``.

        >>> double = LinearMap(lambda _, spare, t: [2 * t[0]], lambda _, ct: [2 * ct[0]])
        >>> run = lambda x: double([], [], [x], [x])[0]
        >>> float(run(3.0)), float(jax.linear_transpose(run, 0.0)(1.0)[0])
        (6.0, 2.0)
        """
        types = tuple(jax.typeof(x) for x in like)
        sizes = len(fixed), len(spare)
        return _MAP.bind(*fixed, *spare, *tangents, both=self, sizes=sizes, types=types)

    def pushed(self, fixed: Leaves, spare: Leaves, tangents: Leaves, types: Sequence[Any]) -> Leaves:
        """The forward direction where what it reads was dropped: the transpose of the transpose."""
        zeros = [jnp.zeros(t.shape, t.dtype) for t in types]
        return jax.linear_transpose(lambda cts: self.pull(fixed, cts), zeros)(tangents)[0]


def _parts(args: Sequence[Any], sizes: tuple[int, int]) -> tuple[list[Any], list[Any], list[Any]]:
    fixed, spare = sizes
    return list(args[:fixed]), list(args[fixed : fixed + spare]), list(args[fixed + spare :])


def _evaluate(*args: Any, both: LinearMap, sizes: tuple[int, int], types: Any) -> Leaves:
    return both.push(*_parts(args, sizes))


def _transpose(cts: Any, *args: Any, both: LinearMap, sizes: tuple[int, int], types: Any) -> list[Any]:
    fixed, spare, _ = _parts(args, sizes)
    gradients = both.pull(fixed, [ad.instantiate_zeros(ct) for ct in cts])
    return [None] * (len(fixed) + len(spare)) + list(gradients)


def _jvp(primals: Any, tangents: Any, *, both: LinearMap, sizes: tuple[int, int], types: Any) -> tuple[Leaves, Leaves]:
    read = sum(sizes)
    apply = functools.partial(_MAP.bind, both=both, sizes=sizes, types=types)
    moved = [ad.instantiate_zeros(t) for t in tangents]
    if any(type(t) is not ad.Zero for t in tangents[:read]):  # of what it reads: JAX looks into it
        return jax.jvp(functools.partial(_evaluate, both=both, sizes=sizes, types=types), primals, tuple(moved))
    return apply(*primals), apply(*primals[:read], *moved[read:])


def _partial_eval(trace: Any, *tracers: Any, both: LinearMap, sizes: tuple[int, int], types: Any) -> Any:
    """Where the tangents come later, as in reverse mode, the spare values are dropped."""
    fixed, spare, tangents = _parts(tracers, sizes)
    later = not all(t.is_known() for t in tangents)
    if spare and later and all(t.is_known() for t in (*fixed, *spare)):
        both = LinearMap(functools.partial(both.pushed, types=types), both.pull)
        spare = []
    params = {"both": both, "sizes": (len(fixed), len(spare)), "types": types}
    return trace.default_process_primitive(_MAP, [*fixed, *spare, *tangents], params)


def _batch(
    axis: Any, args: Any, dims: Any, *, both: LinearMap, sizes: tuple[int, int], types: Any
) -> tuple[Leaves, list[int]]:
    """Every tangent gets the axis: what it is broadcast from gets the sum back."""
    over = {"axis_size": axis.size, "axis_name": axis.name, "spmd_axis_name": axis.spmd_name}
    (*read, tangents), (fixed_dims, spare_dims, own_dims) = _parts(args, sizes), _parts(dims, sizes)
    mapped = LinearMap(
        jax.vmap(both.push, in_axes=(fixed_dims, spare_dims, 0), **over),
        jax.vmap(both.pull, in_axes=(fixed_dims, 0), **over),
    )
    tangents = [batching.bdim_at_front(x, d, axis.size) for x, d in zip(tangents, own_dims)]
    made = tuple(batched_type(t, axis) for t in types)
    outs = _MAP.bind(*read[0], *read[1], *tangents, both=mapped, sizes=sizes, types=made)
    return outs, [0] * len(outs)


_MAP = Primitive("linear_map")
_MAP.multiple_results = True
_MAP.def_impl(_evaluate)
_MAP.def_abstract_eval(lambda *_, types, **__: list(types))
mlir.register_lowering(_MAP, mlir.lower_fun(_evaluate, multiple_results=True))
ad.primitive_jvps[_MAP] = _jvp
ad.primitive_transposes[_MAP] = _transpose
batching.fancy_primitive_batchers[_MAP] = _batch
partial_eval.custom_partial_eval_rules[_MAP] = _partial_eval
