"""Names in policies that have no effect: no value is tagged so, or nothing reads the value."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jremat.check.finding import Finding, Rule
from jremat.check.policy_answers import decisions_by_name
from jremat.check.rules.costs import rerun_flops
from jremat.check.sites import Site, bodies, equations, read_in
from jremat.check.subject import Subject, of_body
from jremat.graph.trace import MARK
from jremat.jax_internals import CUSTOM_VJP, tagged_name
from jremat.policy import RECOMPUTE, Decision, Policy
from jremat.policy.places import matches, nothing_there


@dataclass(frozen=True)
class Ruling:
    """A policy that holds over a piece of a program.

    Args:
        policy: JAX's, a user's, or ours.
        piece: what it decides on.
        site: the remat.
    """

    policy: Any
    piece: Subject
    site: Site

    @property
    def decisions(self) -> dict[str, Decision]:
        """The names that it speaks of."""
        return {
            name: decision for name, decision in decisions_by_name(self.policy).items() if not name.startswith(MARK)
        }


def rulings(subject: Subject) -> Iterator[Ruling]:
    """Every policy of a program, with what it decides on; the one given to the lint among them."""
    given = subject.policy if isinstance(subject.policy, Policy) else None
    for site in subject.sites:
        whole = given is not None and not site.around and site.loops == 0 and site.eqn is subject.jaxpr.eqns[0]
        policy = given if whole else site.policy
        if policy is not None:
            yield Ruling(policy, of_body(site), site)


def tags_in(piece: Subject) -> set[str]:
    """Every tag of a program, those that only a kernel's own forward rule puts on among them."""
    written = _tags(piece.jaxpr)
    if not any(e.primitive.name == CUSTOM_VJP for e, _, _ in equations(piece.jaxpr)):
        return written
    return written | _tags(piece.pullback)


def _tags(jaxpr: Any) -> set[str]:
    found = {tagged_name(e.primitive, e.params) for e, _, _ in equations(jaxpr, hidden=True)}
    return {name for name in found if name is not None}


def _unknown_places(ruling: Ruling) -> Iterator[Finding]:
    """A path or a line of the policy where no value is made."""
    if not isinstance(ruling.policy, Policy) or not ruling.policy.places:
        return
    made = [(value.path, value.source) for _, value in ruling.piece.graph.walk()]
    for place, decision in ruling.policy.places:
        wanted = decision is not ruling.policy.default and place not in ruling.policy.optional
        if wanted and not any(matches(place, *where) for where in made):
            yield Finding(
                rule=UNKNOWN_NAME.slug,
                message=f"the policy names {nothing_there(place, made)}",
                place=ruling.site.source,
                cure="name a path or a line at which the function makes a value",
                cost_flops=rerun_flops(ruling.site) if decision is not RECOMPUTE else 0,
            )


def _unknown(subject: Subject) -> Iterator[Finding]:
    for ruling in rulings(subject):
        yield from _unknown_places(ruling)
        optional = ruling.policy.optional if isinstance(ruling.policy, Policy) else frozenset()
        wanted = {n for n, decision in ruling.decisions.items() if decision is not RECOMPUTE and n not in optional}
        if not wanted:
            continue
        borne = tags_in(ruling.piece)
        missing = sorted(wanted - borne)
        if missing:
            names = sorted(n for n in borne if not n.startswith(MARK))
            near = [(m, difflib.get_close_matches(m, names, 1)) for m in missing]
            listed = ", ".join(f"{m!r}" + (f" (did you mean {c[0]!r}?)" if c else "") for m, c in near)
            yield Finding(
                rule=UNKNOWN_NAME.slug,
                message=f"the policy names {listed}, which no value bears; names here: {', '.join(names) or 'none'}",
                place=ruling.site.source,
                cure="put the name on the value with jremat.tag, or name what is there; jremat.checkpoint(f, policy) "
                "raises where a name is borne by nothing",
                cost_flops=rerun_flops(ruling.site),
            )


def _dropped(subject: Subject) -> Iterator[Finding]:
    for ruling in rulings(subject):
        wanted = {n for n, decision in ruling.decisions.items() if decision is not RECOMPUTE}
        if not wanted or ruling.site.ours:  # ours keeps the value that a tag names, whoever reads it
            continue
        read, dropped = set(), {}
        for jaxpr in bodies(ruling.site.body):
            alive = read_in(jaxpr)
            for eqn in jaxpr.eqns:
                name = tagged_name(eqn.primitive, eqn.params)
                if name in wanted and eqn.outvars[0] in alive:
                    read.add(name)
                elif name in wanted:
                    dropped[name] = eqn
        for name in sorted(dropped.keys() - read):
            eqn = dropped[name]
            lines = {id(e): line for e, _, line in equations(ruling.site.body)}
            yield Finding(
                rule=DROPPED_TAG.slug,
                message=f"the tag {name!r} is put on a value, but what tag returns is read by nobody: nothing is kept",
                place=lines.get(id(eqn), ruling.site.source),
                cure=f"use the result: x = jremat.tag(x, {name!r})",
                cost_flops=rerun_flops(ruling.site),
            )


UNKNOWN_NAME = Rule(
    "unknown-name",
    "a policy by name saves nothing, or offloads nothing",
    "a name that no value bears is no error to JAX: the value stays unkept and is recomputed",
    "put the name on the value, or name what is there",
    _unknown,
)
DROPPED_TAG = Rule(
    "dropped-tag",
    "a tagged value is not kept although the policy names it",
    "checkpoint_name returns a new value; what reads the old one doesn't see the name",
    "use what tag returns in the value's place",
    _dropped,
)
RULES = (UNKNOWN_NAME, DROPPED_TAG)
