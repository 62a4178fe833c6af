"""Less kept, and yet more alive: groups too large, and reruns that need more than they save."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from jremat.calibration import LINT
from jremat.check.finding import Finding, Rule
from jremat.check.sites import equations, is_loop, is_remat
from jremat.check.subject import Subject, of_site
from jremat.graph.peak import Moment
from jremat.graph.trace import aval_bytes, user_line
from jremat.jax_internals import REMAT_SCOPE, SCAN, inner_jaxprs, is_call, loop_parts, opened, scopes


@dataclass(frozen=True)
class Groups:
    """Groups of layers, each replayed whole in the backward pass.

    Args:
        count: how many groups.
        size: layers of a group.
        boundary_bytes: what is kept of each group.
        layer_bytes: what a group's replay keeps of each layer.
        at_replay_bytes: the most that is alive while groups are replayed.
        elsewhere_bytes: the most that is alive at any other time.
        source: the user's line.
    """

    count: int
    size: int
    boundary_bytes: int
    layer_bytes: int
    at_replay_bytes: int
    elsewhere_bytes: int
    source: str

    def peak_bytes(self, size: int) -> int:
        """The peak with groups of ``size`` layers instead."""
        layers = self.count * self.size
        kept = (-(-layers // size) - self.count) * self.boundary_bytes
        replayed = (size - self.size) * self.layer_bytes
        return max(self.at_replay_bytes + kept + replayed, self.elsewhere_bytes + kept)

    @property
    def best(self) -> int:
        """The group size of least peak; of equal ones the smallest."""
        return min(range(1, self.size + 1), key=lambda size: (self.peak_bytes(size), size))


def groups_of(subject: Subject) -> Iterator[Groups]:
    """The groups of a gradient's program: backward loops in which a rerun stacks what several layers keep."""
    jaxpr = subject.gradient
    stacked = {v for eqn in jaxpr.eqns if eqn.primitive.name == SCAN for v in eqn.outvars}
    for eqn in jaxpr.eqns:
        replay = next(_replays(eqn.params["jaxpr"], False), None) if eqn.primitive.name == SCAN else None
        if replay is None:
            continue
        count, given = eqn.params["length"], eqn.invars[sum(loop_parts(eqn)) :]
        kept = sum(aval_bytes(v.aval) for v in given if not isinstance(v, core.Literal) and v in stacked)
        turns, stack_bytes = replay
        inside = [(e, line_of) for e, _, line_of in equations(eqn.params["jaxpr"])]
        size = sum(e.params["length"] for e, _ in inside if e.primitive.name == SCAN and e.params["reverse"])
        yield Groups(
            count,
            max(size, turns),  # the last layer of a group may stand after the loop
            kept // count,
            stack_bytes // turns,
            *_most_alive(subject.peak.timeline),
            user_line(eqn) or next((line_of for _, line_of in inside if line_of), ""),
        )


def _most_alive(moments: Sequence[Moment]) -> tuple[int, int]:
    """The most that is alive while groups are replayed and taken back, and at any other time."""
    again = [m.step for m in moments if m.phase == "recompute" and m.layer > 0]
    end = max(again, default=-1)
    while end + 1 < len(moments) and moments[end + 1].layer > 0:
        end += 1  # the loop that replays a group then takes it back
    during = range(min(again, default=0), end + 1)
    held = [max((m.alive_bytes for m in moments if (m.step in during) == when), default=0) for when in (True, False)]
    return held[0], held[1]


def _replays(jaxpr: Any, inside: bool) -> Iterator[tuple[int, int]]:
    """Reruns that are loops and stack something: (turns, stacked bytes)."""
    for eqn in opened(jaxpr).eqns:
        again = inside or REMAT_SCOPE in scopes(eqn)
        if eqn.primitive.name == SCAN:
            made = eqn.outvars[loop_parts(eqn)[1] :]
            nbytes = sum(aval_bytes(v.aval) for v in made)
            if again and is_loop(eqn) and nbytes:
                yield eqn.params["length"], nbytes
        elif is_call(eqn) or is_remat(eqn):
            for inner, _ in inner_jaxprs(eqn):
                yield from _replays(inner, again)


def _group_size(subject: Subject) -> Iterator[Finding]:
    for groups in groups_of(subject):
        now, best = groups.peak_bytes(groups.size), groups.best
        least = groups.peak_bytes(best)
        if now > LINT.same_program * least:
            spec = "full" if best == 1 else f"every_k:{best}"
            yield Finding(
                rule=GROUP_SIZE.slug,
                message=f"{groups.count} groups of {groups.size} layers hold {groups.size} layers' activations while "
                f"one is replayed, more than the fewer boundaries save: groups of {best} have a lower peak",
                place=groups.source,
                cure=f"use {spec}, which recomputes no more; or let the replay keep less (every_k:{groups.size},full)",
                cost_bytes=now - least,
            )


def _rises(subject: Subject) -> Iterator[Finding]:
    if not (subject.sites or subject.bare) or not (subject.is_loss or subject.bare):
        return
    bare = subject.bare or subject.without(subject.sites)
    saved = bare.rows.total_bytes - subject.rows.total_bytes
    needed = max((of_site(site).peak.temp_bytes for site in subject.sites), default=0)
    if saved <= 0 or (subject.sites and needed <= saved):  # what one rerun holds at a time is less than what is saved
        return
    if subject.peak.temp_bytes > LINT.two_programs * bare.peak.temp_bytes:
        first = subject.sites[0].source if subject.sites else ""
        yield Finding(
            rule=PEAK_RISES.slug,
            message=f"keeps {saved:,} bytes less, but its reruns need more "
            "than that while they run: the peak is higher than without remat",
            place=first,
            cure="keep what is small and costly to recompute (a reduction's result, a decision, a kernel's output) by "
            "name; or remat smaller pieces",
            cost_bytes=subject.peak.temp_bytes - bare.peak.temp_bytes,
        )


def _side_by_side(subject: Subject) -> Iterator[Finding]:
    for site in subject.sites:
        if len(site.eqns) < 2 or site.loops:
            continue
        stacks = sum(nbytes for _, nbytes in _replays(of_site(site).gradient, False))
        cost = (len(site.eqns) - 1) * stacks
        if cost > (LINT.same_program - 1) * subject.peak.temp_bytes:
            yield Finding(
                rule=SIDE_BY_SIDE.slug,
                message=f"{len(site.eqns)} rematted blocks stand one after the other outside of a loop, and the replay "
                f"of each stacks {stacks:,} bytes in a loop of its own: nothing orders the stacks, which XLA (of JAX "
                "0.10) allocates for all blocks before the first replay runs",
                place=site.source,
                cure="run equal blocks in one loop: jremat.stack, or lax.scan over the rematted block",
                cost_bytes=cost,
            )


GROUP_SIZE = Rule(
    "group-size",
    "uniform N (every_k:K) raised, and the peak goes up",
    "a group's replay holds all its layers' activations at once",
    "smaller groups",
    _group_size,
)
PEAK_RISES = Rule(
    "peak-rises",
    "the budget lowered, and the peak goes up",
    "a rerun holds more at a time than the values that it makes",
    "keep the small results of large intermediates",
    _rises,
)
SIDE_BY_SIDE = Rule(
    "replays-side-by-side",
    "memory grows with depth under full remat",
    "the loops that replay unrolled blocks have their stacks allocated together",
    "one loop over the blocks",
    _side_by_side,
)
RULES = (GROUP_SIZE, PEAK_RISES, SIDE_BY_SIDE)
