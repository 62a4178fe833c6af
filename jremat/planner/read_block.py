"""A block as a planner's problem: the forward half of its derivative, with every value that can be kept marked."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.extend import core

from jremat.graph import Graph
from jremat.graph.arguments import take_apart
from jremat.graph.differentiate import is_inexact, kept_by_pullback
from jremat.graph.effects import rerunnable
from jremat.graph.evaluate import evaluate
from jremat.graph.flops import flops
from jremat.graph.residuals import read_residuals
from jremat.graph.trace import Program, capture, graph_of
from jremat.graph.two_passes import OF_FORMAT
from jremat.jax_internals import remat3_is_on, tagged_name
from jremat.planner.plan_arguments import checked_costs
from jremat.planner.problem import Link, Node, Outcome, Problem
from jremat.planner.roofline import Cost
from jremat.policy import FULL, OFFLOAD, SAVE, Policy
from jremat.policy.ops import SELECTABLE, TOP_K
from jremat.policy.shown import most
from jremat.transform.checkpoint import checkpoint, decisions_for
from jremat.transform.decide import Candidate, candidates
from jremat.transform.groups import gradient_step


@dataclass(frozen=True, eq=False)
class Block:
    """A block that can be planned.

    Args:
        program: as traced.
        problem: what to choose from.
        forward_seconds: of one forward pass, in the unit of the cost.
        forward_flops: of its matmuls.
        names_only: whether only the user's own tags can be kept.
    """

    program: Program
    problem: Problem
    forward_seconds: float
    forward_flops: int
    names_only: bool = False

    def outcome(self, policy: Policy) -> Outcome:
        """What a policy comes to, under the same costs as the planner's own choices.

        Of one that keeps values inside loops or compresses, bytes and matmuls are counted on its own program, and its
        time is the time of the rest with that of the matmuls put in; packing is not timed.

        Raises:
            ValueError: a selector of the policy matches nothing in the block.
        """
        if policy.keeps_everything:
            return self.problem.outcome(self.problem.marks, by_default=True)
        decisions = decisions_for(self.program, policy, strict=True)
        saved = frozenset(mark.partition(OF_FORMAT)[0] for mark in decisions.saved)  # packed or not
        in_loops = not self.within_loops.isdisjoint(saved | decisions.offloaded)
        rest = self.problem.outcome(saved, decisions.offloaded, by_default=in_loops)
        if not in_loops and not decisions.packed:
            return rest
        again, kept_bytes = _counted(self.program, policy)
        seconds_a_flop = self.forward_seconds / max(self.forward_flops, 1)
        return replace(
            rest,
            kept_bytes=kept_bytes - rest.host_bytes,
            recompute_flops=again,
            recompute_seconds=rest.recompute_seconds + seconds_a_flop * max(0, again - rest.recompute_flops),
        )

    @cached_property
    def within_loops(self) -> frozenset[str]:
        """The marks of what is inside of loops, which no choice of the planner's own keeps."""
        graph = graph_of(self.program, SELECTABLE)
        loops = _loops(graph)
        return frozenset(c.mark for c in candidates(graph) if _inside(c, loops) and not c.inside)

    def policy(self, outcome: Outcome) -> Policy:
        """The policy that keeps what ``outcome`` does: by the user's own tags where these say it, else by value."""
        if not outcome.total_bytes:
            return FULL
        by_name = self._by_name(outcome)
        if by_name is not None:
            return by_name
        nodes = [self.problem.nodes[place] for place in outcome.held]
        values = {node.value: OFFLOAD if node.mark in outcome.offloaded else SAVE for node in nodes}
        named = dict.fromkeys(node.name or node.primitive for node in sorted(nodes, key=lambda node: -node.nbytes))
        label = "+".join(most([*named], 3, "")).replace("… and ", "").rstrip()
        return Policy(values=tuple(values.items()), fingerprint=self.problem.fingerprint, label=f"[{label}]")

    def _by_name(self, outcome: Outcome) -> Policy | None:
        held = [self.problem.nodes[place] for place in outcome.held]
        if not all(node.name for node in held):
            return None
        kept = {str(node.name) for node in held if node.mark in outcome.kept}
        moved = {str(node.name) for node in held if node.mark in outcome.offloaded}
        if kept & moved:
            return None
        policy = Policy.save(*sorted(kept)) if kept else FULL
        policy = policy | Policy.offload(*sorted(moved)) if moved else policy
        try:
            same = self.outcome(policy)
        except ValueError:  # a tag that the plain name can't reach
            return None
        figures = lambda o: (o.kept_bytes, o.host_bytes, o.recomputed)
        return policy if figures(same) == figures(outcome) else None


def read_block(
    f: Callable[..., Any],
    *args: Any,
    cost: Cost,
    keep: Collection[str] = (),
    names_only: bool = False,
    fetched: int = 0,
    host_link_bytes_per_second: float | None = None,
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    **kwargs: Any,
) -> Block:
    """A block, ready to be planned.

    Read from the program that JAX's derivative of the block runs forward, with what its rules keep beside its values
    (a cosine for a sine): the very program that a recompute runs, so that the planner's bytes and matmuls are JAX's.

    Args:
        f: the forward function of a block or a loss.
        args, kwargs: arrays or ``jax.ShapeDtypeStruct``, in pytrees; differentiated by all that float.
        cost: of each operation, e.g. ``Roofline(chip("h200"))`` or measured.
        keep: tags of values that must not be recomputed; a choice by value (top-k, sort, argmax) never is.
        names_only: only the user's own tags can be kept, as plain ``nn.remat`` sees them.
        fetched: so many of the arguments are a layer's parameters: what comes from their floating leaves alone (a cast
            to bfloat16) is recomputed by a stack, never kept.
        host_link_bytes_per_second: one direction; None: nothing is offloaded.

    Raises:
        ValueError: a name in ``keep`` that no value bears; a cost that isn't a number for each operation.

    >>> import jax.numpy as jnp
    >>> block = read_block(lambda x, w: jnp.sin(x @ w) @ w, jnp.ones((8, 4)), jnp.ones((4, 4)), cost=lambda graph:
    ...                    tuple(op.matmul_flops for op in graph.ops))
    >>> block.outcome(FULL).recompute_flops, block.forward_flops
    (256, 512)
    """
    program = rerunnable(capture(take_apart(f, args, kwargs, static_argnames, static_argnums)))
    graph = graph_of(program, SELECTABLE)
    _check_names(keep, graph)
    given = (*program.jaxpr.invars, *program.jaxpr.constvars)
    if not any(is_inexact(var.aval) for var in given):
        raise ValueError("args: expected a floating-point array to differentiate by, got none")
    places = markable(graph, names_only)
    own = len(jax.tree.leaves(args[:fetched]))
    fetched_values = _made_from(graph.inputs[:own], graph)
    places = {mark: c for mark, c in places.items() if c.value.id.partition("/")[0] not in fetched_values}
    flat = _forward(program, {} if names_only else {c.value.id: c.mark for c in places.values() if not c.inside})
    residuals = graph_of(Program(flat.jaxpr, tuple(flat.consts), None, ()), SELECTABLE)
    costs = checked_costs(cost(residuals), len(residuals.ops))
    consts = len(program.jaxpr.constvars)
    again = _made_from(residuals.inputs[consts : consts + own], residuals)
    nodes = nodes_of(residuals, flat.jaxpr, costs, places, frozenset(keep), again)
    nodes = decisions_kept(nodes, [TOP_K.name in op.families for op in residuals.ops])
    tags = [tagged_name(eqn.primitive, eqn.params) is not None for eqn in flat.jaxpr.eqns]
    nodes, aliases = without_doubles(nodes, tags)
    forward = sum(checked_costs(cost(graph), len(graph.ops)))
    # A backward pass does the matmuls of two forward passes.
    link = Link(host_link_bytes_per_second, forward, 2 * forward) if host_link_bytes_per_second else None
    problem = Problem(nodes, graph.signature, link, aliases)
    return Block(program, problem, forward, graph.matmul_flops, names_only)


def _counted(program: Program, policy: Policy) -> tuple[int, int]:
    """Matmul FLOPs that a block runs again under a policy, and the bytes that it keeps, as its own program has them."""
    arrays = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in program.jaxpr.invars]
    run = checkpoint(lambda *given: evaluate(program.jaxpr, program.consts, given, {}), policy)
    kept = read_residuals(take_apart(run, arrays, {})).total_bytes
    return flops(gradient_step(lambda given, _: run(*given)), arrays, ()).recompute, kept


def _check_names(keep: Collection[str], graph: Graph) -> None:
    unknown = sorted(set(keep) - set(graph.names))
    if unknown:
        known = ", ".join(graph.names) or "it has none"
        raise ValueError(f"keep: expected tags of this function ({known}), got {', '.join(unknown)}")


def markable(graph: Graph, names_only: bool) -> dict[str, Candidate]:
    """Mark -> what can be kept under it.

    Values inside loops are left out: a loop is run again as a whole; complex ones, which JAX's remat can't keep; and
    those of derivative rules where ``jax_remat3`` is on, which reads no tags there.
    """
    loops, unread = _loops(graph), remat3_is_on()
    reach = {
        c.mark: c
        for c in candidates(graph)
        if not (_inside(c, loops) or c.value.dtype.startswith("complex") or (c.in_rule and unread))
    }
    if not names_only:
        return reach
    return {c.value.name: c for c in reach.values() if c.op.primitive == "name" and c.value.name}


def _loops(graph: Graph) -> frozenset[str]:
    return frozenset(op.id for op in graph.ops if op.inner and not op.opaque)


def _inside(candidate: Candidate, loops: frozenset[str]) -> bool:
    head, within, _ = candidate.value.id.partition("/")
    return bool(within) and head in loops


def _made_from(given: Sequence[str], graph: Graph) -> frozenset[str]:
    """The values that are made from those of ``given`` alone that float."""
    found = {i for i in given if graph.values[i].dtype.startswith(("float", "bfloat"))}
    for op in graph.ops:
        if op.inputs and found.issuperset(op.inputs):
            found |= set(op.outputs)
    return frozenset(found)


def _forward(program: Program, marks: dict[str, str]) -> Any:
    """The closed jaxpr of the residuals of the marked function, calls entered."""
    inputs, consts = ([var.aval for var in some] for some in (program.jaxpr.invars, program.jaxpr.constvars))
    arrays = [*consts, *inputs]
    run = lambda *given: evaluate(program.jaxpr, given[: len(consts)], given[len(consts) :], marks)
    traced = jax.make_jaxpr(kept_by_pullback(run))(*arrays)
    return jax.make_jaxpr(lambda *flat: evaluate(traced.jaxpr, traced.consts, flat, {}))(*arrays)


def nodes_of(
    graph: Graph,
    jaxpr: Any,
    costs: Sequence[float],
    places: dict[str, Candidate],
    keep: frozenset[str],
    fetched: frozenset[str],
) -> tuple[Node, ...]:
    """The operations of a forward program as a planner's nodes.

    Args:
        graph, jaxpr: of the program that a derivative runs forward, calls entered.
        costs: of its operations.
        places: mark -> what is kept under it.
        keep: tags of values that must not be recomputed.
        fetched: values that are made from a layer's parameters alone.
    """
    assert len(graph.ops) == len(jaxpr.eqns), "a program whose calls are entered has an operation per equation"
    maker = {out: place for place, op in enumerate(graph.ops) for out in op.outputs}
    needed = _needed(jaxpr)
    read = {var for var in jaxpr.outvars if not isinstance(var, core.Literal)}
    nodes = []
    for place, (op, eqn) in enumerate(zip(graph.ops, jaxpr.eqns)):
        tag = tagged_name(eqn.primitive, eqn.params)
        candidate = places.get(tag or "")
        reads = tuple(sorted({maker[i] for i in op.inputs if i in maker}))
        nodes.append(
            Node(
                reads=reads,
                # of an operation with several results, e.g. a loop, the backward pass reads only some
                nbytes=sum(
                    graph.values[o].nbytes for o, var in zip(op.outputs, eqn.outvars) if candidate or var in read
                ),
                seconds=costs[place],
                matmul_flops=op.matmul_flops,
                needed=place in needed,
                by_default=place in needed and not fetched.issuperset(op.outputs),
                is_tag=tag is not None and len(reads) == 1,
                mark=candidate.mark if candidate else None,
                value=candidate.value.id if candidate else "",
                name=candidate.value.name if candidate else None,
                forced=candidate is not None and _forced(candidate, keep),
                source=candidate.value.source if candidate else op.source,
                primitive=candidate.op.primitive if candidate else op.primitive,
            )
        )
    return tuple(nodes)


def _needed(jaxpr: Any) -> frozenset[int]:
    """Places of the equations whose results are residuals."""
    made = {var: place for place, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    return frozenset(made[var] for var in jaxpr.outvars if not isinstance(var, core.Literal) and var in made)


def _forced(candidate: Candidate, keep: frozenset[str]) -> bool:
    return candidate.value.name in keep or TOP_K.name in candidate.op.families


def decisions_kept(nodes: Sequence[Node], decide: Sequence[bool]) -> tuple[Node, ...]:
    """What a choice by value is made from is kept where the choice must be recomputed.

    JAX's derivative reads the choice's own result, which no tag on it reaches; from the same values it comes out equal.
    """
    forced = set()
    todo = [read for place, node in enumerate(nodes) if decide[place] for read in node.reads]
    while todo:
        place = todo.pop()
        if nodes[place].mark is not None:
            forced.add(place)
        else:
            todo += nodes[place].reads
    return tuple(replace(node, forced=node.forced or place in forced) for place, node in enumerate(nodes))


def without_doubles(
    nodes: Sequence[Node], tags: Sequence[bool]
) -> tuple[tuple[Node, ...], tuple[tuple[str, str], ...]]:
    """A value under several tags in a row is kept under the last, which its readers read; the others are aliases."""
    readers: dict[int, list[int]] = {}
    for place, node in enumerate(nodes):
        for read in node.reads:
            readers.setdefault(read, []).append(place)
    last = list(range(len(nodes)))  # the marked tag at the end of the row that a value begins
    for place in range(len(nodes) - 1, -1, -1):
        after = readers.get(place, [])
        if len(after) == 1 and tags[after[0]] and nodes[last[after[0]]].mark and not nodes[place].needed:
            last[place] = last[after[0]]
    forced = {last[place] for place, node in enumerate(nodes) if node.forced}
    aliases = tuple(
        (str(node.mark), str(nodes[last[place]].mark))
        for place, node in enumerate(nodes)
        if node.mark and last[place] != place and node.mark != nodes[last[place]].mark
    )
    single = tuple(
        replace(node, forced=place in forced, mark=node.mark if last[place] == place else None)
        for place, node in enumerate(nodes)
    )
    return single, aliases
