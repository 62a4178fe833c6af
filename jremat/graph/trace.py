"""A function as a graph; all that jremat needs of JAX's private modules stands here and nowhere else."""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import ad_checkpoint, source_info_util
from jax._src import core as private_core
from jax._src import effects as jax_effects
from jax._src import tree_util as private_tree
from jax._src.interpreters import partial_eval
from jax._src.state.discharge import discharge_state
from jax._src.state.types import RefEffect
from jax._src.util import weakref_lru_cache
from jax.extend import core
from jax.extend.core.primitives import name_p
from jax.interpreters import ad

from jremat.graph.arguments import Arguments, take_apart
from jremat.graph.arithmetic import matmul_flops, other_flops
from jremat.graph.graph import Graph, Op, Value
from jremat.policy.ops import FAMILIES, Family, tagged_name

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "core_closed_call", "eval_jaxpr"})
"""Primitives that only call a jaxpr: entered as if they were not there."""

MARK = "jremat."
"""What the names begin with that we put on values; a user's tag may not, and none of them is shown as a tag."""

REWRITABLE = frozenset({"scan", "cond", "jit", "pjit"})
"""Primitives whose inside a policy can decide value by value, a ``jit`` that places its arguments among them; all
others that hold a jaxpr are opaque."""


weakly_cached = weakref_lru_cache
"""A cache that holds its function's first argument weakly, e.g. a program. What is made must not hold that either."""


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    """``jax.jit(f)`` where it is called eagerly; where a program is traced, ``f`` becomes part of that."""
    alone, within = jax.jit(f), jax.jit(f, inline=True)
    return lambda *args: (within if _staged() else alone)(*args)


def _staged() -> bool:
    """Whether a program is being traced, under whatever transformations."""
    trace = private_core.trace_ctx.trace
    while not isinstance(trace, partial_eval.DynamicJaxprTrace) and hasattr(trace, "parent_trace"):
        trace = trace.parent_trace
    return isinstance(trace, partial_eval.DynamicJaxprTrace)


@dataclass(frozen=True)
class Program:
    """A traced call: its jaxpr and how its results are packed.

    Args:
        jaxpr: flat, open; its inputs are the call's arrays.
        consts: values that the function closed over, tracers of an outer trace among them.
        out_tree: of the result.
        paths: of the arrays, e.g. ``argument 0['w']``.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    out_tree: Any
    paths: tuple[str, ...]


def capture(arguments: Arguments) -> Program:
    """Trace a call once; JAX itself remembers the trace by the function and the shapes.

    Raises:
        ValueError: the function reads an argument's value in Python.
    """
    # The user's own function where it can be, so that the trace is found again.
    run = arguments.f if all(arguments.traced) else arguments.over_arrays(arguments.call)
    args, kwargs = arguments.to_trace()
    with arguments.naming_parameters():
        closed, out = jax.make_jaxpr(run, return_shape=True)(*args, **kwargs)
    return Program(closed.jaxpr, tuple(closed.consts), jax.tree.structure(out), arguments.array_paths)


def trace(f: Callable[..., Any], *args: Any, families: Sequence[Family] = FAMILIES, **kwargs: Any) -> Graph:
    """What a function computes, as a flat graph of values and operations.

    Calls (``jit``) are entered; loops, branches and custom derivative rules are kept whole, with their inside as graphs
    of their own. Nothing is run.

    Args:
        f: any traceable function.
        args, kwargs: arrays or ``jax.ShapeDtypeStruct`` of any shape and dtype, in pytrees; what is no array is fixed.
        families: by which operations are classified, first match first.

    Returns:
        The graph; each value has shape, dtype, bytes, FLOPs, op family, tag, source line and how often it is made.

    >>> import jax.numpy as jnp
    >>> graph = trace(lambda x, w: jnp.tanh(x @ w), jnp.ones((2, 3)), jnp.ones((3, 5)))
    >>> [(op.primitive, *op.families, op.matmul_flops) for op in graph.ops]
    [('dot_general', 'weight_matmul', 60), ('tanh', 'pointwise', 0)]
    """
    return graph_of(capture(take_apart(f, args, kwargs)), tuple(families))


def graph_of(program: Program, families: tuple[Family, ...] = FAMILIES) -> Graph:
    """The graph of a traced function."""
    return _Reader(families).read(program.jaxpr, prefix="", repeats=1, in_paths=program.paths, program=program)


def inner_jaxprs(eqn: Any) -> list[tuple[Any, int]]:
    """The jaxprs that an equation holds, each with how often one run of the equation runs it.

    A ``while`` whose trip count can't be read from its program counts once.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "while":
        trips = trip_count(eqn) or 1
        return [(params["cond_jaxpr"], trips + 1), (params["body_jaxpr"], trips)]
    times = 1
    if name == "scan":
        times = params["length"]
    elif name == "shard_map":
        times = math.prod(params["mesh"].shape[axis] for axis in _manual_axes(params))
    elif name == "pallas_call":
        grid = params["grid_mapping"].grid
        times = math.prod(n for n in grid if isinstance(n, int))
    return [(jaxpr, times) for jaxpr in _jaxprs_in(params)]


def read_by_derivative(eqn: Any) -> Any:
    """The inside of an operation with a derivative rule of its own as the rule computes it, or None without a rule.

    The outputs are those of the operation. Names that stand in the operation alone are not in it, names that stand in
    the rule alone are: JAX hears the latter.
    """
    name, params = eqn.primitive.name, eqn.params
    if name not in ("custom_vjp_call", "custom_jvp_call"):
        return None
    if name == "custom_jvp_call" and params.get("symbolic_zeros"):
        return None  # such as a stack's: what its rule computes depends on what is differentiated
    moving = [jax.dtypes.issubdtype(v.aval.dtype, np.inexact) for v in eqn.invars if hasattr(v.aval, "dtype")]
    if len(moving) != len(eqn.invars) or not any(moving):
        return None
    try:
        with eqn.ctx.manager:
            if name == "custom_vjp_call":
                # The rule's results are the residuals, then the operation's own.
                rule, _ = params["fwd_jaxpr_thunk"].call_wrapped(*moving[params["num_consts"] :])
                return rule.replace(outvars=rule.outvars[len(rule.outvars) - len(eqn.outvars) :])
            types = [v.aval for v in eqn.invars]
            rule = jax.make_jaxpr(lambda *given: _pushed(eqn, moving, given))(
                *types, *(t.to_tangent_aval() for t, moves in zip(types, moving) if moves)
            )
            return rule.jaxpr.replace(outvars=rule.jaxpr.outvars[: len(eqn.outvars)])
    except Exception:  # whatever a user's rule raises: it will be raised again where the function is differentiated
        return None


def _pushed(eqn: Any, moving: Sequence[bool], given: Sequence[Any]) -> list[Any]:
    at = list(given[: len(moving)])
    places = [k for k, moves in enumerate(moving) if moves]

    def of_moving(*chosen: Any) -> list[Any]:
        filled = dict(zip(places, chosen))
        return bind(eqn, [filled.get(k, x) for k, x in enumerate(at)])

    outs, tangents = jax.jvp(of_moving, tuple(at[k] for k in places), tuple(given[len(moving) :]))
    return [*outs, *tangents]


def has_tags(jaxpr: Any) -> bool:
    """Whether a name stands in a jaxpr or in one inside it."""
    return any(
        tagged_name(eqn.primitive, eqn.params) is not None or any(has_tags(inner) for inner, _ in inner_jaxprs(eqn))
        for eqn in opened(jaxpr).eqns
    )


def differentiates(eqn: Any) -> bool:
    """Whether an equation's derivative is a rule that may read its outputs: no loop, branch, kernel or effect."""
    name = eqn.primitive.name
    if eqn.effects or tagged_name(eqn.primitive, eqn.params) is not None:
        return False
    return name == "custom_jvp_call" or (eqn.primitive in ad.primitive_jvps and not inner_jaxprs(eqn))


def loop_parts(eqn: Any) -> tuple[int, int]:
    """How many of a scan's inputs every turn reads whole, and how many are carried from turn to turn."""
    params = eqn.params
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # newer JAX keeps its trees
    return len(list(consts)), len(list(carry))


def is_call(eqn: Any) -> bool:
    """Whether an equation only calls a jaxpr; a ``jit`` that places its arguments or results does more."""
    if eqn.primitive.name not in CALLS:
        return False
    placed = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return all(type(sharding).__name__ == "UnspecifiedValue" for sharding in placed)


def harmful_effects(program: Any) -> list[Any]:
    """The effects of a jaxpr or an equation that a rerun must not repeat: on Refs, and what JAX's remat refuses."""
    refused = jax_effects.remat_allowed_effects.filter_not_in(program.effects)
    return [effect for effect in program.effects if isinstance(effect, RefEffect) or effect in refused]


def ref_of(jaxpr: Any, effect: Any) -> Any:
    """The input or constant of ``jaxpr``, a Ref, that an effect is on; None for others."""
    if not isinstance(effect, RefEffect):
        return None
    return next((var for var in (*jaxpr.invars, *jaxpr.constvars) if var is effect.input), None)


def is_ref(aval: Any) -> bool:
    """Whether a value is a Ref, by its type."""
    return "Ref" in type(aval).__name__


def without_local_refs(jaxpr: Any) -> Any:
    """An open jaxpr whose own Refs, made and used inside, are values; others of its effects stay.

    JAX's remat can't differentiate some of these, and its scan gives them no gradient.

    Raises:
        NotImplementedError: JAX has no rule for one.
    """
    if not any(isinstance(effect, private_core.InternalMutableArrayEffect) for effect in jaxpr.effects):
        return jaxpr
    num_consts = len(jaxpr.constvars)
    all_given = core.ClosedJaxpr(jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), ())
    found = discharge_state(all_given, lower=False)
    assert not found.consts, "nothing that a jaxpr computes is a constant"
    pure = opened(found)
    return pure.replace(constvars=pure.invars[:num_consts], invars=pure.invars[num_consts:])


def _manual_axes(params: Mapping[str, Any]) -> Sequence[str]:
    return params.get("newly_manual_axes") or params.get("manual_axes") or params["mesh"].axis_names


def _jaxprs_in(params: Mapping[str, Any]) -> list[Any]:
    found = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.Jaxpr | core.ClosedJaxpr):
                found.append(item)
            elif type(item).__module__.startswith("jax.") and isinstance(
                getattr(item, "jaxpr", None), core.Jaxpr | core.ClosedJaxpr
            ):
                found.append(item.jaxpr)  # a high-level primitive object that holds its program
    return found


def opened(jaxpr: Any) -> Any:
    """The open jaxpr of an open or a closed one."""
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def trip_count(eqn: Any) -> int | None:
    """How often a ``while`` runs, where its program says so, else None.

    It does where an integer starts at a literal, goes up by one and is compared with a literal.
    """
    params = eqn.params
    cond, body = opened(params["cond_jaxpr"]), opened(params["body_jaxpr"])
    tests = [e for e in cond.eqns if e.outvars[0] is cond.outvars[0]]
    if len(tests) != 1 or tests[0].primitive.name != "lt":
        return None
    counter, bound = tests[0].invars
    if not jax.dtypes.issubdtype(counter.aval.dtype, np.integer):
        return None
    sizes = {e.outvars[0]: e.params["dim"] for e in cond.eqns if e.primitive.name == SIZE}
    casts = [e for e in cond.eqns if e.primitive.name == "convert_element_type" and e.invars[0] in sizes]
    sizes |= {e.outvars[0]: sizes[e.invars[0]] for e in casts}
    if counter not in cond.invars[params["cond_nconsts"] :] or not (isinstance(bound, core.Literal) or bound in sizes):
        return None
    k = cond.invars.index(counter) - params["cond_nconsts"]
    start = eqn.invars[params["cond_nconsts"] + params["body_nconsts"] + k]
    after = next((e for e in body.eqns if e.outvars[0] is body.outvars[k]), None)
    if not isinstance(start, core.Literal) or after is None or after.primitive.name != "add":
        return None
    steps = [v.val for v in after.invars if isinstance(v, core.Literal)]
    if body.invars[params["body_nconsts"] + k] not in after.invars or [int(s) for s in steps] != [1]:
        return None
    if not isinstance(bound, core.Literal):
        return sizes[bound] - int(start.val)  # letters
    return max(int(bound.val) - int(start.val), 0)


def _transposed_name(cts: Any, x: Any, *, name: str) -> list[Any]:
    return [cts]


def _batched_name(self: Any, axis: Any, args: Any, dims: Any) -> tuple[Any, Any]:
    return type(self)(self.name, jax.typeof(args[0]))(*args), dims[0]


# Rules of an identity that JAX's names lack: a linear map with a name in it is transposed, and under jax_remat3 (which
# older JAX can't batch) put under vmap.
ad.primitive_transposes.setdefault(name_p, _transposed_name)
if "batch" not in vars(ad_checkpoint.CheckpointName):
    ad_checkpoint.CheckpointName.batch = _batched_name  # type: ignore[method-assign]


class _Reader:
    """Reads jaxprs into graphs; op ids count every equation that is no call, in program order."""

    def __init__(self, families: tuple[Family, ...]):
        self.families = families

    def read(
        self, jaxpr: Any, *, prefix: str, repeats: int, in_paths: Sequence[str] = (), program: Any = None
    ) -> Graph:
        jaxpr = opened(jaxpr)
        values: dict[str, Value] = {}
        env: dict[Any, str] = {}
        for k, var in enumerate(jaxpr.invars):
            source = in_paths[k] if k < len(in_paths) else ""
            value = _value(f"{prefix}in{k}", var.aval, repeats=repeats, source=source)
            values[value.id], env[var] = value, value.id
        env |= {var: _constant(values, prefix, var.aval, repeats) for var in jaxpr.constvars}
        ops: list[Op] = []
        self._equations(jaxpr, env, values, ops, prefix, repeats)
        outputs = tuple(
            _constant(values, prefix, v.aval, repeats) if isinstance(v, core.Literal) else env[v] for v in jaxpr.outvars
        )
        inputs = tuple(env[v] for v in jaxpr.invars)
        return Graph(values, tuple(ops), inputs, tuple(env[v] for v in jaxpr.constvars), outputs, program)

    def _equations(self, jaxpr, env, values, ops, prefix, repeats, call=None) -> None:
        for eqn in jaxpr.eqns:
            if is_call(eqn):
                inner = opened(_jaxprs_in(eqn.params)[0])

                def outside(v: Any) -> str:  # a literal has no value of its own; one is made where a call needs it
                    return _constant(values, prefix, v.aval, repeats) if isinstance(v, core.Literal) else env[v]

                scope = {var: _constant(values, prefix, var.aval, repeats) for var in inner.constvars}
                scope |= {var: outside(given) for var, given in zip(inner.invars, eqn.invars)}
                self._equations(inner, scope, values, ops, prefix, repeats, eqn)
                for out, made in zip(eqn.outvars, inner.outvars):
                    literal = isinstance(made, core.Literal)
                    env[out] = _constant(values, prefix, made.aval, repeats) if literal else scope[made]
                continue
            ops.append(self._op(eqn, env, values, f"{prefix}{len(ops)}", repeats, call))

    def _op(self, eqn, env, values, op_id, repeats, call) -> Op:
        tag = tagged_name(eqn.primitive, eqn.params)
        name = eqn.primitive.name if tag is None else "name"  # a tag has another primitive under jax_remat3
        avals, made = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
        families = tuple(f.name for f in self.families if f.matches(name, _facts(eqn, tag)))
        family = families[0] if families else "other"
        inputs = tuple(env[v] for v in eqn.invars if not isinstance(v, core.Literal))
        if tag is not None:  # a tag is not an operation: what it names was made before
            family = family if family != "other" else values[inputs[0]].family if inputs else "constant"
            tag = None if tag.startswith(MARK) else tag
            for i in inputs:
                values[i] = replace(values[i], name=values[i].name or tag)
        jaxprs = inner_jaxprs(eqn) if name != "name" else []
        inner = tuple(
            self.read(j, prefix=f"{op_id}/{f'{k}.' if len(jaxprs) > 1 else ''}", repeats=repeats * times)
            for k, (j, times) in enumerate(jaxprs)
        )
        if name == "custom_jvp_call":  # its result is what the last operation inside makes: relu's is pointwise
            maker = next((op for op in inner[0].ops if inner[0].outputs[0] in op.outputs), None)
            families = maker.families if maker else ()
            family = families[0] if families else "other"
        matmul, other = matmul_flops(name, eqn.params, avals, made), other_flops(name, avals, made)
        if inner:
            # Of several branches one runs: charge the dearest. A while's condition and body both run.
            combine = max if name == "cond" else sum
            matmul += combine(g.matmul_flops * times for g, (_, times) in zip(inner, jaxprs))
            other += combine(g.other_flops * times for g, (_, times) in zip(inner, jaxprs))
        rule = read_by_derivative(eqn)
        if rule is not None and (has_tags(rule) or any(graph.names for graph in inner)):
            inner = (self.read(rule, prefix=f"{op_id}/", repeats=repeats),)  # FLOPs stay those of what runs
        source = user_line(eqn, call)
        outputs = tuple(op_id if k == 0 else f"{op_id}:{k}" for k in range(len(made)))
        for out, var in zip(outputs, eqn.outvars):
            facts = {"name": tag, "family": family, "primitive": name, "flops": matmul + other}
            values[out] = _value(out, var.aval, repeats=repeats, source=source, **facts)
            env[var] = out
        opaque = bool(inner) and name not in REWRITABLE
        return Op(op_id, name, families, inputs, outputs, matmul, other, repeats, inner, source, opaque)


def _facts(eqn: Any, tag: str | None) -> Mapping[str, Any]:
    return eqn.params if tag is None else {"name": tag}


def _constant(values: dict[str, Value], prefix: str, aval: Any, repeats: int) -> str:
    key = f"{prefix}const{len(values)}"
    values[key] = _value(key, aval, repeats=repeats, family="constant", primitive="constant")
    return key


def _value(key: str, aval: Any, **fields: Any) -> Value:
    shape, dtype = tuple(getattr(aval, "shape", ())), None if is_ref(aval) else getattr(aval, "dtype", None)
    return Value(key, shape, str(dtype), aval_bytes(aval), **fields)


def aval_bytes(aval: Any) -> int:
    """Bytes of an array described by an aval; PRNG keys count as their bits, tokens and refs as nothing."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        bits = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, dtype))
        return math.prod(bits.shape) * bits.dtype.itemsize
    return math.prod(aval.shape) * dtype.itemsize


def on_host(aval: Any) -> bool:
    """Whether a value lies in the host's memory, where an offload puts it."""
    return "host" in str(getattr(aval, "memory_space", "")).lower()


def device_bytes(aval: Any) -> int:
    """Bytes of device memory that a value needs: none where it lies on the host."""
    return 0 if on_host(aval) else aval_bytes(aval)


SIZE = "dim_as_value"
"""The primitive that makes a number of a symbolic size."""


def sized_type(aval: Any, sizes: Sequence[int]) -> Any:
    """The type of an array with other sizes, which stay the objects that they are.

    JAX keeps one object for all equal types, and integers of its own in their shapes; this one is a copy.
    """
    whole = aval.update(shape=tuple(map(int, sizes)))
    made = object.__new__(type(whole))
    for slot in type(whole).__slots__:
        if slot != "__weakref__" and hasattr(whole, slot):
            object.__setattr__(made, slot, getattr(whole, slot))
    object.__setattr__(made, "shape", tuple(sizes))
    return made


def batched_type(aval: Any, axis: Any) -> Any:
    """The type of ``axis.size`` values of one type, along a new first axis that JAX's batching describes."""
    return private_core.unmapped_aval(axis.size, 0, aval, axis.explicit_mesh_axis)


# Frames of these packages are never the user's line.
_OURS = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple(f"{os.sep}site-packages{os.sep}{name}{os.sep}" for name in ("flax", "chex", "jax", "optax"))


def user_line(eqn: Any, call: Any = None) -> str:
    """The user's line that an equation comes from: ``file.py:12 (function)``.

    Args:
        eqn: the equation.
        call: the call that it is inside of, if any. JAX remembers the inside of a library's jitted function with the
            line of whoever called it first; such an equation comes from the line of its own call.
    """
    frames = _user_frames(eqn.source_info.traceback)
    if (
        call is not None
        and "name" in call.params
        and call.params.get("name") not in {function for _, function in frames}
    ):
        return user_line(call) or (frames[0][0] if frames else "")
    return frames[0][0] if frames else ""


@functools.lru_cache(maxsize=4096)
def _user_frames(traceback: Any) -> tuple[tuple[str, str], ...]:
    """(line, function) of the user's frames, innermost first; of a library's, where there is none of the user's."""
    frames = [f for f in source_info_util.user_frames(traceback) if not f.file_name.startswith(_OURS)]
    own = [f for f in frames if not any(part in f.file_name for part in _LIBRARIES)]
    named = [(f, f.function_name.rpartition(".")[2]) for f in own or frames]
    return tuple((f"{Path(f.file_name).name}:{f.start_line} ({function})", function) for f, function in named)


def scopes(eqn: Any) -> str:
    """The name scopes around an equation, as one string."""
    return str(eqn.source_info.name_stack)


@contextlib.contextmanager
def as_written(eqn: Any) -> Iterator[None]:
    """Bind inside this as if the equation's own line were running: its source line, name scopes and JAX context."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def bind(eqn: Any, inputs: Sequence[Any], **changes: Any) -> list[Any]:
    """Run one equation on ``inputs``, some of its parameters changed."""
    bound = eqn.primitive.get_bind_params({**eqn.params, **changes})
    subfuns, params = ((), bound) if isinstance(bound, dict) else bound  # a pair in older JAX, a dict since
    with as_written(eqn):
        outs = eqn.primitive.bind(*subfuns, *inputs, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def is_pytree_class(cls: type) -> bool:
    """Whether a class was registered with JAX, so that its instances are pytrees."""
    return cls in private_tree._registry


def register_like(made: type, base: type) -> None:
    """Register a subclass as a pytree that is flattened as its base is, unless its own metaclass did."""
    if is_pytree_class(made) or not is_pytree_class(base):
        return

    def moved(x: Any, cls: type) -> Any:
        new: Any = object.__new__(cls)
        vars(new).update(vars(x))
        return new

    def flatten(x: Any) -> Any:
        plain = moved(x, base)
        children, tree = jax.tree_util.tree_flatten_with_path(plain, is_leaf=lambda leaf: leaf is not plain)
        return [(path[0], child) for path, child in children], tree

    jax.tree_util.register_pytree_with_keys(
        made, flatten, lambda tree, children: moved(jax.tree.unflatten(tree, children), made)
    )


def checks_key_reuse() -> bool:
    """Whether JAX looks for PRNG keys that are used twice (``jax.debug_key_reuse``)."""
    config: Any = jax.config
    return bool(config.jax_debug_key_reuse)


def live(jaxpr: Any) -> Any:
    """The jaxpr without what its outputs and effects don't need, inner jaxprs too."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
