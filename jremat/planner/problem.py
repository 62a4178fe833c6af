"""What a planner chooses from: the forward program of one block, as data."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Node:
    """One operation of a block's forward program, residuals of its derivative rules included.

    Args:
        reads: places, in the problem, of the operations whose results it reads; inputs are free and left out.
        nbytes: of its result.
        seconds: that a second run of it costs; or FLOPs, where those are the objective.
        matmul_flops: of that run.
        needed: whether the backward pass reads its result.
        by_default: whether a policy that keeps everything keeps it, though it may bear no mark: what the backward pass
            reads and isn't made from a layer's parameters alone.
        is_tag: whether its result is what it reads, under a tag.
        mark: the name under which its result can be kept; None where it can't be. Nodes of one mark are kept together.
        value: the id in the block's graph under which a policy decides about it.
        name: the user's tag, or None.
        forced: its result must not be recomputed (a router's choice): kept wherever it is read.
        source: the user's line.
        primitive: JAX's name of the operation.
    """

    reads: tuple[int, ...]
    nbytes: int
    seconds: float
    matmul_flops: int = 0
    needed: bool = False
    by_default: bool = False
    is_tag: bool = False
    mark: str | None = None
    value: str = ""
    name: str | None = None
    forced: bool = False
    source: str = ""
    primitive: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a choice of kept values comes to, in one block.

    Args:
        kept, offloaded: marks of what is really kept: what the backward pass or a recompute reads.
        kept_bytes, host_bytes: of it.
        recompute_seconds: in the unit of ``Node.seconds``; transfers that don't hide included.
        recompute_flops: of matmuls.
        recomputed: places of the nodes that are run again.
        held: places of the nodes whose results are kept.
    """

    kept: frozenset[str]
    offloaded: frozenset[str]
    kept_bytes: int
    host_bytes: int
    recompute_seconds: float
    recompute_flops: int
    recomputed: tuple[int, ...]
    held: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Kept on device and host."""
        return self.kept_bytes + self.host_bytes


@dataclass(frozen=True)
class Link:
    """The road to the host's memory, for values that are offloaded.

    A transfer hides behind the pass that it runs beside; what is longer than the pass is time lost.

    Args:
        bytes_per_second: one direction.
        forward_seconds, backward_seconds: of one block without recompute, behind which a transfer hides.
    """

    bytes_per_second: float
    forward_seconds: float
    backward_seconds: float

    def lost_seconds(self, nbytes: int) -> float:
        """Time that moving ``nbytes`` out in the forward pass and back in the backward adds to the step.

        >>> Link(10.0, 2.0, 3.0).lost_seconds(25)
        0.5
        """
        took = nbytes / self.bytes_per_second
        return max(0.0, took - self.forward_seconds) + max(0.0, took - self.backward_seconds)


@dataclass(frozen=True)
class Problem:
    """One block as a choice: which of its values to keep for the backward pass.

    Args:
        nodes: in program order; each reads earlier ones only.
        fingerprint: of the block's graph, which ``Node.value`` speaks of.
        link: to the host, or None where nothing can be offloaded.
        aliases: pairs of marks of one value under several tags: (mark, the mark that a node bears).
    """

    nodes: tuple[Node, ...]
    fingerprint: str = ""
    link: Link | None = None
    aliases: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for place, node in enumerate(self.nodes):
            if any(not 0 <= read < place for read in node.reads):
                raise ValueError(f"nodes: node {place} reads {node.reads}; expected earlier nodes only")
            if node.nbytes < 0 or node.seconds < 0:
                raise ValueError(f"nodes: node {place} has negative bytes or seconds")

    @cached_property
    def marks(self) -> dict[str, tuple[int, ...]]:
        """Each mark with the places that bear it, in program order."""
        found: dict[str, list[int]] = {}
        for place, node in enumerate(self.nodes):
            if node.mark is not None:
                found.setdefault(node.mark, []).append(place)
        return {mark: tuple(places) for mark, places in found.items()}

    def outcome(self, kept: Iterable[str], offloaded: Iterable[str] = (), by_default: bool = False) -> Outcome:
        """What keeping the values of these marks comes to: the recompute is the least that the backward pass needs.

        Args:
            kept, offloaded: marks; those that no node bears are left out of account.
            by_default: whether all that is kept by default is kept too.

        >>> chain = Problem((Node((), 8, 2.0, mark="a"), Node((0,), 4, 3.0, mark="b"), Node((1,), 4, 5.0, needed=True)))
        >>> [chain.outcome(kept).recompute_seconds for kept in ((), ("a",), ("b",))]
        [10.0, 8.0, 5.0]
        >>> chain.outcome({"a", "b"}).kept_bytes  # what b makes needless isn't kept
        4
        """
        borne = dict(self.aliases)
        return self._closure(
            [node.needed for node in self.nodes],
            frozenset(borne.get(mark, mark) for mark in kept),
            frozenset(borne.get(mark, mark) for mark in offloaded),
            by_default,
        )

    def remake(self, outcome: Outcome) -> Outcome:
        """What it takes to recompute all that ``outcome`` keeps, where nothing is kept."""
        held = set(outcome.held)
        return self._closure([place in held for place in range(len(self.nodes))], frozenset(), frozenset())

    def _closure(
        self, wanted: list[bool], kept: frozenset[str], moved: frozenset[str], by_default: bool = False
    ) -> Outcome:
        """The least that makes what is wanted.

        Args:
            wanted: per node; overwritten.
        """
        again: list[int] = []
        stays: list[int] = []
        goes: list[int] = []
        for place in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[place]
            if not wanted[place]:
                continue
            if by_default and node.is_tag and self.nodes[node.reads[0]].by_default:
                wanted[node.reads[0]] = True  # the same array, kept already
            elif node.mark in moved:
                goes.append(place)
            elif node.mark in kept or (by_default and node.by_default):
                stays.append(place)
            else:
                again.append(place)
                for read in node.reads:
                    wanted[read] = True
        size = lambda places: sum(self.nodes[p].nbytes for p in places)
        marks = lambda places: frozenset(m for p in places if (m := self.nodes[p].mark) is not None)
        return Outcome(
            marks(stays),
            marks(goes),
            kept_bytes=size(stays),
            host_bytes=size(goes),
            recompute_seconds=sum(self.nodes[p].seconds for p in again)
            + (self.link.lost_seconds(size(goes)) if self.link else 0.0),
            recompute_flops=sum(self.nodes[p].matmul_flops for p in again),
            recomputed=tuple(reversed(again)),
            held=tuple(sorted((*stays, *goes))),
        )
