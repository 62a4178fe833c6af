"""Where a traced program has its remats: each with its body, its policy, and the loops and remats around it."""

import collections.abc
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jax.extend import core

from jremat.graph.graph import Graph
from jremat.graph.interpret import with_jaxprs
from jremat.graph.trace import MARK, REWRITABLE, Program, graph_of, user_line
from jremat.jax_internals import (
    CUSTOM_VJP,
    PALLAS,
    SCAN,
    inner_jaxprs,
    is_call,
    is_remat,
    opened,
    remat_of,
    tagged_name,
)
from jremat.transform.checkpoint import ByMarks

# Their inside is not what JAX differentiates, so a remat there does nothing.
HIDDEN = frozenset({CUSTOM_VJP, PALLAS})


@dataclass(frozen=True, eq=False)
class Site:
    """One remat of a program; equal ones (the layers of an unrolled stack) are one site.

    Args:
        eqns: its equations.
        body: what it reruns, an open jaxpr; of a remat of ours as its user wrote it, without our marks.
        policy: what it was given; None keeps nothing. Of a remat of ours the user's policy.
        ours: whether it is ``jremat.checkpoint``'s, which decides value by value.
        marked: whether that keeps any value.
        prevent_cse: whether the compiler is kept from merging the rerun with the first run.
        third: whether it is of ``jax_remat3``.
        repeats: how often it runs in one call: its equations times the loops around them.
        loops: how many loops of more than one turn stand around it.
        around: the remats around it, outermost first.
        source: the user's line that calls it, or the first one inside.
    """

    eqns: tuple[Any, ...]
    body: Any
    policy: Any
    ours: bool
    marked: bool
    prevent_cse: bool
    third: bool
    repeats: int
    loops: int
    around: tuple["Site", ...]
    source: str

    @property
    def eqn(self) -> Any:
        """Its first equation."""
        return self.eqns[0]

    @cached_property
    def graph(self) -> Graph:
        """Its body's values and operations."""
        return graph_of_jaxpr(self.body)

    @cached_property
    def shape(self) -> tuple[Any, ...]:
        """What equal sites have in common."""
        steps = tuple((e.primitive.name, tuple(str(v.aval) for v in e.outvars)) for e in self.body.eqns)
        return steps, self.prevent_cse, self.loops, tuple(site.shape for site in self.around), _meaning(self.policy)


def _meaning(policy: Any) -> Any:
    """Equal for policies that are one function over equal data, as JAX's of equal names are."""
    if not isinstance(policy, types.FunctionType):
        return policy if isinstance(policy, collections.abc.Hashable) else id(policy)
    return policy.__code__, tuple(_datum(cell.cell_contents) for cell in policy.__closure__ or ())


def _datum(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return frozenset(value)
    if isinstance(value, types.FunctionType):
        return _meaning(value)
    return value if isinstance(value, str | int | float | type(None)) else id(value)


def graph_of_jaxpr(jaxpr: Any) -> Graph:
    """The graph of a jaxpr that stands inside a program."""
    inner = opened(jaxpr)
    return graph_of(Program(inner, (), None, ()))


def sites_of(jaxpr: Any) -> tuple[Site, ...]:
    """Every remat of a program that JAX would differentiate, equal ones merged, outer ones first."""
    merged: dict[Any, Site] = {}
    for site in _sites(jaxpr, (), 1, 0, None):
        known = merged.get(site.shape)
        if known is None:
            merged[site.shape] = site
        elif site.eqn in known.eqns:  # one equation in a jaxpr that is called twice
            merged[site.shape] = replace(known, repeats=known.repeats + site.repeats)
        else:
            merged[site.shape] = replace(known, eqns=(*known.eqns, *site.eqns), repeats=known.repeats + site.repeats)
    return tuple(merged.values())


def _sites(jaxpr: Any, around: tuple[Site, ...], repeats: int, loops: int, call: Any) -> Iterator[Site]:
    for eqn in opened(jaxpr).eqns:
        if eqn.primitive.name in HIDDEN:
            continue
        inside, times, deeper = around, 1, loops
        if is_remat(eqn):
            held = remat_of(eqn)
            body, policy = opened(held.jaxpr), held.policy
            source = user_line(eqn, call) or next((line for _, _, line in equations(body) if line), "")
            ours = isinstance(policy, ByMarks)
            written = unmarked(body) if ours else body
            marked, body = written is not body, written
            policy = policy.policy if isinstance(policy, ByMarks) else policy
            site = Site(
                (eqn,), body, policy, ours, marked, held.prevent_cse, held.third, repeats, loops, around, source
            )
            yield site
            inside = (*around, site)
        elif eqn.primitive.name == SCAN:
            times = eqn.params["length"]
            deeper = loops + is_loop(eqn)
        for inner, _ in inner_jaxprs(eqn):
            yield from _sites(inner, inside, repeats * times, deeper, eqn if is_call(eqn) else call)


def unmarked(jaxpr: Any) -> Any:
    """An open program without the names that we put on values, loops and branches inside too."""
    renamed: dict[Any, Any] = {}
    eqns = []

    def read(v: Any) -> Any:
        return v if isinstance(v, core.Literal) else renamed.get(v, v)

    for eqn in jaxpr.eqns:
        if (tagged_name(eqn.primitive, eqn.params) or "").startswith(MARK):
            renamed[eqn.outvars[0]] = read(eqn.invars[0])
            continue
        changed = _unmarked_inside(eqn)
        reads_mark = any(v in renamed for v in eqn.invars if not isinstance(v, core.Literal))
        if changed or reads_mark:
            eqn = eqn.replace(invars=[read(v) for v in eqn.invars], params={**eqn.params, **changed})
        eqns.append(eqn)
    if len(eqns) == len(jaxpr.eqns) and all(one is other for one, other in zip(eqns, jaxpr.eqns)):
        return jaxpr
    return jaxpr.replace(eqns=eqns, outvars=[read(v) for v in jaxpr.outvars])


def _unmarked_inside(eqn: Any) -> dict[str, Any]:
    if eqn.primitive.name not in REWRITABLE:
        return {}
    inner = [jaxpr for jaxpr, _ in inner_jaxprs(eqn)]
    new = [unmarked(opened(jaxpr)) for jaxpr in inner]
    if all(opened(one) is other for one, other in zip(inner, new)):
        return {}
    return with_jaxprs(
        eqn, lambda k, old: core.ClosedJaxpr(new[k], old.consts) if isinstance(old, core.ClosedJaxpr) else new[k]
    )


def is_loop(eqn: Any) -> bool:
    """Whether a scan stays a loop when compiled: more than one turn, and not unrolled whole."""
    length, unroll = eqn.params["length"], eqn.params.get("unroll", 1)
    return length > 1 and unroll is not True and int(unroll) < length


def equations(jaxpr: Any, repeats: int = 1, call: Any = None, hidden: bool = False) -> Iterator[tuple[Any, int, str]]:
    """Every equation of a program, inner ones too: (equation, how often it runs, the user's line).

    Args:
        hidden: whether to look into kernels with a derivative of their own.
    """
    for eqn in opened(jaxpr).eqns:
        if not is_call(eqn):
            yield eqn, repeats, user_line(eqn, call)
        if hidden or eqn.primitive.name not in HIDDEN:
            for inner, times in inner_jaxprs(eqn):
                yield from equations(inner, repeats * times, eqn if is_call(eqn) else call, hidden)


def bodies(jaxpr: Any) -> Iterator[Any]:
    """A program and every program inside it that JAX differentiates, open."""
    yield opened(jaxpr)
    for eqn in opened(jaxpr).eqns:
        for inner, _ in inner_jaxprs(eqn) if eqn.primitive.name not in HIDDEN else ():
            yield from bodies(inner)


def read_in(jaxpr: Any) -> set[Any]:
    """The variables that an open program reads or returns."""
    return {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, core.Literal)} | {
        v for v in jaxpr.outvars if not isinstance(v, core.Literal)
    }
