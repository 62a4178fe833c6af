"""What a stack may run under, and what each way costs: mixes of the block's best choices, groups, schedules.

For one budget over equal layers two neighbouring choices of the convex frontier suffice, some layers under one and the
rest under the other: the linear program over shares of layers has one constraint beside "all layers", so a best corner
has at most two of them. The layers that keep least come first: the last ones are taken back first, and their memory is
free before the others'. Below what full remat needs come groups, then binomial schedules.

The very last layer's activations are all there when its backward pass begins, whatever its policy says. Where the peak
is there, keeping them costs nothing: so each mix is worth a second look with a last layer that recomputes nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from jremat.planner.block import Budget, best
from jremat.planner.cut import convex_frontier
from jremat.planner.problem import Outcome
from jremat.planner.read_block import Block
from jremat.policy import FULL, NONE, LayerPlan, Policy, Segment
from jremat.transform.groups import every_k, group_sizes
from jremat.transform.revolve import binomial_steps


@dataclass(frozen=True)
class Choice:
    """One way to run a stack.

    Args:
        plan: a policy for all layers, or a plan over them.
        kept_bytes: on the device, of all layers, over what full remat keeps: below 0 where even layer inputs are
            dropped. Orders choices; the peak is another matter.
        host_bytes: of all layers.
        recompute_seconds: of all layers, in the unit of the block's cost.
        recompute_flops: of all layers, matmuls.
    """

    plan: Policy | LayerPlan
    kept_bytes: int
    host_bytes: int
    recompute_seconds: float
    recompute_flops: int


@dataclass(frozen=True, eq=False)
class Stack:
    """Equal layers to plan.

    Args:
        block: one of them.
        num_layers: how many.
        carry_bytes: of what goes from layer to layer.
        fetch_seconds: that a further run of a layer waits for its parameters, where each of several devices holds a
            part of them. The recompute of one layer waits for nothing: its backward pass reads the same parameters.
    """

    block: Block
    num_layers: int
    carry_bytes: int
    fetch_seconds: float = 0.0

    def choice(self, plan: Policy | LayerPlan) -> Choice:
        """What a plan comes to, under the same costs as the planner's own.

        Raises:
            ValueError: the plan doesn't fit the layers, or a selector matches nothing in the block.
        """
        whole = LayerPlan((Segment((plan,)),), label=plan.spec) if isinstance(plan, Policy) else plan
        parts = [self._segment(segment) for segment in whole.resolve(self.num_layers)]
        kept, host, seconds, flops = (sum(column) for column in zip(*parts))
        return Choice(plan, int(kept), int(host), float(seconds), int(flops))

    def _segment(self, segment: Segment) -> tuple[int, int, float, int]:
        pattern, repeats = segment.pattern, segment.repeats or 0
        length = segment.num_layers
        outcomes = [self.block.outcome(policy) for policy in pattern]
        if segment.slots is not None:
            # The sweep's L - 1 steps are the forward pass itself; each layer is run once more before it is taken back.
            again = binomial_steps(length, segment.slots) - (length - 1)
            own = self._remade(outcomes[0])
            states = min(segment.slots, length)
            return (
                outcomes[0].kept_bytes + (states - length) * self.carry_bytes,
                0,
                again * self._run_seconds + length * (own.recompute_seconds + outcomes[0].recompute_seconds),
                again * self.block.forward_flops + length * (own.recompute_flops + outcomes[0].recompute_flops),
            )
        if segment.group > 1:
            groups, largest = len(segment.group_sizes), max(segment.group_sizes)
            cycle = outcomes * repeats
            ends = [self._remade(cycle[end - 1]) for end in accumulate(segment.group_sizes)]
            return (
                sum(o.kept_bytes for o in cycle[:largest]) + (groups + largest - length) * self.carry_bytes,
                sum(o.host_bytes for o in cycle[:largest]),
                sum(o.recompute_seconds for o in (*cycle, *ends)) + (length - groups) * self._run_seconds,
                sum(o.recompute_flops for o in (*cycle, *ends)) + (length - groups) * self.block.forward_flops,
            )
        return (
            repeats * sum(o.kept_bytes for o in outcomes),
            repeats * sum(o.host_bytes for o in outcomes),
            repeats * sum(o.recompute_seconds for o in outcomes),
            repeats * sum(o.recompute_flops for o in outcomes),
        )

    @property
    def _run_seconds(self) -> float:
        """A further run of a whole layer."""
        return self.block.forward_seconds + self.fetch_seconds

    def _remade(self, outcome: Outcome) -> Outcome:
        """What it takes to make what ``outcome`` keeps, where nothing was kept: a replay's last layer ends there."""
        return self.block.problem.remake(outcome)

    def choices(self, host_bytes: int = 0, groups: bool = True) -> tuple[Choice, ...]:
        """Every way worth a look, fastest first: each next one is slower and keeps less.

        Args:
            host_bytes: that may be kept on the host, of all layers.
            groups: whether layers may share a replay, which takes the executor of stacks.
        """
        found = [*self._mixes(host_bytes)]
        if groups and self.num_layers > 1:
            found += [self.choice(plan) for plan in self._below_full() if not self.repeats_a_decision(plan)]
        return _worth_a_look(found)

    def tailed(self, host_bytes: int = 0) -> tuple[Choice, ...]:
        """The mixes again, each with a last layer that recomputes nothing; none where there is one layer."""
        if self.num_layers == 1:
            return ()
        points = self._points(host_bytes)
        pairs = [(point, self.block.policy(point)) for point in points]
        tail = (1, *pairs[-1])
        layers = self.num_layers - 1
        found = [self._mixed((layers, *pair), tail) for pair in pairs[:-1]]
        for low, high in pairwise(pairs[:-1]):
            found += [self._mixed((first, *low), (layers - first, *high), tail) for first in range(1, layers)]
        return _worth_a_look(found)

    def with_tail(self, choice: Choice) -> Choice | None:
        """The same with a last layer that recomputes nothing.

        None where its last layer is such a one already, and of patterns, groups and schedules.
        """
        plan = choice.plan
        whole = LayerPlan((Segment((plan,)),), label=plan.spec) if isinstance(plan, Policy) else plan
        segments = whole.resolve(self.num_layers)
        if self.num_layers == 1 or any(s.group > 1 or s.slots is not None or len(s.pattern) > 1 for s in segments):
            return None
        tail = self._points(0)[-1]
        *first, (policy, layers) = [(s.pattern[0], s.repeats or 0) for s in segments]
        if self.block.outcome(policy).recompute_seconds <= tail.recompute_seconds:
            return None
        parts = [(layers, policy) for policy, layers in (*first, (policy, layers - 1)) if layers]
        return self.choice(mixed([*parts, (1, self.block.policy(tail))]))

    def repeats_a_decision(self, plan: Policy | LayerPlan) -> bool:
        """Whether a plan recomputes what must not be recomputed."""
        nodes = self.block.problem.nodes
        if not any(node.forced for node in nodes):
            return False
        segments = () if isinstance(plan, Policy) else plan.resolve(self.num_layers)
        if any(segment.group > 1 or segment.slots is not None for segment in segments):
            return True  # a replay runs whole layers
        policies = {plan} if isinstance(plan, Policy) else set(plan.policies(self.num_layers))
        return any(nodes[place].forced for policy in policies for place in self.block.outcome(policy).recomputed)

    def _mixes(self, host_bytes: int) -> Iterator[Choice]:
        yield from (self.choice(plan) for plan in (FULL, NONE) if not self.repeats_a_decision(plan))
        points = self._points(host_bytes)
        pairs = [(point, self.block.policy(point)) for point in points]
        for point, policy in pairs:
            yield self._mixed((self.num_layers, point, policy))
        if (
            not host_bytes // self.num_layers
        ):  # between the frontier's corners too: mixes are coarse where layers are few
            for point in between(self.block, points):
                yield self._mixed((self.num_layers, point, self.block.policy(point)))
        for low, high in pairwise(pairs):
            for first in range(1, self.num_layers):
                yield self._mixed((first, *low), (self.num_layers - first, *high))

    def _points(self, host_bytes: int) -> Sequence[Outcome]:
        """The best choices for one layer, fewest kept bytes first."""
        budget = host_bytes // self.num_layers
        return with_host(self.block, budget) if budget else convex_frontier(self.block.problem)

    def _mixed(self, *parts: tuple[int, Outcome, Policy]) -> Choice:
        return Choice(
            parts[0][2] if len(parts) == 1 else mixed([(layers, policy) for layers, _, policy in parts]),
            sum(layers * point.kept_bytes for layers, point, _ in parts),
            sum(layers * point.host_bytes for layers, point, _ in parts),
            sum(layers * point.recompute_seconds for layers, point, _ in parts),
            sum(layers * point.recompute_flops for layers, point, _ in parts),
        )

    def _below_full(self) -> Iterator[LayerPlan]:
        for size in group_sizes(self.num_layers):
            if size > 1:
                yield every_k(size, NONE)
                yield every_k(size, FULL)
        for slots in range(2, min(self.num_layers, 17)):
            yield LayerPlan((Segment((NONE,), slots=slots),), label=f"revolve:{slots}")


def mixed(parts: list[tuple[int, Policy]]) -> LayerPlan:
    """Segments, first layer first; its spec can be read back where the policies' can.

    >>> mixed([(3, FULL), (1, Policy.save("a", "b"))]).spec
    'mix:3*full,rest*save:a+b'
    """
    counts = [*(str(layers) for layers, _ in parts[:-1]), "rest"]
    label = ",".join(f"{n}*{policy.spec.replace(',', '+')}" for n, (_, policy) in zip(counts, parts))
    return LayerPlan(tuple(Segment((policy,), layers) for layers, policy in parts), label=f"mix:{label}")


def between(block: Block, corners: Sequence[Outcome], points: int = 16) -> Iterator[Outcome]:
    """Exact answers to ``points`` budgets between the corners of a convex frontier."""
    least, most = corners[0].kept_bytes, corners[-1].kept_bytes
    for k in range(1, points):
        outcome = best(block.problem, Budget(least + (most - least) * k // points))
        assert outcome is not None, "the first corner is within each of these budgets"
        yield outcome


def with_host(block: Block, host_bytes: int, points: int = 24) -> tuple[Outcome, ...]:
    """The frontier of one block that may also keep ``host_bytes`` on the host, fewest device bytes first.

    The price of a byte doesn't tell the two memories apart, so the points are exact answers to ``points`` budgets.
    """
    most = sum(node.nbytes for node in block.problem.nodes if node.needed or node.mark)
    found: list[Outcome] = []
    for k in range(points + 1):
        outcome = best(block.problem, Budget(most * k // points, host_bytes))
        if outcome and (not found or outcome.recompute_seconds < found[-1].recompute_seconds):
            found.append(outcome)
    return tuple(found)


def _worth_a_look(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Those that no other beats in both time and bytes, fastest first."""
    found: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.recompute_seconds, c.kept_bytes, c.host_bytes)):
        if not found or choice.kept_bytes < found[-1].kept_bytes:
            found.append(choice)
    return tuple(found)
