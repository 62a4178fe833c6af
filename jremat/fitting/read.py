"""A whole function, read once: its equations, what its derivative needs of them, and what XLA stores of it as it is.

XLA stores less than JAX's residuals: casts and pointwise results that the backward pass reads element by element are
computed inside its kernels from what is stored anyway. So a residual counts as stored only where a matmul, a
convolution or another kernel that reads memory needs it there, or where the forward pass writes it for one.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jremat.graph import Graph
from jremat.graph.evaluate import evaluate
from jremat.graph.graph import Op
from jremat.graph.rules import ALIASES, EXPENSIVE, FREE, FUSIBLE, LAYOUT, REDUCTIONS
from jremat.graph.trace import MARK, Program, graph_of
from jremat.jax_internals import REMAT, bind, scopes, tagged_name
from jremat.planner.plan_arguments import checked_costs
from jremat.planner.problem import Node
from jremat.planner.read_block import decisions_kept, markable, nodes_of, without_doubles
from jremat.planner.roofline import Cost, written
from jremat.policy.ops import SELECTABLE, TOP_K
from jremat.transform.decide import Candidate

_AT = f"{MARK}equation"


@dataclass(frozen=True, eq=False)
class Reading:
    """A function, ready to be cut into segments.

    Args:
        program: its equations, calls entered.
        graph: of it.
        nodes: what its derivative runs forward, as a planner's nodes.
        equation: of each node, the place of the equation that it comes from.
        stored: of each node, the bytes that XLA holds for the backward pass where nothing is rematted.
        places: mark -> what is kept under it.
        aliases: mark -> the mark that its value is kept under, of values under several tags.
        forward_seconds, step_seconds: of the forward pass, and of forward and backward, as it is.
        scratch: of each equation, bytes that its backward pass writes, gradients of the arguments left out.
        decides: of each equation, whether a choice by value is made inside of it, which no rerun may make twice.
    """

    program: Program
    graph: Graph
    nodes: tuple[Node, ...]
    equation: np.ndarray
    stored: np.ndarray
    places: dict[str, Candidate]
    aliases: dict[str, str]
    forward_seconds: float
    step_seconds: float
    scratch: np.ndarray
    decides: np.ndarray


def read(
    program: Program,
    active: Sequence[int],
    losses: Sequence[int],
    cost: Cost,
    keep: Collection[str],
    in_loop: bool = False,
) -> Reading:
    """Read a function whose calls are entered.

    Args:
        program: of ``entered``.
        active: the places of the inputs that it is differentiated by.
        losses: the places of the results that are differentiated.
        cost: of each operation.
        keep: tags of values that must not be recomputed.
        in_loop: whether it is a loop's body, of which all residuals are stacked: no kernel of the backward loop
            recomputes what the forward loop has made.
    """
    graph = graph_of(program, SELECTABLE)
    places = markable(graph, False)
    forward, backward = _halves(program, active, losses, {c.value.id: c.mark for c in places.values() if not c.inside})
    residuals = graph_of(Program(forward.jaxpr, tuple(forward.consts), None, ()), SELECTABLE)
    in_memory = tuple(residuals.outputs[k] for k in _read_from_memory(backward.jaxpr, len(forward.jaxpr.outvars)))
    as_run = replace(residuals, outputs=in_memory)
    costs = checked_costs(cost(as_run), len(residuals.ops))
    nodes = nodes_of(residuals, forward.jaxpr, costs, places, frozenset(keep), frozenset())
    nodes = decisions_kept(nodes, [TOP_K.name in op.families for op in residuals.ops])
    equation = _equations(forward.jaxpr, places)
    tags = [tagged_name(eqn.primitive, eqn.params) is not None for eqn in forward.jaxpr.eqns]
    nodes, aliases = without_doubles(nodes, tags)
    after = graph_of(Program(backward.jaxpr, tuple(backward.consts), None, ()), SELECTABLE)
    in_kernels = written(after) - set(after.outputs)
    scratch = np.zeros(len(program.jaxpr.eqns) + 1, np.int64)
    for place, op in zip(_equations(backward.jaxpr, {}), after.ops):
        if not _aliases(op.primitive):
            scratch[place] += sum(after.values[o].nbytes for o in op.outputs if o in in_kernels)
    return Reading(
        program,
        graph,
        nodes,
        equation,
        _stored(as_run, [node.needed for node in nodes], in_loop),
        places,
        dict(aliases),
        sum(checked_costs(cost(graph), len(graph.ops))),
        sum(costs) + sum(checked_costs(cost(after), len(after.ops))),
        scratch,
        np.array([_decides(op) for op in graph.ops], bool),
    )


def _decides(op: Op) -> bool:
    """Whether a choice by value is made in a loop, a branch or a kernel; the user's own remat may make it twice."""
    inside = (within for inner in op.inner for within, _ in inner.walk())
    return op.primitive != REMAT and any(TOP_K.name in within.families for within in inside)


def _halves(program: Program, active: Sequence[int], losses: Sequence[int], marks: dict[str, str]) -> tuple[Any, Any]:
    """The forward half of the derivative, to its residuals, and the backward half, from residuals and cotangents.

    Each equation stands under a scope that says which of the program's it comes from.
    """
    types = [var.aval for var in program.jaxpr.invars]

    def run(*given: Any) -> list[Any]:
        env = dict(zip(program.jaxpr.constvars, program.consts)) | dict(zip(program.jaxpr.invars, given))
        value = lambda v: v.val if isinstance(v, core.Literal) else env[v]
        for k, eqn in enumerate(program.jaxpr.eqns):
            with jax.named_scope(f"{_AT}{k}"):
                env |= dict(zip(eqn.outvars, bind(eqn, [value(v) for v in eqn.invars])))
        return [value(v) for v in program.jaxpr.outvars]

    scoped = jax.make_jaxpr(run)(*types)
    tree: Any = None

    def kept(*arrays: Any) -> list[Any]:
        nonlocal tree

        def of_active(*chosen: Any) -> tuple[list[Any], list[Any]]:
            given = list(arrays)
            for k, value in zip(active, chosen):
                given[k] = value
            outs = evaluate(scoped.jaxpr, scoped.consts, given, marks)
            return [outs[k] for k in losses], outs

        _, pull, _ = jax.vjp(of_active, *(arrays[k] for k in active), has_aux=True)
        leaves, tree = jax.tree.flatten(pull)
        return leaves

    flat = lambda closed, types: jax.make_jaxpr(lambda *given: evaluate(closed.jaxpr, closed.consts, given, {}))(*types)
    forward = jax.make_jaxpr(kept)(*types)
    leaves = [var.aval for var in forward.jaxpr.outvars]
    seeds = [program.jaxpr.outvars[k].aval for k in losses]
    pull = lambda *given: jax.tree.unflatten(tree, given[: len(leaves)])(list(given[len(leaves) :]))
    backward = jax.make_jaxpr(pull)(*leaves, *seeds)
    return flat(forward, types), flat(backward, [*leaves, *seeds])


def _equations(jaxpr: Any, places: dict[str, Candidate]) -> np.ndarray:
    """Of each equation of a derivative's half, the one of the function that it comes from."""
    found: list[int | None] = []
    for eqn in jaxpr.eqns:
        candidate = places.get(tagged_name(eqn.primitive, eqn.params) or "")
        scope = re.search(rf"{re.escape(_AT)}(\d+)", scopes(eqn))
        own = int(re.split("[:/]", candidate.value.id)[0]) if candidate else int(scope[1]) if scope else None
        found.append(own)
    later = 0
    for k in range(len(found) - 1, -1, -1):  # the inside of a call stands before what it is called for
        own = found[k]
        later = found[k] = later if own is None else own
    return np.array(found, np.int64)


def _aliases(primitive: str) -> bool:
    return primitive in ALIASES or primitive == "name"


def _read_from_memory(jaxpr: Any, count: int) -> list[int]:
    """Which of the first ``count`` inputs a kernel reads that can't compute them itself."""
    origin = {var: k for k, var in enumerate(jaxpr.invars[:count])}
    found = set()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        given = [origin[v] for v in eqn.invars if not isinstance(v, core.Literal) and v in origin]
        if not given:
            continue
        if _aliases(name) or name == "transpose":
            origin[eqn.outvars[0]] = given[0]
        elif name not in FUSIBLE | FREE | LAYOUT | REDUCTIONS:
            found |= set(given)
    return sorted(found)


def _stored(graph: Graph, needed: Sequence[bool], in_loop: bool) -> np.ndarray:
    """Of each operation, the bytes that XLA holds of it for the backward pass.

    Args:
        graph: of the forward half; its outputs are what the backward pass reads from memory.
        needed: which operations have a residual among their results.
        in_loop: whether all of them are stored.
    """
    in_memory = written(graph)
    readers: dict[str, int] = {}
    for op in graph.ops:
        for value in op.inputs:
            readers[value] = readers.get(value, 0) + 1
    wanted = {out for op, need in zip(graph.ops, needed) if need for out in op.outputs}
    stored = np.zeros(len(graph.ops), np.int64)
    for place in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[place]
        mine = [out for out in op.outputs if out in wanted]
        if not mine or op.primitive in FREE:
            continue
        size = sum(graph.values[out].nbytes for out in mine)
        dear = op.primitive in EXPENSIVE and size > 1 << 20
        made = in_loop or not in_memory.isdisjoint(mine) or op.primitive not in FUSIBLE | LAYOUT or dear
        if made and not _aliases(op.primitive):
            stored[place] = size
        else:
            wanted |= set(op.inputs)
    return stored
