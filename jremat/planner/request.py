"""A request: a spec that is no policy until the planner knows the block and its shapes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from jremat.policy import NeedsShapes, PolicyLike


@dataclass(frozen=True, repr=False)
class Request(NeedsShapes):
    """A request that needs shapes before it is a policy: ``sqrt``, ``auto:60GiB``, ``budget:0.4``, ``overhead:0.03``.

    Inert data: the planner is imported when ``resolve`` is called.

    Args:
        kind: ``sqrt``, ``auto``, ``budget`` or ``overhead``.
        amount: bytes for ``auto`` (None: the device's own memory, less a margin), a fraction for ``budget`` and
            ``overhead``.
        label: the spec it came from; not compared.

    >>> Request("budget", 0.4, label="budget:0.4").spec
    'budget:0.4'
    """

    def resolve(self, block: Callable[..., Any], *args: Any, num_layers: int, **options: Any) -> PolicyLike:
        """The policy or plan that is requested, at the shapes of ``args``.

        Args:
            block: ``block(layer_parameters, carry, *shared)`` to the next carry.
            args: its arguments, arrays or ``jax.ShapeDtypeStruct``.
            num_layers: of the stack.
            options: ``target``, what the step is for, as ``jremat.compiled_memory`` takes it; ``step``, the whole
                training step under a plan, as ``jremat.plan`` takes it (default: the gradient of the layers alone); for
                ``auto`` ``compiles`` and the fields of ``jremat.PlanOptions``; for ``budget`` and ``overhead`` its
                ``keep`` and ``names_only``.

        Returns:
            ``sqrt``: groups of the size with the least traced peak. ``budget:B``: the choice of least time that keeps
            the share B of what lies between full remat and none. ``overhead:S``: the choice that keeps least among
            those that recompute at most the share S of the forward pass's matmul FLOPs. ``auto``: ``jremat.plan``'s.

        Raises:
            ValueError: an option that this request doesn't take; ``auto`` on a target whose memory is unknown; a
                memory that nothing fits.

        >>> import jax.numpy as jnp
        >>> w, x = jnp.ones((2, 16, 16)), jnp.ones((64, 16))
        >>> half = Request("budget", 0.5, label="budget:0.5")
        >>> policy = half.resolve(lambda w, x: jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]), w, x, num_layers=4, target="cpu")
        >>> len(policy.values)
        1
        """
        from jremat.planner.resolve import resolve  # loads JAX and the planner, which a spec doesn't need

        return cast(PolicyLike, resolve(self, block, *args, num_layers=num_layers, **options))
