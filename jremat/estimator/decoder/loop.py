"""A counted loop that remat can't look into."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Carry = TypeVar("Carry")


def counted(length: int, body: Callable[[jax.Array, Carry], Carry], carry: Carry) -> Carry:
    """``body(i, carry)`` for i from 0 to ``length`` - 1.

    A ``lax.scan`` in a custom_vjp's forward lends its body to every policy: ``dots_saveable`` then stacks the scores of
    all blocks, the s × s array that a blockwise kernel exists to avoid. A while loop is kept or rerun whole.
    Its counter is the first value carried and its bound a literal, so that the trip count can be read from the jaxpr.
    There is no reverse-mode through it: for use inside a custom_vjp's forward and backward only.

    Args:
        length: number of turns: a Python int, or letters.
        body: takes the turn's index (int32 scalar) and the carry, gives the carry.
        carry: any pytree of arrays.

    Returns:
        The last carry.

    >>> int(counted(4, lambda i, total: total + i, jnp.int32(0)))
    6
    """

    def turn(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        i, carry = state
        return i + 1, body(i, carry)

    return lax.while_loop(lambda state: state[0] < length, turn, (jnp.int32(0), carry))[1]
