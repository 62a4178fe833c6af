"""A function as a flat graph of values and operations, read from the program that JAX traces of it."""

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.extend import core

from jremat.graph.arguments import Arguments, take_apart
from jremat.graph.arithmetic import matmul_flops, other_flops
from jremat.graph.graph import Graph, Op, Value
from jremat.graph.nnx_modules import has_modules
from jremat.graph.paths import path_of
from jremat.jax_internals import (
    COND,
    CUSTOM_JVP,
    NAME,
    SCAN,
    inner_jaxprs,
    is_call,
    is_ref,
    on_host,
    opened,
    read_by_derivative,
    scopes,
    tagged_name,
    user_frames,
)
from jremat.policy.ops import FAMILIES, Family

MARK = "jremat."
"""What the names begin with that we put on values; a user's tag may not, and none of them is shown as a tag."""

REWRITABLE = frozenset({SCAN, COND, "jit"})
"""Primitives whose inside a policy can decide value by value, a ``jit`` that places its arguments among them; all
others that hold a jaxpr are opaque."""


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
    args, kwargs = arguments.to_trace()
    as_it_is = all(arguments.traced) and not has_modules((args, kwargs))
    run = arguments.f if as_it_is else arguments.over_arrays(arguments.call)
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


def has_tags(jaxpr: Any) -> bool:
    """Whether a name stands in a jaxpr or in one inside it."""
    return any(
        tagged_name(eqn.primitive, eqn.params) is not None or any(has_tags(inner) for inner, _ in inner_jaxprs(eqn))
        for eqn in opened(jaxpr).eqns
    )


class _Reader:
    """Reads jaxprs into graphs; op ids count every equation that is no call, in program order."""

    def __init__(self, families: tuple[Family, ...]):
        self.families = families

    def read(
        self,
        jaxpr: Any,
        *,
        prefix: str,
        repeats: int,
        in_paths: Sequence[str] = (),
        program: Any = None,
        around: str = "",
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
        self._equations(jaxpr, env, values, ops, prefix, repeats, around)
        outputs = tuple(
            _constant(values, prefix, v.aval, repeats) if isinstance(v, core.Literal) else env[v] for v in jaxpr.outvars
        )
        inputs = tuple(env[v] for v in jaxpr.invars)
        return Graph(values, tuple(ops), inputs, tuple(env[v] for v in jaxpr.constvars), outputs, program)

    def _equations(self, jaxpr, env, values, ops, prefix, repeats, around, call=None) -> None:
        for eqn in jaxpr.eqns:
            if is_call(eqn):
                inner = opened(inner_jaxprs(eqn)[0][0])

                def outside(v: Any) -> str:  # a literal has no value of its own; one is made where a call needs it
                    return _constant(values, prefix, v.aval, repeats) if isinstance(v, core.Literal) else env[v]

                scope = {var: _constant(values, prefix, var.aval, repeats) for var in inner.constvars}
                scope |= {var: outside(given) for var, given in zip(inner.invars, eqn.invars)}
                self._equations(inner, scope, values, ops, prefix, repeats, f"{around}/{scopes(eqn)}", eqn)
                for out, made in zip(eqn.outvars, inner.outvars):
                    literal = isinstance(made, core.Literal)
                    env[out] = _constant(values, prefix, made.aval, repeats) if literal else scope[made]
                continue
            ops.append(self._op(eqn, env, values, f"{prefix}{len(ops)}", repeats, f"{around}/{scopes(eqn)}", call))

    def _op(self, eqn, env, values, op_id, repeats, scope, call) -> Op:
        tag = tagged_name(eqn.primitive, eqn.params)
        name = eqn.primitive.name if tag is None else NAME  # a tag has another primitive under jax_remat3
        avals, made = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
        families = tuple(f.name for f in self.families if f.matches(name, _facts(eqn, tag)))
        family = families[0] if families else "other"
        inputs = tuple(env[v] for v in eqn.invars if not isinstance(v, core.Literal))
        if tag is not None:  # a tag is not an operation: what it names was made before
            family = family if family != "other" else values[inputs[0]].family if inputs else "constant"
            tag = None if tag.startswith(MARK) else tag
            for i in inputs:
                values[i] = replace(values[i], name=values[i].name or tag)
        jaxprs = inner_jaxprs(eqn) if name != NAME else []
        inner = tuple(
            self.read(j, prefix=f"{op_id}/{f'{k}.' if len(jaxprs) > 1 else ''}", repeats=repeats * times, around=scope)
            for k, (j, times) in enumerate(jaxprs)
        )
        if name == CUSTOM_JVP:  # its result is what the last operation inside makes: relu's is pointwise
            maker = next((op for op in inner[0].ops if inner[0].outputs[0] in op.outputs), None)
            families = maker.families if maker else ()
            family = families[0] if families else "other"
        matmul, other = matmul_flops(name, eqn.params, avals, made), other_flops(name, avals, made)
        if inner:
            # Of several branches one runs: charge the dearest. A while's condition and body both run.
            combine = max if name == COND else sum
            matmul += combine(g.matmul_flops * times for g, (_, times) in zip(inner, jaxprs))
            other += combine(g.other_flops * times for g, (_, times) in zip(inner, jaxprs))
        rule = read_by_derivative(eqn)
        if rule is not None and (has_tags(rule) or any(graph.names for graph in inner)):
            inner = (
                self.read(rule, prefix=f"{op_id}/", repeats=repeats, around=scope),
            )  # FLOPs stay those of what runs
        source, path = user_line(eqn, call), path_of(scope)
        outputs = tuple(op_id if k == 0 else f"{op_id}:{k}" for k in range(len(made)))
        for out, var in zip(outputs, eqn.outvars):
            facts = {"name": tag, "family": family, "primitive": name, "flops": matmul + other}
            values[out] = _value(out, var.aval, repeats=repeats, source=source, path=path, **facts)
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


def device_bytes(aval: Any) -> int:
    """Bytes of device memory that a value needs: none where it lies on the host."""
    return 0 if on_host(aval) else aval_bytes(aval)


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
    frames = [f for f in user_frames(traceback) if not f[0].startswith(_OURS)]
    own = [f for f in frames if not any(part in f[0] for part in _LIBRARIES)]
    named = [(Path(file).name, line, function.rpartition(".")[2]) for file, line, function in own or frames]
    return tuple((f"{file}:{line} ({function})", function) for file, line, function in named)
