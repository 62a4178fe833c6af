"""The same stacks by ``jax.lax.scan`` and remat alone: every transformation of JAX, at the price of copies."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jremat.policy import LayerPlan, Policy, Segment
from jremat.transform.chain import resolved
from jremat.transform.checkpoint import checkpoint
from jremat.transform.flat import check_lengths

Block = Callable[..., Any]


def scan_stack(block: Block, plan: LayerPlan | Policy, *, num_layers: int) -> Callable[..., Any]:
    """``chain.stack`` by scans: takes the same arguments and gives the same values and gradients.

    Kept and recomputed is what the plan says. Forward mode, second derivatives and per-layer policies all work. One
    scan of one policy copies nothing; several segments slice the parameters and groups nest scans, and both copy
    parameters and gradients (temporaries of 1.5 to 2.4 times the chain's, compiled for an H200).

    Args:
        block, plan, num_layers: as of ``chain.stack``. A binomial schedule can't be a scan: its layers run in groups
            of num_layers / slots instead, and a warning says so.

    Returns:
        A function ``run(parameters, carry, *shared)`` to the last carry.

    Raises:
        ValueError: as ``chain.stack``.

    >>> from jremat.policy import FULL
    >>> run = scan_stack(lambda w, x: jnp.sin(x * w), FULL, num_layers=2)
    >>> _, slope = jax.jvp(lambda x: run(jnp.ones(2), x), (1.0,), (1.0,))  # forward mode
    >>> bool(jnp.allclose(slope, jnp.cos(jnp.sin(1.0)) * jnp.cos(1.0)))
    True
    """
    segments = resolved(plan, num_layers)

    def run(parameters: Any, carry: Any, *shared: Any) -> Any:
        check_lengths(parameters, num_layers)
        start = 0
        for segment in segments:
            length = len(segment.pattern) * (segment.repeats or 0)
            # The whole stack is scanned as it stands: slicing it would copy it.
            own = parameters if length == num_layers else _slice(parameters, start, start + length)
            carry = _segment(block, segment, own, carry, shared)
            start += length
        return carry

    return run


def _segment(block: Block, segment: Segment, parameters: Any, carry: Any, shared: tuple[Any, ...]) -> Any:
    pattern = segment.pattern
    length = len(pattern) * (segment.repeats or 0)
    group = segment.group
    if segment.slots is not None:
        group = -(-length // segment.slots)
        warnings.warn(
            f"plan: a scan can't follow a schedule of {segment.slots} slots; its layers run in groups of {group}",
            UserWarning,
            stacklevel=4,
        )
    if group == 1:
        return _pattern(block, pattern, parameters, carry, shared)
    whole, rest = divmod(length, group)

    def one(carry: Any, own: Any) -> tuple[Any, None]:
        replayed = jax.checkpoint(lambda own, carry: _pattern(block, pattern, own, carry, shared), prevent_cse=False)
        return replayed(own, carry), None

    if whole:
        grouped = jax.tree.map(lambda leaf: leaf[: whole * group].reshape(whole, group, *leaf.shape[1:]), parameters)
        carry, _ = lax.scan(one, carry, grouped)
    if rest:
        last = jax.checkpoint(lambda own, carry: _pattern(block, pattern, own, carry, shared))
        carry = last(_slice(parameters, whole * group, length), carry)
    return carry


def _pattern(block: Block, pattern: tuple[Policy, ...], parameters: Any, carry: Any, shared: tuple[Any, ...]) -> Any:
    """Layers under a repeated pattern, the last repeat cut short where they don't divide."""
    size = len(pattern)
    length = jnp.shape(jax.tree.leaves(parameters)[0])[0]
    whole, rest = divmod(length, size)

    def under(policy: Policy, *, alone: bool) -> Block:
        return checkpoint(block, policy, prevent_cse=alone)

    def turn(carry: Any, own: Any) -> tuple[Any, None]:
        for k, policy in enumerate(pattern):
            one = own if size == 1 else jax.tree.map(lambda leaf, k=k: leaf[k], own)
            carry = under(policy, alone=whole == 1)(one, carry, *shared)
        return carry, None

    if whole:
        rows = parameters
        if size > 1:
            rows = jax.tree.map(lambda leaf: leaf[: whole * size].reshape(whole, size, *leaf.shape[1:]), parameters)
        carry, _ = lax.scan(turn, carry, rows)
    for k in range(rest):
        one = jax.tree.map(lambda leaf, k=k: leaf[whole * size + k], parameters)
        carry = under(pattern[k], alone=True)(one, carry, *shared)
    return carry


def _slice(parameters: Any, start: int, stop: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[start:stop], parameters)
