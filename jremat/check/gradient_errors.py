"""How far gradients are off where the backward pass reads compressed values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jremat.policy import SAVE, Decision, LayerPlan, Policy
from jremat.policy.policy import SPEC_KEYS
from jremat.policy.shown import aligned, most

LARGE = 0.1
"""A relative norm from which an error is called large: on our models int8 and fp8 stay below, int4 doesn't."""


@dataclass(frozen=True)
class GradientError:
    """One gradient, or all together, beside the exact one.

    Args:
        name: path of the argument; or the rule of a policy that alone compresses, and then of all gradients together.
        relative_norm: of the difference over that of the exact gradient; infinite where that is zero and this isn't.
        cosine: of the angle between the two.

    >>> print(GradientError("argument 0['w']", 0.2, 0.98))
    argument 0['w']: off by 20.0%, cosine 0.9800, large
    """

    name: str
    relative_norm: float
    cosine: float

    @property
    def large(self) -> bool:
        """Whether the difference is a tenth of the gradient or more."""
        return not self.relative_norm < LARGE

    def __str__(self) -> str:
        return f"{self.name}: off by {self.relative_norm:.1%}, cosine {self.cosine:.4f}{', large' * self.large}"

    __repr__ = __str__


def gradient_error(name: str, found: Sequence[Any], exact: Sequence[Any]) -> GradientError:
    """The error of some arrays taken together.

    >>> gradient_error("all", [np.array([3.0, 1.0])], [np.array([3.0, 0.0])]).relative_norm
    0.3333333333333333
    """
    one, other = (np.concatenate([np.ravel(x).astype(np.float64) for x in some]) for some in (found, exact))
    size = np.linalg.norm(other)
    off = np.linalg.norm(one - other)
    both = np.linalg.norm(one) * size
    relative = off / size if size else (np.inf if off else 0.0)
    return GradientError(name, float(relative), float(one @ other / both) if both else float(not off))


def compresses(policy: Any) -> bool:
    """Whether a policy, or one of a plan over layers, compresses."""
    of_plan = [p for segment in policy.segments for p in segment.pattern] if isinstance(policy, LayerPlan) else [policy]
    return any(isinstance(p, Policy) and p.compresses for p in of_plan)


def one_rule_each(policy: Policy) -> Iterator[tuple[str, Policy]]:
    """Each rule by which a policy compresses, with the policy in which the others of them save.

    >>> import policies
    >>> [(rule, str(alone)) for rule, alone in one_rule_each(policies.get("fp8:a,b;save:c"))]
    [('fp8:a', 'save:b,c;fp8:a'), ('fp8:b', 'save:a,c;fp8:b')]
    """
    rules: list[tuple[Any, Decision]] = [*policy.names, *policy.families]
    for chosen, decision in (rule for rule in rules if rule[1].compresses):
        by_name, by_family, form = SPEC_KEYS[decision]
        rule = f"{by_name}:{chosen}{form}" if isinstance(chosen, str) else f"{by_family}:{chosen.name}{form}"
        names, families = (_saving(some, chosen) for some in (policy.names, policy.families))
        yield rule, replace(policy, names=names, families=families, label=None)


def _saving(rules: Sequence[tuple[Any, Decision]], but: Any) -> tuple[tuple[Any, Decision], ...]:
    return tuple((selector, SAVE if d.compresses and selector != but else d) for selector, d in rules)


def table(errors: Sequence[GradientError], count: int = 12) -> str:
    """Errors as lines, the largest first."""
    worst = sorted(errors, key=lambda error: -error.relative_norm)
    rows = [(f"{e.relative_norm:.1%}", f"{e.cosine:.4f}", e.name + "  large" * e.large) for e in worst]
    lines = aligned([("off by", "cosine", "of"), *rows], right=[0, 1]).splitlines()
    return "\n".join([lines[0], *most(lines[1:], count, "gradients")])
