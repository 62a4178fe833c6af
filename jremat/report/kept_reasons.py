"""Why a value is kept: the rule of the policy that speaks of it, or who can't do without it."""

from collections.abc import Sequence
from dataclasses import dataclass

from jremat.graph.paths import path_of
from jremat.graph.residuals import Origin
from jremat.graph.trace import MARK
from jremat.jax_internals import tagged_name
from jremat.policy import LayerPlan, Policy, Segment
from jremat.policy.decision import RECOMPUTE
from jremat.policy.ops import Family
from jremat.policy.places import matches
from jremat.report.backward_readers import Reader
from jremat.report.model_parts import layers_of

SCHEDULED = "required: of the"
"""How the reason of a schedule's states begins."""


@dataclass(frozen=True)
class PolicyRules:
    """What was asked for: nothing, one policy, or a plan over layers.

    Args:
        policy: that holds.
        num_layers: of the stack, for a plan.
    """

    policy: Policy | LayerPlan | None = None
    num_layers: int | None = None

    def at(self, scope: str) -> tuple[Policy | None, Segment | None]:
        """The policy that holds in a scope, and its segment of the plan."""
        if not isinstance(self.policy, LayerPlan):
            return self.policy, None
        place = layers_of(scope)
        if place is None or self.num_layers is None:
            return None, None
        first, _, turn = place
        for start, segment in self.policy.placed(self.num_layers):
            if start <= first < start + segment.num_layers:
                # A loop's turns count from where the loop begins, which is where a pattern does.
                return segment.pattern[((first - start) + (turn or 0)) % len(segment.pattern)], segment
        return None, None


def why_kept(origin: Origin, rules: PolicyRules, scope: str, readers: Sequence[Reader]) -> str:
    """One clause for people.

    Args:
        origin: where the value was made.
        rules: that hold.
        scope: the name scopes around it.
        readers: the operations of the backward pass that read it.
    """
    policy, segment = rules.at(scope)
    ruled = _rule(origin, policy) if policy is not None else None
    if ruled:
        return ruled
    if rules.policy is None and (origin.mark or "").startswith(MARK):
        return "kept by a policy in the function"
    plain = segment is None or (segment.group == 1 and segment.slots is None)
    if policy is not None and policy.keeps_everything and plain:
        return "no remat here"
    if segment is not None and readers and not any(reader.again for reader in readers):
        return "a later layer keeps it" if plain else "read after the layers"
    if segment is not None and segment.slots is not None:
        return f"{SCHEDULED} {segment.slots} states that the schedule runs from"
    if segment is not None and segment.group > 1:
        return f"required: {segment.group} layers are replayed from it"
    if readers and all(reader.again for reader in readers):
        return "required: its layer is replayed from it"
    if origin.copies > 1 and policy is not None:
        return "required: what a layer takes in is there for its replay"
    if rules.policy is not None and policy is None:
        return "outside of the plan's layers"
    if rules.policy is not None:
        return "outside of the policy's layers"
    return "the backward pass reads it"


def _rule(origin: Origin, policy: Policy) -> str | None:
    """The rule that keeps a value, where one does."""
    mark = origin.mark or ""
    ours = mark.startswith(MARK)
    if ours and dict(policy.values).get(mark.removeprefix(MARK).partition(".")[2]) not in (None, RECOMPUTE):
        return "planned"
    named = {name for name, decision in policy.tags if decision is not RECOMPUTE}
    if origin.tag in named:
        return f"named {origin.tag}"
    path = path_of(origin.scope)
    place = next((rule for rule in policy.places if matches(rule[0], path, origin.source)), None) if ours else None
    if place is not None and place[1] is not RECOMPUTE:
        return f"in {place[0]}"
    if not ours and not (origin.mark and origin.mark == origin.tag):
        return None
    for family, decision in policy.families:
        if decision is RECOMPUTE:
            continue
        by_tag = origin.tag is not None and origin.tag in family.names
        if by_tag or (origin.eqn is not None and _matches(origin, family)):
            return f"keeps {family.name}"
    return "keeps all that it doesn't name" if ours and policy.default is not RECOMPUTE else None


def _matches(origin: Origin, family: Family) -> bool:
    eqn = origin.eqn
    return tagged_name(eqn.primitive, eqn.params) is None and family.matches(eqn.primitive.name, eqn.params)
