"""What a policy of any kind means, found by asking it: JAX's own, a user's function, or ours."""

import copy
import dataclasses
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import primitives

from jremat.jax_internals import decision_of, tagged_name
from jremat.policy import RECOMPUTE, Decision, Policy
from jremat.policy.ops import FAMILIES, SELECTABLE

_UNUSED_NAME = "a name that no value bears"


def decision(policy: Any, eqn: Any) -> Decision:
    """What a policy says of an equation's result."""
    return decision_on(policy, eqn.primitive, [v.aval for v in eqn.invars], eqn.params)


def decision_on(policy: Any, primitive: Any, avals: Iterable[Any], params: Mapping[str, Any]) -> Decision:
    """What a policy says of an operation; None keeps nothing."""
    if policy is None:
        return RECOMPUTE
    if isinstance(policy, Policy):
        name = tagged_name(primitive, params)
        kind, facts = ("name", {"name": name}) if name is not None else (primitive.name, params)
        families = [f.name for f in dict.fromkeys((*SELECTABLE, *(f for f, _ in policy.families)))]
        by_name = {f.name: f for f in (*FAMILIES, *SELECTABLE, *(f for f, _ in policy.families))}
        made_by = [f for f in families if by_name[f].matches(kind, facts)]
        return policy.decide(names=[] if name is None else [name], families=made_by)
    return Decision(decision_of(policy(primitive, *avals, **params)))


def on_name(policy: Any, name: str) -> Decision:
    """What a policy says of a value tagged ``name``."""
    return decision_on(policy, primitives.name_p, [jax.ShapeDtypeStruct((), jnp.float32)], {"name": name})


def decisions_by_name(policy: Any) -> dict[str, Decision]:
    """The tags that a policy speaks of, each with what it says.

    The words that a policy holds (in its fields, its closure, its code) are tried on it one by one: a word is a name
    to it if it answers otherwise than to a name that nobody bears.

    >>> sorted(decisions_by_name(jax.checkpoint_policies.save_only_these_names("a", "b")))
    ['a', 'b']
    >>> decisions_by_name(lambda prim, *_, **params: params.get("name") == "mine")
    {'mine': <Decision.SAVE: 'save'>}
    """
    if policy is None:
        return {}
    if isinstance(policy, Policy):
        return dict(policy.tags)
    tried = private(policy)
    default = on_name(tried, _UNUSED_NAME)
    answers = {word: on_name(tried, word) for word in sorted(set(_words(policy, set())))}
    return {word: decision for word, decision in answers.items() if decision is not default}


def answers_differ(policy: Any, eqn: Any, tries: int = 6) -> bool:
    """Whether a policy gives different answers to the same question: it counts its calls, or draws at random."""
    if policy is None or isinstance(policy, Policy):
        return False
    tried = private(policy)
    return len({decision(tried, eqn) for _ in range(tries)}) > 1


def private(policy: Any) -> Any:
    """A copy of a policy with a memory of its own, so that asking it doesn't shift the answers that its owner gets."""
    try:
        if not isinstance(policy, types.FunctionType):
            return copy.deepcopy(policy)
        cells = tuple(types.CellType(private(cell.cell_contents)) for cell in policy.__closure__ or ())
        own = types.FunctionType(
            policy.__code__, policy.__globals__, policy.__name__, copy.deepcopy(policy.__defaults__), cells
        )
        own.__kwdefaults__ = copy.deepcopy(policy.__kwdefaults__)
        return own
    except (TypeError, ValueError, NotImplementedError, copy.Error):
        return policy


def _words(thing: Any, seen: set[int], depth: int = 6) -> Iterator[str]:
    """Every string that a thing holds."""
    if isinstance(thing, str):
        yield thing
        return
    if depth == 0 or id(thing) in seen or isinstance(thing, types.ModuleType | type):
        return
    seen.add(id(thing))
    for part in _parts(thing):
        yield from _words(part, seen, depth - 1)


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, Mapping):
        return [*thing.keys(), *thing.values()]
    if isinstance(thing, tuple | list | set | frozenset):
        return list(thing)
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, types.MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, types.FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        own = [thing.__globals__[n] for n in thing.__code__.co_names if _plain(thing.__globals__.get(n))]
        return [*cells, *own, thing.__defaults__ or (), thing.__kwdefaults__ or {}, thing.__code__]
    if isinstance(thing, types.CodeType):
        return list(thing.co_consts)
    if dataclasses.is_dataclass(thing):
        return [getattr(thing, field.name) for field in dataclasses.fields(thing)]
    if callable(thing):
        slots = [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
        fields = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
        return [*fields, *slots, vars(type(thing)).get("__call__")]
    return []


def _plain(thing: Any) -> bool:
    return isinstance(thing, str | tuple | list | set | frozenset | dict | types.FunctionType)
