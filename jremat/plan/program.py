"""A block as a planner's problem: the forward half of its derivative, with every value that can be kept marked."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jremat.graph import Graph
from jremat.graph.arguments import take_apart
from jremat.graph.evaluate import evaluate
from jremat.graph.trace import Program, capture, graph_of
from jremat.plan.problem import Link, Node, Problem
from jremat.plan.roofline import Cost
from jremat.policy.ops import SELECTABLE, TOP_K, tagged_name
from jremat.transform.decide import Candidate, candidates


def problem_of(
    f: Callable[..., Any],
    *args: Any,
    cost: Cost,
    keep: Collection[str] = (),
    names_only: bool = False,
    fetched: int = 0,
    link: Link | None = None,
    static_argnames: str | Sequence[str] = (),
    **kwargs: Any,
) -> Problem:
    """The planner's problem of a block.

    Read from the program that JAX's derivative of the block runs forward, with what its rules keep beside its values
    (a cosine for a sine): the very program that a recompute runs, so that the planner's bytes and matmuls are JAX's.

    Args:
        f: the forward function of a block or a loss.
        args, kwargs: arrays or ``jax.ShapeDtypeStruct``, in pytrees; differentiated by all that float.
        cost: of each operation, e.g. ``Roofline(chip("h200"))`` or measured.
        keep: tags of values that must not be made twice; a choice by value (top-k, sort, argmax) never is.
        names_only: only the user's own tags can be kept, as plain ``nn.remat`` hears them.
        fetched: so many of the arguments are a layer's parameters: what comes from their floating leaves alone (a cast
            to bfloat16) is made again by a stack, never kept.
        link: to the host.

    Raises:
        ValueError: a name in ``keep`` that no value bears.
    """
    program = capture(take_apart(f, args, kwargs, static_argnames))
    graph = graph_of(program, SELECTABLE)
    _check_names(keep, graph)
    places = _markable(graph, names_only)
    own = len(jax.tree.leaves(args[:fetched]))
    places = _without_fetched(places, graph, own) if own else places
    flat = _forward(program, {} if names_only else {c.value.id: c.mark for c in places.values() if not c.inside})
    residuals = graph_of(Program(flat.jaxpr, tuple(flat.consts), None, ()), SELECTABLE)
    return Problem(_nodes(residuals, flat.jaxpr, cost(residuals), places, frozenset(keep)), graph.fingerprint, link)


def _check_names(keep: Collection[str], graph: Graph) -> None:
    unknown = sorted(set(keep) - set(graph.names))
    if unknown:
        known = ", ".join(graph.names) or "it has none"
        raise ValueError(f"keep: expected tags of this function ({known}), got {', '.join(unknown)}")


def _markable(graph: Graph, names_only: bool) -> dict[str, Candidate]:
    """Mark -> what can be kept under it, values inside loops left out: a loop is run again as a whole."""
    loops = {op.id for op in graph.ops if op.inner and not op.opaque}
    reach = {c.mark: c for c in candidates(graph) if "/" not in c.value.id or c.value.id.partition("/")[0] not in loops}
    if not names_only:
        return reach
    return {c.value.name: c for c in reach.values() if c.op.primitive == "name" and c.value.name}


def _without_fetched(places: dict[str, Candidate], graph: Graph, own: int) -> dict[str, Candidate]:
    """Those of ``places`` that need more than the first ``own`` inputs, where these float."""
    fetched = {i for i in graph.inputs[:own] if graph.values[i].dtype.startswith(("float", "bfloat"))}
    for op in graph.ops:
        if op.inputs and fetched.issuperset(op.inputs):
            fetched |= set(op.outputs)
    return {mark: c for mark, c in places.items() if c.value.id.partition("/")[0] not in fetched}


def _forward(program: Program, marks: dict[str, str]) -> Any:
    """The closed jaxpr of the residuals of the marked function, calls entered."""
    inputs, consts = ([var.aval for var in some] for some in (program.jaxpr.invars, program.jaxpr.constvars))
    real = [k for k, aval in enumerate(inputs) if jnp.issubdtype(aval.dtype, jnp.inexact)]
    real_consts = [k for k, aval in enumerate(consts) if jnp.issubdtype(aval.dtype, jnp.inexact)]

    def kept(consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        def run(some_consts: Sequence[Any], some: Sequence[Any]) -> Any:
            all_consts, all_inputs = list(consts), list(inputs)
            for k, value in zip(real_consts, some_consts):
                all_consts[k] = value
            for k, value in zip(real, some):
                all_inputs[k] = value
            return evaluate(program.jaxpr, all_consts, all_inputs, marks)

        chosen = [consts[k] for k in real_consts], [inputs[k] for k in real]
        return jax.tree.leaves(jax.vjp(run, *chosen)[1])

    traced = jax.make_jaxpr(kept)(consts, inputs)
    return jax.make_jaxpr(lambda *flat: evaluate(traced.jaxpr, traced.consts, flat, {}))(
        *(var.aval for var in traced.jaxpr.invars)
    )


def _nodes(
    graph: Graph, jaxpr: Any, costs: Sequence[float], places: dict[str, Candidate], keep: frozenset[str]
) -> tuple[Node, ...]:
    assert len(graph.ops) == len(jaxpr.eqns), "a program whose calls are entered has an operation per equation"
    maker = {out: place for place, op in enumerate(graph.ops) for out in op.outputs}
    needed = _needed(jaxpr)
    nodes = []
    for place, (op, eqn) in enumerate(zip(graph.ops, jaxpr.eqns)):
        candidate = places.get(tagged_name(eqn.primitive, eqn.params) or "")
        nodes.append(
            Node(
                reads=tuple(sorted({maker[i] for i in op.inputs if i in maker})),
                nbytes=sum(graph.values[o].nbytes for o in op.outputs),
                seconds=costs[place],
                matmul_flops=op.matmul_flops,
                needed=place in needed,
                mark=candidate.mark if candidate else None,
                value=candidate.value.id if candidate else "",
                name=candidate.value.name if candidate else None,
                forced=candidate is not None and _forced(candidate, keep),
                source=candidate.value.source if candidate else op.source,
                primitive=candidate.op.primitive if candidate else op.primitive,
            )
        )
    tags = [tagged_name(eqn.primitive, eqn.params) is not None for eqn in jaxpr.eqns]
    return _without_doubles(nodes, tags)


def _needed(jaxpr: Any) -> frozenset[int]:
    """Places of the equations whose results are residuals."""
    made = {var: place for place, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    return frozenset(made[var] for var in jaxpr.outvars if not isinstance(var, core.Literal) and var in made)


def _forced(candidate: Candidate, keep: frozenset[str]) -> bool:
    return candidate.value.name in keep or TOP_K.name in candidate.op.families


def _without_doubles(nodes: Sequence[Node], tags: Sequence[bool]) -> tuple[Node, ...]:
    """A value under several tags in a row is kept under the last, which its readers read; the others lose theirs."""
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
    return tuple(
        replace(node, forced=place in forced, mark=node.mark if last[place] == place else None)
        for place, node in enumerate(nodes)
    )
