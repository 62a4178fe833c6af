"""One layer of a stack, cut in two: a forward half that says what it keeps, a backward half that needs just that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from jremat.graph.differentiate import is_inexact
from jremat.graph.evaluate import evaluate
from jremat.jax_internals import REMAT_SCOPE

Leaves = list[jax.Array]
Flat = Callable[[Leaves, Leaves, Leaves], Leaves]
"""A block on flat lists: (one layer's parameters, what all layers share, carry) to the next carry."""


@dataclass(frozen=True)
class Active:
    """Which leaves are differentiated: a layer's, the shared ones', the carry's."""

    layer: tuple[bool, ...]
    shared: tuple[bool, ...]
    carry: tuple[bool, ...]


@dataclass(frozen=True)
class Kept:
    """A residual that is stacked over the layers: the place among what the forward half keeps."""

    place: int


@dataclass(frozen=True)
class Fetched:
    """A residual that is a layer's own leaf or a shared one, read where it stands: the place among them."""

    place: int


@dataclass(frozen=True)
class Remade:
    """A residual computed from parameters and shared values alone, recomputed in the backward pass."""

    place: int


@dataclass(frozen=True, eq=False)
class SplitLayer:
    """The two halves of a layer under one policy.

    Args:
        whole: jaxpr of (layer, shared, carry) to the next carry and every residual.
        kept: which outputs of ``whole`` are stacked.
        remake: jaxpr of (layer, shared) to the residuals that no carry is needed for.
        sources: where each residual comes from.
        pullback: how the residuals are packed; unpacked, it is JAX's own pullback.
        active: which leaves are differentiated.
        carried: for each carry leaf its place among what is kept, or None where it isn't kept.
    """

    whole: Any
    kept: tuple[int, ...]
    remake: Any
    sources: tuple[Kept | Fetched | Remade, ...]
    pullback: Any
    active: Active
    carried: tuple[int | None, ...]

    def forward(self, layer: Leaves, shared: Leaves, carry: Leaves) -> tuple[Leaves, Leaves]:
        """The next carry, and what must be kept."""
        outs = core.jaxpr_as_fun(self.whole)(*layer, *shared, *carry)
        return outs[: len(carry)], [outs[k] for k in self.kept]

    def backward(self, layer: Leaves, shared: Leaves, kept: Leaves, ct: Leaves) -> tuple[Leaves, Leaves, Leaves]:
        """Gradients of the active layer leaves, the active shared leaves and the active carry leaves.

        Args:
            ct: cotangents of the active leaves of the next carry.
        """
        own = [*layer, *shared]
        with jax.named_scope(REMAT_SCOPE):
            remade = core.jaxpr_as_fun(self.remake)(*own)
        pools = {Kept: kept, Fetched: own, Remade: remade}
        pull = jax.tree.unflatten(self.pullback, [pools[type(s)][s.place] for s in self.sources])
        return pull(ct)


def split(block: Flat, layer: Sequence[Any], shared: Sequence[Any], carry: Sequence[Any], active: Active) -> SplitLayer:
    """Cut ``block``, already under its policy, into its two halves.

    Kept is what JAX's own derivative of ``block`` reads again and what needs the carry to be computed. A parameter is
    read where it stands, and what is computed from parameters and shared values alone (a cast to bfloat16, a mask from
    positions) is recomputed: stacked over the layers it would be a second copy of the model. What comes from a layer's
    integers or keys (a dropout mask) is kept, as its policy said.

    Args:
        block: a pure function on flat lists that closes over no tracer.
        layer, shared, carry: avals of its leaves.
        active: which of them are differentiated.
    """
    sizes = len(layer), len(shared)
    treedefs = []

    def whole(*leaves: Any) -> list[Any]:
        own, common, state = _cut(leaves, *sizes)
        lists, flags = (own, common, state), (active.layer, active.shared, active.carry)

        def differentiated(*chosen: list[Any]) -> tuple[list[Any], list[Any]]:
            out = block(*(_merge(f, c, given) for f, c, given in zip(flags, chosen, lists)))
            return _chosen(active.carry, out), _chosen([not a for a in active.carry], out)

        chosen = (_chosen(f, given) for f, given in zip(flags, lists))
        out, pullback, rest = jax.vjp(differentiated, *chosen, has_aux=True)
        residuals, treedef = jax.tree.flatten(pullback)
        treedefs.append(treedef)
        merged = _merge(active.carry, out, _spread([not a for a in active.carry], rest))
        return [*merged, *residuals]

    avals = [*layer, *shared, *carry]
    closed = jax.make_jaxpr(whole)(*avals)
    flat = jax.make_jaxpr(lambda *leaves: evaluate(closed.jaxpr, closed.consts, leaves, {}))(*avals)
    needs = _needing_carry(flat.jaxpr, sum(sizes), exempt=[is_inexact(a) for a in layer])
    return _sorted_out(closed, flat, needs, sum(sizes), len(carry), treedefs[-1], active)


def _needing_carry(jaxpr: Any, num_own: int, exempt: list[bool]) -> set[Any]:
    """Variables that can't be made from parameters and shared values alone."""
    parameters = set(jaxpr.invars[:num_own]) - {v for v, real in zip(jaxpr.invars, exempt) if not real}
    needs = set(jaxpr.invars) - parameters
    for eqn in jaxpr.eqns:
        if eqn.effects or any(v in needs for v in eqn.invars if not isinstance(v, core.Literal)):
            needs |= set(eqn.outvars)
    return needs


def _sorted_out(closed, flat, needs, num_own, num_carry, treedef, active) -> SplitLayer:
    own = {v: k for k, v in enumerate(flat.jaxpr.invars[:num_own])}
    kept: dict[Any, int] = {}  # variable -> output of ``whole`` that gives it
    remade: dict[Any, int] = {}
    constants: list[Any] = []
    sources: list[Kept | Fetched | Remade] = []
    for k, v in enumerate(flat.jaxpr.outvars[num_carry:], start=num_carry):
        if not isinstance(v, core.Literal) and v in own:
            sources.append(Fetched(own[v]))
        elif not isinstance(v, core.Literal) and v in needs:
            kept.setdefault(v, k)
            sources.append(Kept(list(kept).index(v)))
        else:
            key = v if not isinstance(v, core.Literal) else id(v)
            if key not in remade:
                remade[key] = len(constants)
                constants.append(v)
            sources.append(Remade(remade[key]))
    places = list(kept)
    carried = tuple(places.index(v) if v in kept else None for v in flat.jaxpr.invars[num_own:])
    remake = core.ClosedJaxpr(_pruned(flat.jaxpr, flat.jaxpr.invars[:num_own], constants), flat.consts)
    return SplitLayer(closed, tuple(kept.values()), remake, tuple(sources), treedef, active, carried)


def _pruned(jaxpr: Any, invars: list[Any], outvars: list[Any]) -> Any:
    """What of a flat jaxpr ``outvars`` need; they must not need more than ``invars`` and the constants."""
    wanted = {v for v in outvars if not isinstance(v, core.Literal)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if wanted & set(eqn.outvars):
            eqns.append(eqn)
            wanted |= {v for v in eqn.invars if not isinstance(v, core.Literal)}
    return jaxpr.replace(invars=list(invars), outvars=list(outvars), eqns=eqns[::-1], effects=core.no_effects)


def _cut(leaves: Sequence[Any], *sizes: int) -> list[list[Any]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(list(leaves[start : start + size]))
        start += size
    return [*parts, list(leaves[start:])]


def _chosen(flags: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    return [value for flag, value in zip(flags, values, strict=True) if flag]


def _merge(flags: Sequence[bool], chosen: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
    """``rest``, with ``chosen`` in the flagged places."""
    supply = iter(chosen)
    return [next(supply) if flag else value for flag, value in zip(flags, rest, strict=True)]


def _spread(flags: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    """``values`` in the flagged places, None elsewhere."""
    supply = iter(values)
    return [next(supply) if flag else None for flag in flags]
