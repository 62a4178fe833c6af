"""Plans over a stack of layers: one builder each."""

from jremat.policy import FULL, NONE, LayerPlan, Policy, Segment

MAX_LAYERS = 100_000
"""The longest pattern or count that a spec may ask for: a pattern is a list, so a slip of a few digits would fill
memory. No published stack comes within a hundredth of it."""


def every_k(k: int, policy: Policy = NONE) -> LayerPlan:
    """Keeps the input of every ``k``-th layer only.

    A group of k layers is replayed once from its input in the backward pass, and ``policy`` decides what the replay
    keeps: ``none`` costs one extra forward with k layers' activations alive, ``full`` two with the least memory.

    Raises:
        ValueError: k below 1; or a policy beside k = 1, where a replay keeps nothing that it could decide on.

    >>> every_k(4).segments[0].group
    4
    >>> every_k(1).policies(3) == (FULL, FULL, FULL)
    True
    """
    _count("K", k, 1)
    label = f"every_k:{k}" if policy == NONE else f"every_k:{k},{_inner(policy)}"
    if k > 1:
        return LayerPlan((Segment((policy,), group=k),), label=label)
    if policy not in (NONE, FULL):
        raise ValueError(
            f"policy: {label!r} would not use {str(policy)!r}: a group of one layer is that layer's own remat; "
            f"write {str(policy)!r} alone, or 'full'"
        )
    return LayerPlan((Segment((FULL,)),), label=label)


def alternate(k: int) -> LayerPlan:
    """Remats layers with i % k == 0 and keeps the rest; k = 0: keeps all.

    >>> [str(p) for p in alternate(3).policies(5)]
    ['full', 'none', 'none', 'full', 'none']
    """
    _count("K", k, 0)
    pattern = (FULL, *(NONE,) * (k - 1)) if k else (NONE,)
    return LayerPlan((Segment(pattern),), label=f"alternate:{k}")


def torchtitan(k: int) -> LayerPlan:
    """Remats layers with (i + 1) % k == 0 and keeps the rest.

    >>> [str(p) for p in torchtitan(3).policies(5)]
    ['none', 'none', 'full', 'none', 'none']
    """
    _count("K", k, 1)
    return LayerPlan((Segment((*(NONE,) * (k - 1), FULL)),), label=f"torchtitan:{k}")


def block(n: int, policy: Policy = FULL) -> LayerPlan:
    """Puts ``policy`` on the first n layers and keeps the rest.

    >>> [str(p) for p in block(2).policies(3)]
    ['full', 'full', 'none']
    """
    _count("N", n, 0)
    label = f"block:{n}" if policy == FULL else f"block:{n},{_inner(policy)}"
    first = (Segment((policy,), repeats=n),) if n else ()
    return LayerPlan((*first, Segment((NONE,))), label=label)


def revolve(slots: int) -> LayerPlan:
    """The binomial schedule: at most ``slots`` layer inputs are kept at any one time, the stack's own among them.

    The input takes a slot for as long as the backward pass lasts; the working state, the input of the layer that is
    being run, takes none, so slots + 1 states are alive while a layer is replayed. A layer's backward runs it once more
    from its input and keeps all of it meanwhile.

    >>> revolve(3).segments[0].slots
    3
    """
    _count("SLOTS", slots, 1)
    return LayerPlan((Segment((NONE,), slots=slots),), label=f"revolve:{slots}")


def mix(*parts: tuple[int | None, Policy | LayerPlan]) -> LayerPlan:
    """Segments, first layer first: each a number of layers and what they are under.

    Args:
        parts: (layers, policy). None for the last: all that are left. In a policy's place may stand a plan of one
            open segment, such as ``every_k(4)``.

    Raises:
        ValueError: no parts, a number below 1, or one that a plan's pattern doesn't divide.

    >>> mix((2, FULL), (None, NONE)) == block(2)
    True
    >>> mix((8, every_k(4)), (None, NONE)).spec
    'mix:8*every_k:4,rest*none'
    """
    if not parts:
        raise ValueError("policy: 'mix:' expected N*POLICY[,M*POLICY…], got none")
    label = ",".join(f"{'rest' if layers is None else layers}*{_inner(policy)}" for layers, policy in parts)
    segments = tuple(_segment(layers, policy) for layers, policy in parts)
    if any(segment.repeats is None for segment in segments[:-1]):
        raise ValueError(f"policy: 'mix:{label}' expected '*' or 'rest' as the last count only")
    return LayerPlan(segments, label=f"mix:{label}")


def _segment(layers: int | None, policy: Policy | LayerPlan) -> Segment:
    if layers is not None:
        _count("N", layers, 1)
    if isinstance(policy, Policy):
        return Segment((policy,), layers)
    if len(policy.segments) != 1:
        raise ValueError(f"policy: expected a plan of one kind inside 'mix:', got {str(policy)!r}; write its parts")
    (inner,) = policy.segments
    repeats, rest = (None, 0) if layers is None else divmod(layers, len(inner.pattern))
    if rest:
        raise ValueError(
            f"policy: expected a multiple of {len(inner.pattern)} layers for {str(policy)!r} in 'mix:', got {layers}"
        )
    return Segment(inner.pattern, repeats, inner.group, inner.slots)


def _count(name: str, value: int, least: int) -> None:
    if not least <= value <= MAX_LAYERS:
        raise ValueError(f"policy: expected {name} from {least} to {MAX_LAYERS}, got {value}")


def _inner(policy: Policy | LayerPlan) -> str:
    """A spec inside a list, where names join with + because the list's own items join with a comma."""
    return policy.spec.replace(",", "+")
