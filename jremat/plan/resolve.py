"""A request, which needs shapes, made a policy or a plan."""

from collections.abc import Callable
from typing import Any

from jremat.measure import Target, memory
from jremat.policy import LayerPlan, Policy, Request
from jremat.transform.groups import best_group, every_k


def resolve(
    request: Request,
    block: Callable[..., Any],
    *args: Any,
    num_layers: int,
    target: str | Target = "cpu",
    **options: Any,
) -> Policy | LayerPlan:
    """The policy or plan that ``request`` asks for, at the shapes of ``args``.

    Args:
        request: ``sqrt``, from ``policies.get``.
        block: ``block(layer_parameters, carry, *shared)`` to the next carry.
        args: its arguments, arrays or ``jax.ShapeDtypeStruct``.
        num_layers: of the stack.
        target: what the peaks are compiled for, see ``jremat.measure.target``.
        options: of ``jremat.measure.memory``.

    Returns:
        For ``sqrt``: ``every_k`` with the group of least compiled peak.

    Raises:
        ValueError: a kind of request that is not built yet.
    """
    if request.kind != "sqrt":
        raise ValueError(f"request: expected kind 'sqrt', the only one that is built so far, got {request.kind!r}")

    def peak(step: Callable[..., Any], *shapes: Any) -> int:
        return memory(step, *shapes, target=target, num_buffers=0, **options).peak_bytes

    return every_k(best_group(block, num_layers, *args, peak=peak))
