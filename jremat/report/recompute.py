"""What is recomputed in the backward pass, value by value, with what each costs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from jremat.graph.flops import RECOMPUTE, Flops, flops_of
from jremat.graph.trace import MARK, user_line
from jremat.jax_internals import REMAT, REMAT_SCOPE, SCAN, SHARD_MAP, inner_jaxprs, is_call, opened, scopes, tagged_name
from jremat.report.backward_readers import MOVES
from jremat.report.model_parts import module_of

_ENTERED = frozenset({SCAN, REMAT, SHARD_MAP})
"""Primitives whose inside is shown value by value, also where all of it is a recompute; a call is if it has tags."""


@dataclass(frozen=True)
class RecomputedValue:
    """One value that the backward pass recomputes.

    Args:
        tag: its name, or None.
        aval: of one copy.
        times: how often it is recomputed.
        primitive: that makes it.
        source: the user's line.
        scope: the name scopes around it, outermost first.
        flops: of all copies, with what is recomputed only on the way to it.
        fetched: only moved, cast or cut out of what is there anyway, such as a layer's weights.
        twin: how many like it, of the same line, are made before it.
    """

    tag: str | None
    aval: Any
    times: int
    primitive: str
    source: str
    scope: str
    flops: Flops
    fetched: bool
    twin: int


def recomputed_values(equations: list[Any]) -> Iterator[RecomputedValue]:
    """The values that the equations of a backward pass recompute.

    Shown are those with a name, those that the derivative reads, and matmuls of another module than the value without a
    name that needs them; the cost of a step on the way to them is counted to the first that needs it, so that the costs
    of all sum to the recompute of the whole.
    """
    yield from _level(equations, (), scope="", times=1, again=False)


def _level(
    equations: list[Any], outputs: tuple[Any, ...], scope: str, times: int, again: bool
) -> Iterator[RecomputedValue]:
    """One jaxpr's: its own steps, then those of the jaxprs inside."""
    marked = [again or REMAT_SCOPE in scopes(eqn) for eqn in equations]
    entered = [_is_entered(eqn) for eqn in equations]
    steps = [eqn for eqn, is_again, inside in zip(equations, marked, entered) if is_again and not inside]
    # Read by more than the recompute's own steps: by the derivative, by a loop inside, by whoever is outside.
    others = [eqn for eqn, is_again, inside in zip(equations, marked, entered) if not is_again or inside]
    read = {v for eqn in others for v in eqn.invars if not isinstance(v, core.Literal)}
    read |= {v for v in outputs if not isinstance(v, core.Literal)}
    yield from _values(steps, read, scope, times)
    for eqn, is_again, inside in zip(equations, marked, entered):
        around = f"{scope}/{scopes(eqn)}"
        for jaxpr, repeats in inner_jaxprs(eqn) if inside or not is_again else ():
            body = opened(jaxpr)
            yield from _level(body.eqns, tuple(body.outvars), around, times * repeats, is_again)


def _is_entered(eqn: Any) -> bool:
    inner = inner_jaxprs(eqn)
    return len(inner) == 1 and (eqn.primitive.name in _ENTERED or (is_call(eqn) and _has_tags(inner[0][0])))


def _has_tags(jaxpr: Any) -> bool:
    return any(
        tagged_name(eqn.primitive, eqn.params) or any(_has_tags(inner) for inner, _ in inner_jaxprs(eqn))
        for eqn in opened(jaxpr).eqns
    )


def _values(steps: list[Any], read: set[Any], scope: str, times: int) -> Iterator[RecomputedValue]:
    tags = {id(eqn): tagged_name(eqn.primitive, eqn.params) for eqn in steps}
    made = {var for eqn in steps if tags[id(eqn)] is None for var in eqn.outvars}
    same: dict[Any, Any] = {}  # a tag's output -> the value that it names
    names: dict[Any, str] = {}
    for eqn in steps:
        tag, given = tags[id(eqn)], eqn.invars[0] if eqn.invars else None
        if tag is not None and not isinstance(given, core.Literal):
            value = same.get(given, given)
            same[eqn.outvars[0]] = value
            if not tag.startswith(MARK):
                names.setdefault(value, tag)
    fetched = _fetched(steps, made, same)
    shown = {same.get(var, var) for var in read} | set(names)
    maker = {var: eqn for eqn in steps for var in eqn.outvars}
    cost: dict[Any, Flops] = {}
    owner: dict[Any, Any] = {}  # a value on the way -> the first shown value that needs it
    order: list[tuple[Any, Any]] = []
    for eqn in reversed(steps):
        if tags[id(eqn)] is not None:
            continue
        mine = next((var for var in eqn.outvars if var in shown), None)
        mine = mine if mine is not None else next((owner[var] for var in eqn.outvars if var in owner), None)
        if mine is None:
            continue  # needed by a tag that nobody reads
        spent = flops_of(eqn, RECOMPUTE) * times
        if mine not in eqn.outvars and spent.recompute and _is_anothers(eqn, mine, names, maker):
            mine = eqn.outvars[0]
            shown.add(mine)
        cost[mine] = cost.get(mine, Flops()) + spent
        order += [(eqn, var) for var in eqn.outvars if var in shown]
        for var in eqn.invars:
            if not isinstance(var, core.Literal) and same.get(var, var) in made:
                owner[same.get(var, var)] = mine  # walked backwards: the first in the program has the last word
    twins: dict[Any, int] = {}
    for eqn, var in reversed(order):
        name, line, around = eqn.primitive.name, user_line(eqn), f"{scope}/{scopes(eqn)}"
        like = names.get(var), name, line, scopes(eqn), str(var.aval)
        twins[like] = twins.get(like, -1) + 1
        flops = cost.get(var, Flops())
        yield RecomputedValue(names.get(var), var.aval, times, name, line, around, flops, var in fetched, twins[like])


def _is_anothers(eqn: Any, owner: Any, names: Mapping[Any, str], maker: Mapping[Any, Any]) -> bool:
    """Whether a matmul on the way belongs to another module than the value that needs it, which has no name."""
    return owner not in names and module_of(scopes(eqn)) != module_of(scopes(maker[owner]))


def _fetched(steps: list[Any], made: set[Any], same: Mapping[Any, Any]) -> set[Any]:
    """What is made of nothing that was computed, by nothing but moves."""
    found: set[Any] = set()
    for eqn in steps:
        given = {same.get(v, v) for v in eqn.invars if not isinstance(v, core.Literal)}
        small = all(getattr(v.aval, "size", 2) <= 1 for v in eqn.outvars)
        if (small or eqn.primitive.name in (*MOVES, "iota")) and not (given & made - found):
            found |= set(eqn.outvars)
    return found
