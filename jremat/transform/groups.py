"""How many layers to a group: the number with the least peak, found by asking, not by the formula."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jremat.graph.arguments import arrays_alone
from jremat.policy import FULL, NONE, LayerPlan, Policy, Segment
from jremat.transform.chain import stack


@dataclass(frozen=True)
class GroupPeak:
    """Peak memory of a stack in groups.

    Args:
        group: layers of a group.
        peak_bytes: of the gradient step, as ``peak`` gave it.
    """

    group: int
    peak_bytes: int


def group_sizes(num_layers: int) -> tuple[int, ...]:
    """The group sizes that can be best: for each number of groups the smallest.

    A larger group of as many groups holds as many boundaries and replays more layers at once. There are about 2 √L.

    Raises:
        ValueError: no layers.

    >>> group_sizes(16)
    (1, 2, 3, 4, 6, 8, 16)
    """
    if num_layers < 1:
        raise ValueError(f"num_layers: expected at least 1, got {num_layers}")
    return tuple(sorted({-(-num_layers // groups) for groups in range(1, num_layers + 1)}))


def group_peaks(
    block: Callable[..., Any],
    num_layers: int,
    *args: Any,
    peak: Callable[..., int],
    policy: Policy = NONE,
    sizes: tuple[int, ...] | None = None,
) -> tuple[GroupPeak, ...]:
    """Peak memory as a function of the group size: nothing is run.

    Args:
        block: ``block(layer_parameters, carry, *shared)`` to the next carry.
        num_layers: L.
        args: the arguments of one block, arrays or ``jax.ShapeDtypeStruct``.
        peak: ``peak(step, *shapes)`` to bytes, for a gradient step of the whole stack; e.g.
            ``lambda step, *shapes: jremat.measure.compiled_memory(step, *shapes, target="h200").peak_bytes``.
        policy: what a group's replay keeps.
        sizes: to try; None: ``group_sizes(num_layers)``.

    Returns:
        One figure per size, in their order.
    """
    block, given = arrays_alone(block, args)
    layer, *rest = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), given)
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_layers, *leaf.shape), leaf.dtype), layer)
    sizes = group_sizes(num_layers) if sizes is None else sizes
    steps = {size: gradient_step(stack(block, every_k(size, policy), num_layers=num_layers)) for size in sizes}
    return tuple(GroupPeak(size, peak(step, stacked, *rest)) for size, step in steps.items())


def best_group(
    block: Callable[..., Any], num_layers: int, *args: Any, peak: Callable[..., int], policy: Policy = NONE
) -> int:
    """The group size of least peak memory; of equal ones the smallest.

    Args:
        block, num_layers, args, peak, policy: as of ``group_peaks``.

    >>> weights, x = jnp.ones((8, 8)), jnp.ones((2, 8))
    >>> best_group(lambda w, x: jnp.tanh(x @ w), 9, weights, x, peak=lambda step, w, x: 0)
    1

    Source: Chen et al. 2016, arXiv 1604.06174, section 4.1, whose √L this replaces.
    """
    peaks = group_peaks(block, num_layers, *args, peak=peak, policy=policy)
    return min(peaks, key=lambda found: (found.peak_bytes, found.group)).group


def every_k(group: int, policy: Policy = NONE) -> LayerPlan:
    """Groups of ``group`` layers, replayed under ``policy``; a group of one layer is that layer's own remat."""
    if group == 1:
        return LayerPlan((Segment((FULL,)),), label="every_k:1")
    label = f"every_k:{group}" if policy == NONE else f"every_k:{group},{policy.spec}"
    return LayerPlan((Segment((policy,), group=group),), label=label)


def gradient_step(run: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of the mean of ``run``'s result, by every real leaf of its parameters and its carry."""

    def step(parameters: Any, carry: Any, *shared: Any) -> Any:
        leaves, tree = jax.tree.flatten((parameters, carry))
        real = [k for k, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

        def loss(*chosen: Any) -> jax.Array:
            filled = list(leaves)
            for k, leaf in zip(real, chosen):
                filled[k] = leaf
            out = run(*jax.tree.unflatten(tree, filled), *shared)
            return sum(
                x.astype(jnp.float32).mean() for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.inexact)
            )

        return jax.value_and_grad(loss, argnums=tuple(range(len(real))))(*(leaves[k] for k in real))

    return step
