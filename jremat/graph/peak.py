"""The device memory that a step will need at its peak, from its program alone: traced, never compiled."""

import collections
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jremat.graph.arguments import Arguments, take_apart
from jremat.graph.liveness import Life, Run, best
from jremat.graph.operations import Computation, Op, Value
from jremat.graph.order import ORDERS
from jremat.graph.read_kernels import read_program
from jremat.graph.rules import rules_for
from jremat.graph.trace import Program, capture, device_bytes
from jremat.jax_internals import JVP_SCOPE, REMAT_SCOPE, SCAN, TRANSPOSE_SCOPE, live, opened
from jremat.policy.shown import aligned, human

ASSUMPTIONS = (
    "one device, an NVIDIA GPU of Hopper's kind; XLA's own rematerialization pass is off",
    "pointwise chains are fused into what reads them; matmuls, loops and library calls read and write memory",
    "kernels run in the order of XLA's memory scheduler: that of its three orders of which it expects least",
    "stacks of a scan are zeroed before the loop and written in place; donated arguments are overwritten",
    "fragmentation, collectives' buffers and libraries' workspaces are not counted",
)


@dataclass(frozen=True)
class Moment:
    """One step of the program.

    Args:
        step: its index, from 0, loops' bodies once.
        alive_bytes: while it runs: arguments, results and temporaries.
        phase: ``forward``, ``backward``, ``recompute`` or ``update``.
        operation: JAX's primitive.
        scope: JAX's name scopes.
        source: the user's line, ``file.py:12 (function)``.
        layer: of how many loops it is inside: 0 outside of them, 1 in the stack's loop, 2 in a loop within a layer.
    """

    step: int
    alive_bytes: int
    phase: str
    operation: str
    scope: str
    source: str
    layer: int


@dataclass(frozen=True)
class PeakBuffer:
    """One buffer of the program.

    Args:
        name: the user's tag, the argument's path, or the primitive that made it.
        shape, dtype: of all its copies; a scan's stack has the scan's length in front.
        nbytes: of all its copies.
        copies: how many values are stacked in it.
        born, dies: the first and the last step at which it is alive.
        kind: ``argument``, ``result``, ``gradient``, ``optimizer state``, ``kept activation``, ``recomputed``,
            ``logits and loss``, ``weights cast``, ``activation`` or ``workspace``.
        source: the user's line, or nothing.
        donated: an argument whose memory a result takes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    copies: int
    born: int
    dies: int
    kind: str
    source: str
    donated: bool = False


@dataclass(frozen=True)
class PredictedMemory:
    """The memory that a step will need, predicted.

    ``peak_bytes`` is temp + argument + output - alias, as of ``jremat.compiled_memory``.

    Args:
        argument_bytes: all arrays handed in.
        output_bytes: all results.
        alias_bytes: results that take a donated argument's memory.
        temp_bytes: the most that is alive beside these.
        timeline: what is alive at each step; loops' bodies stand in it once, with all that is alive around them.
        buffers: every buffer, largest first.
        calibrated_on: the version of JAX whose compiler the rules were read from.
        assumptions: that the figures rest on.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    timeline: tuple[Moment, ...]
    buffers: tuple[PeakBuffer, ...]
    calibrated_on: str
    assumptions: tuple[str, ...] = ASSUMPTIONS

    @property
    def peak_bytes(self) -> int:
        """Device memory at the moment where it is most."""
        return self.temp_bytes + self.argument_bytes + self.output_bytes - self.alias_bytes

    @property
    def peak_step(self) -> int:
        """The step at which it is most."""
        return max(self.timeline, key=lambda moment: moment.alive_bytes).step if self.timeline else 0

    def alive_at(self, step: int) -> tuple[PeakBuffer, ...]:
        """The buffers alive at a step, largest first."""
        return tuple(buffer for buffer in self.buffers if buffer.born <= step <= buffer.dies)

    def __str__(self) -> str:
        figures = {"arguments": self.argument_bytes, "results": self.output_bytes, "temporaries": self.temp_bytes}
        figures |= {"donated": -self.alias_bytes}
        rows = [("peak", human(self.peak_bytes), "predicted from the traced program, not compiled")]
        rows += [(name, human(n), "") for name, n in figures.items() if n]
        moment = next((moment for moment in self.timeline if moment.step == self.peak_step), None)
        rows += [("moment", "", f"{moment.phase}, {moment.operation} {moment.source}".rstrip())] if moment else []
        alive = [(b.name, human(b.nbytes), f"{b.kind}  {b.source}".rstrip()) for b in self.alive_at(self.peak_step)[:5]]
        return aligned([*rows, *([("largest", "", "alive at that moment")] if alive else []), *alive], right=[1])

    __repr__ = __str__


def predicted_memory(
    step: Callable[..., Any],
    *args: Any,
    donate: int | Sequence[int] = (),
    jax_version: str | None = None,
    **kwargs: Any,
) -> PredictedMemory:
    """The peak memory of ``step(*args)`` on a GPU, by liveness over its program; nothing is compiled or run.

    What is kept and recomputed is what the program says: differentiate, and put remat, inside ``step``.

    Args:
        step: any traceable function; of a ``jax.jit``-ed one the donated arguments are known.
        args, kwargs: arrays or ``jax.ShapeDtypeStruct`` of any shape and dtype, in pytrees; what is no array is fixed.
        donate: positions of arguments that may be overwritten, beside those that ``step``'s own ``jit`` names.
        jax_version: by whose compiler to predict; the installed JAX's where not given.

    Returns:
        The prediction, its timeline and buffers.

    Raises:
        ValueError: ``donate`` names no argument.

    Warns:
        UserWarning: once, for a version of JAX whose compiler the rules were never compared with.

    >>> import jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> found = predicted_memory(lambda x, w: (x @ w) @ w, x, x)
    >>> found.argument_bytes, found.temp_bytes, found.output_bytes, found.peak_bytes
    (32768, 16384, 16384, 65536)

    Source: liveness as of Aho et al. 2006, section 9.2.5, over XLA's order (``jremat.graph.order``).
    """
    places = list(donate) if isinstance(donate, Iterable) else [donate]
    if not all(isinstance(k, int | np.integer) and not isinstance(k, bool) and 0 <= k < len(args) for k in places):
        raise ValueError(f"donate: expected positions of the {len(args)} arguments, e.g. (0,), got {donate!r}")
    return peak_of(take_apart(step, args, kwargs), places, jax_version or jax.__version__)


def peak_of(arguments: Arguments, donate: Sequence[int], version: str) -> PredictedMemory:
    """The prediction for a call that is taken apart; see ``predicted_memory``."""
    return peak_in(capture(arguments), donate, version)


def peak_in(program: Program, donate: Sequence[int], version: str) -> PredictedMemory:
    """The prediction for a traced call; see ``predicted_memory``."""
    rules = rules_for(version)
    jaxpr, donated = _entered(program.jaxpr)
    donated = [own or path.split("[")[0].split(".")[0] in {f"argument {k}" for k in donate} for own, path in
               zip(donated, program.paths)]  # fmt: skip
    computation = read_program(live(jaxpr), rules)
    found = best(computation, ORDERS, rules.bodies_late)
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, core.Literal)} | {
        v for v in jaxpr.outvars if not isinstance(v, core.Literal)
    }
    inputs = [device_bytes(v.aval) if v in read else 0 for v in jaxpr.invars]  # jit drops what nobody reads
    outputs = [v.nbytes for v in computation.outputs]
    table = 8 * len(outputs) if len(outputs) > 1 else 0  # results are handed back in a table of pointers
    alias = _aliased(computation, donated)
    held = sum(inputs) + sum(outputs) + table - alias
    end = len(found.alive) - 1
    arguments_held = [
        PeakBuffer(
            path, tuple(v.aval.shape), str(v.aval.dtype), nbytes, 1, 0, end, _argument_kind(path), "", donated=own
        )
        for path, v, nbytes, own in zip(program.paths, jaxpr.invars, inputs, donated)
        if nbytes
    ]
    buffers = [*arguments_held, *(_buffer(life, found) for life in found.lives if life.nbytes)]
    return PredictedMemory(
        argument_bytes=sum(inputs),
        output_bytes=sum(outputs) + table,
        alias_bytes=alias,
        temp_bytes=found.peak_bytes,
        timeline=tuple(_moment(step, found, held) for step in range(len(found.alive))),
        buffers=tuple(sorted(buffers, key=lambda buffer: -buffer.nbytes)),
        calibrated_on=rules.jax,
    )


def _entered(jaxpr: Any) -> tuple[Any, list[bool]]:
    """The program inside of a lone ``jit``, and which of its inputs are donated."""
    donated = [False] * len(jaxpr.invars)
    if len(jaxpr.eqns) == 1 and jaxpr.eqns[0].primitive.name == "jit":
        eqn = jaxpr.eqns[0]
        inner = opened(eqn.params["jaxpr"])
        places = {var: k for k, var in enumerate(eqn.invars) if not isinstance(var, core.Literal)}
        whole = not inner.constvars and all(var in places for var in jaxpr.invars)
        if whole and len(eqn.invars) == len(jaxpr.invars) and list(eqn.outvars) == list(jaxpr.outvars):
            given = list(eqn.params["donated_invars"])
            order = [places[var] for var in jaxpr.invars]
            donated = [given[k] for k in order]
            inner = inner.replace(invars=[inner.invars[k] for k in order])
            return inner, donated
        for var, own in zip(eqn.invars, eqn.params["donated_invars"]):
            if own and var in jaxpr.invars:
                donated[jaxpr.invars.index(var)] = True
    return jaxpr, donated


def _aliased(computation: Computation, donated: Sequence[bool]) -> int:
    """Bytes of results that take a donated argument's memory: JAX pairs them by shape and dtype."""
    free = collections.Counter(
        (tuple(v.aval.shape), str(v.aval.dtype)) for v, own in zip(computation.inputs, donated) if own
    )
    total = 0
    for value in computation.outputs:
        key = tuple(value.aval.shape), str(value.aval.dtype)
        if free[key]:
            free[key] -= 1
            total += value.nbytes
    return total


def _argument_kind(path: str) -> str:
    words = path.lower()
    return (
        "optimizer state" if any(name in words for name in (".mu", ".nu", "opt", "trace", "momentum")) else "argument"
    )


def _moment(step: int, found: Run, held: int) -> Moment:
    ops = found.ops[step]
    scope = next((op.scope for op in reversed(ops) if op.scope), "")
    whole = "/".join(op.scope for op in ops)
    source = next((op.source for op in reversed(ops) if op.source), "")
    return Moment(step, found.alive[step] + held, _phase(whole), ops[-1].name, scope, source, len(ops) - 1)


def _phase(scope: str) -> str:
    if REMAT_SCOPE in scope:
        return "recompute"
    if TRANSPOSE_SCOPE in scope:
        return "backward"
    return "forward" if JVP_SCOPE in scope else "update"


def _buffer(life: Life, found: Run) -> PeakBuffer:
    value = life.value
    op = next((v.maker for v in life.values if v.maker is not None and v.maker.name != "zeros"), value.maker)
    tag = next((v.tag for v in life.values if v.tag), None)
    around = found.ops[life.born][: life.depth]
    scope = "/".join([o.scope for o in around] + ([op.scope] if op is not None else []))
    return PeakBuffer(
        name=tag or (op.name if op is not None else "constant"),
        shape=tuple(value.aval.shape),
        dtype=str(value.aval.dtype),
        nbytes=life.nbytes,
        copies=value.aval.shape[0]
        if value.maker is not None and value.maker.name == "zeros" and value.aval.shape
        else 1,
        born=life.born,
        dies=life.dies,
        kind=_kind(life, op, scope, found),
        source=op.source if op is not None else "",
    )


def _kind(life: Life, op: Op | None, scope: str, found: Run) -> str:
    phases = [_phase("/".join(o.scope for o in found.ops[t])) for t in (life.born, life.dies)]
    if op is not None and op.name == SCAN and TRANSPOSE_SCOPE in scope:
        return "gradient"
    if REMAT_SCOPE in scope:
        return "recomputed"
    if op is not None and op.name == "convert_element_type" and _from_argument(life.value):
        return "weights cast"
    if life.depth == 0 and phases[1] != "update" and op is not None and _after_layers(life, found):
        return "logits and loss"
    if TRANSPOSE_SCOPE in scope:
        return "gradient"
    return "kept activation" if phases[1] != "forward" and JVP_SCOPE in scope else "activation"


def _after_layers(life: Life, found: Run) -> bool:
    """Whether a value outside of loops was made by a matmul, or from one's result, between the forward's loop and the
    backward's."""
    op = life.values[-1].maker
    matmul = op is not None and "dot_general" in (op.name, *(v.maker.name for v in op.inputs if v.maker is not None))
    return (
        matmul and any(len(ops) > 1 for ops in found.ops[: life.born]) and JVP_SCOPE in found.ops[life.born][-1].scope
    )


def _from_argument(value: Value) -> bool:
    return value.maker is not None and all(v.held for v in value.maker.inputs)
