"""Values in pinned host memory between the forward and the backward pass."""

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import jax

from jremat.graph.differentiate import is_inexact
from jremat.policy import OFFLOAD, SAVE, Decision, Policy

Which = TypeVar("Which")

BOUNDARY = "block_in"
"""The tag under which a policy speaks of a block's input, and so of a group's."""


def to_host(leaves: list[jax.Array]) -> list[jax.Array]:
    """The same values, floating ones in pinned host memory; integers and keys are small and stay."""
    return [jax.device_put(x, jax.memory.Space.Host) if is_inexact(x) else x for x in leaves]


def from_host(leaves: list[jax.Array]) -> list[jax.Array]:
    """The same values back in device memory."""
    return [jax.device_put(x, jax.memory.Space.Device) if is_inexact(x) else x for x in leaves]


def boundary_on_host(policy: Policy) -> bool:
    """Whether a policy sends a block's input to the host.

    >>> boundary_on_host(Policy.offload("block_in")), boundary_on_host(Policy.save("block_in"))
    (True, False)
    """
    return policy.decide(names=[BOUNDARY]) is OFFLOAD


def inside_group(policy: Policy) -> Policy:
    """What a group's replay keeps where the group's own input waits on the host.

    There and back within one replay would be a detour, so a layer's input stays on the device.
    """
    if not boundary_on_host(policy):
        return policy
    names = tuple((n, SAVE if n == BOUNDARY else d) for n, d in policy.names)
    return replace(policy, names=names, label=None)


def on_device(policy: Policy) -> Policy:
    """The same policy, with what it sends to the host kept on the device.

    >>> on_device(Policy.save("a") | Policy.offload("b"))
    policies.get('save:a,b')
    """
    if not policy.offloads:
        return policy
    names, families, values = _kept(policy.names), _kept(policy.families), _kept(policy.values)
    default = SAVE if policy.default is OFFLOAD else policy.default
    return replace(policy, names=names, families=families, values=values, default=default, label=None)


def _kept(rules: Iterable[tuple[Which, Decision]]) -> tuple[tuple[Which, Decision], ...]:
    return tuple((which, SAVE if decision is OFFLOAD else decision) for which, decision in rules)


def warn_where_ignored(policies: Iterable[Policy]) -> None:
    """A warning where the default backend keeps one kind of memory only, so that an offload moves nothing."""
    chosen = sorted({p.spec for p in policies if p.offloads})
    if chosen and jax.default_backend() == "cpu":
        warnings.warn(
            f"policy: {', '.join(chosen)} offloads to pinned_host, which the cpu backend ignores: nothing moves and no "
            "memory is saved there (a program compiled for a GPU or TPU target does move it)",
            UserWarning,
            stacklevel=3,
        )
