"""How many bytes a traced program holds at a time, read from who makes and who last reads each value.

A first estimate: program order, no fusion but in place where an input dies. Good for the same program in two forms.
"""

from typing import Any

from jax.extend import core

from jremat.graph.trace import aval_bytes, inner_jaxprs, opened
from jremat.policy.ops import POINTWISE, tagged_name

# The result is its input's memory, or takes none.
_ALIASES = frozenset(
    {
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "copy",
        "copy_p",
        "stop_gradient",
        "sharding_constraint",
        "reduce_precision",
    }
    | {"random_wrap", "random_unwrap", "optimization_barrier", "bitcast_convert_type"}
)
_FREE = frozenset({"broadcast_in_dim", "iota", "full", "broadcast"})
_IN_PLACE = frozenset({*POINTWISE.primitives, "dynamic_update_slice", "scatter-add", "scatter", "convert_element_type"})


def timeline(jaxpr: Any, memory: dict[int, int] | None = None) -> list[int]:
    """Bytes alive while each equation runs, inputs and constants left out: they are the caller's.

    Args:
        jaxpr: open or closed; dead code counts, so take it out before.
        memory: peaks of inner jaxprs already known.
    """
    memory = {} if memory is None else memory
    jaxpr = opened(jaxpr)
    root: dict[Any, Any] = {}  # variable -> the one whose memory it is; absent: nobody's here

    def of(v: Any) -> Any:
        return None if isinstance(v, core.Literal) else root.get(v)

    last: dict[Any, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        aliased = eqn.primitive.name in _ALIASES or tagged_name(eqn.primitive, eqn.params) is not None
        for k, out in enumerate(eqn.outvars):
            if aliased:
                source = of(eqn.invars[min(k, len(eqn.invars) - 1)])
                if source is not None:
                    root[out] = source
            elif eqn.primitive.name not in _FREE:
                root[out] = out
        for v in (*eqn.invars, *eqn.outvars):
            if of(v) is not None:
                last[of(v)] = i
    for v in jaxpr.outvars:
        if of(v) is not None:
            last[of(v)] = len(jaxpr.eqns)
    dying: dict[int, list[Any]] = {}
    for v, i in last.items():
        dying.setdefault(i, []).append(v)

    alive, line = 0, []
    for i, eqn in enumerate(jaxpr.eqns):
        made = sum(aval_bytes(v.aval) for v in eqn.outvars if of(v) is v)
        ends = dying.get(i, [])
        over = 0
        if eqn.primitive.name in _IN_PLACE:
            over = min(made, sum(aval_bytes(v.aval) for v in ends if v not in eqn.outvars))
        inner = max((peak_bytes(j, memory) for j, _ in inner_jaxprs(eqn)), default=0)
        if eqn.primitive.name != "scan":  # its outputs are the inside's own
            inner = max(0, inner - made)
        line.append(alive + made - over + inner)
        alive += made - sum(aval_bytes(v.aval) for v in ends)
    return line


def peak_bytes(jaxpr: Any, memory: dict[int, int] | None = None) -> int:
    """The most that is alive at any time, inputs and constants left out."""
    memory = {} if memory is None else memory
    inner = opened(jaxpr)
    if id(inner) not in memory:
        memory[id(inner)] = max(timeline(inner, memory), default=0)
    return memory[id(inner)]
