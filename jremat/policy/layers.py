"""Which policy for which layer: plans over a stack of equal blocks, as data."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, overload

from jremat.policy.policy import Policy


@dataclass(frozen=True)
class Segment:
    """Consecutive layers under one repeated pattern of policies.

    Args:
        pattern: one policy per layer of the pattern.
        repeats: how often the pattern is repeated, at least 1; None: for all layers that are left, the last repeat cut
            short where they don't divide.
        group: only the input of every ``group``-th layer is kept; a group is replayed from it in the backward pass,
            and the pattern's policy decides what the replay keeps. 1: every layer stands alone, no replay but its own.
        slots: the inputs kept at any one time by a binomial (Revolve) schedule, the segment's own input among them;
            None: no schedule.
    """

    pattern: tuple[Policy, ...]
    repeats: int | None = None
    group: int = 1
    slots: int | None = None

    def __post_init__(self) -> None:
        if not self.pattern:
            raise ValueError("pattern: expected at least one policy, got none")
        for name, value in (("repeats", self.repeats), ("group", self.group), ("slots", self.slots)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if self.slots is not None and self.group != 1:
            raise ValueError(f"slots: a schedule takes no groups, got group={self.group} and slots={self.slots}")

    @property
    def num_layers(self) -> int:
        """Layers of a closed segment."""
        assert self.repeats is not None, "a resolved segment is closed"
        return len(self.pattern) * self.repeats

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Layers of each group of a closed segment, first layer first; the last is short where they don't divide."""
        whole, rest = divmod(self.num_layers, self.group)
        return (self.group,) * whole + ((rest,) if rest else ())


class _BySpec:
    """What prints as the spec that it came from."""

    label: str

    @property
    def spec(self) -> str:
        """The spec that ``policies.get`` reads back to an equal one."""
        return self.label

    def __str__(self) -> str:
        return self.label

    def __repr__(self) -> str:
        return f"policies.get({self.label!r})"


@dataclass(frozen=True, repr=False)
class LayerPlan(_BySpec):
    """A policy for each layer of a stack, as a list of segments, first layer first.

    Only the last segment may be open (``repeats=None``). A plan is not a JAX policy: hand it to the stack.

    Args:
        segments: at least one.
        label: the spec it came from; not compared.

    Raises:
        ValueError: no segment, or one that is open and not the last.

    >>> from jremat.policy.policy import FULL, NONE
    >>> plan = LayerPlan((Segment((FULL,), repeats=2), Segment((NONE,))), label="block:2")
    >>> [segment.num_layers for segment in plan.resolve(5)]
    [2, 3]
    >>> [str(p) for p in plan.policies(3)]
    ['full', 'full', 'none']
    """

    segments: tuple[Segment, ...]
    label: str = field(compare=False)

    def __post_init__(self) -> None:
        if not self.segments:
            raise ValueError("segments: expected at least one, got none")
        if any(segment.repeats is None for segment in self.segments[:-1]):
            raise ValueError("segments: only the last may be open (repeats=None)")

    def resolve(self, num_layers: int) -> tuple[Segment, ...]:
        """The same plan for a stack of ``num_layers``: every segment closed, a pattern cut short as one of its own.

        Raises:
            ValueError: the segments name more layers than there are, or fewer with none open; a policy was planned for
                another number of layers.
        """
        if num_layers < 1:
            raise ValueError(f"num_layers: expected at least 1, got {num_layers}")
        for policy in (policy for segment in self.segments for policy in segment.pattern):
            if policy.planned_for and (problem := policy.planned_for.layers_problem(num_layers)):
                raise ValueError(f"num_layers: {problem}")
        closed: list[Segment] = []
        left = num_layers
        for segment in self.segments:
            length = len(segment.pattern)
            repeats = left // length if segment.repeats is None else segment.repeats
            if repeats * length > left:
                total = sum(len(s.pattern) * (s.repeats or 0) for s in self.segments)
                raise ValueError(f"num_layers: {self.label!r} names {total} layers, the stack has {num_layers}")
            if repeats:
                closed.append(Segment(segment.pattern, repeats, segment.group, segment.slots))
            left -= repeats * length
            if segment.repeats is None and left:
                closed.append(Segment(segment.pattern[:left], 1, segment.group, segment.slots))
                left = 0
        if left:
            raise ValueError(f"num_layers: {self.label!r} names {num_layers - left} layers, the stack has {num_layers}")
        return tuple(closed)

    def placed(self, num_layers: int) -> tuple[tuple[int, Segment], ...]:
        """The closed segments, each with its first layer.

        >>> from jremat.policy.policy import FULL, NONE
        >>> plan = LayerPlan((Segment((FULL,), repeats=2), Segment((NONE,))), label="block:2")
        >>> [first for first, _ in plan.placed(5)]
        [0, 2]
        """
        segments = self.resolve(num_layers)
        ends = itertools.accumulate(segment.num_layers for segment in segments)
        return tuple((end - segment.num_layers, segment) for end, segment in zip(ends, segments))

    def policies(self, num_layers: int) -> tuple[Policy, ...]:
        """The policy of each layer, first layer first."""
        return tuple(p for s in self.resolve(num_layers) for p in s.pattern * (s.repeats or 0))

    def uniform(self, num_layers: int) -> Policy | None:
        """The one policy of all layers, where there is one and no layer is grouped or scheduled, else None.

        >>> from jremat.policy.policy import FULL
        >>> LayerPlan((Segment((FULL,), group=2),), label="every_k:2,full").uniform(4) is None
        True
        """
        segments = self.resolve(num_layers)
        policies = set(self.policies(num_layers))
        plain = all(segment.group == 1 and segment.slots is None for segment in segments)
        return policies.pop() if plain and len(policies) == 1 else None

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            f"policy: {self.label!r} is a plan for a stack of layers, not for one block; give it to the stack: "
            "jremat.stack(block, plan, num_layers=L), jremat.scan_layers(Block, plan, ...) in the place of nn.scan, or "
            "the transformer's own stack"
        )


@dataclass(frozen=True, repr=False)
class NeedsShapes(_BySpec):
    """What is no policy until shapes are known: the data of ``jremat.Request``, for those that can only refuse one.

    Args:
        kind: ``sqrt``, ``auto``, ``budget`` or ``overhead``.
        amount: bytes for ``auto`` (None: the device's own memory, less a margin), a fraction for ``budget`` and
            ``overhead``.
        label: the spec it came from; not compared.
    """

    kind: str
    amount: float | None = None
    label: str = field(default="", compare=False)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            f"policy: {self.label!r} needs shapes before it is a policy; "
            "call policies.get(spec).resolve(block, *args, num_layers=L) first"
        )


if TYPE_CHECKING:

    class PolicyLike(Any):
        """A ``Policy``, a ``LayerPlan`` or a ``jremat.Request``: which one is in the spec, which no type checker reads.

        To a type checker it is accepted as each of the three, and ``isinstance`` tells them apart.
        """

        spec: str

        def policies(self, num_layers: int) -> tuple[Policy, ...]: ...

        @overload  # of a plan
        def resolve(self, num_layers: int) -> tuple[Segment, ...]: ...

        @overload  # of a request
        def resolve(self, block: Callable[..., Any], *args: Any, num_layers: int, **options: Any) -> "PolicyLike": ...

        def resolve(self, *args: Any, num_layers: int = 0, **options: Any) -> Any: ...

else:
    PolicyLike = Policy | LayerPlan | NeedsShapes
