"""What jremat knows of JAX that JAX doesn't promise: private modules, names of classes, primitives and scopes, params.

All of it stands here, so that a new version of JAX is one file to read. Each assumption has a test of its own in
``tests/graph/test_jax_internals.py``, whose failure names what changed. Operations that bear the name of a public
function (``dot_general``, ``scan``) are called by that name elsewhere too; which of them do what is data, in
``jremat.policy.ops``. What XLA dumps has its schema in ``jremat.measure.hlo_proto``.

Sources, in jax's repository: ``jax/_src/ad_checkpoint.py`` (remat, names, offload), ``jax/_src/core.py``,
``jax/_src/custom_derivatives.py``, ``jax/_src/lax/control_flow/loops.py``, ``jax/_src/hijax.py``,
``jax/_src/source_info_util.py``, ``jax/_src/state/``.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import ad_checkpoint, compilation_cache, source_info_util
from jax._src import core as private_core
from jax._src import effects as jax_effects
from jax._src import tree_util as private_tree
from jax._src.interpreters import partial_eval
from jax._src.sharding_impls import UnspecifiedValue
from jax._src.state.discharge import discharge_state
from jax._src.state.types import AbstractRef, RefEffect
from jax._src.util import weakref_lru_cache
from jax.extend import core
from jax.extend.core.primitives import name_p
from jax.interpreters import ad, batching, mlir

CALLS = frozenset({"jit", "closed_call", "eval_jaxpr"})
"""Primitives that only call a jaxpr: entered as if they were not there."""

NAME = "name"
"""The primitive of ``checkpoint_name``."""
ONCE = "jremat.once"
"""The name that is put on a value which may be differentiated once, in a rule that refuses a second time."""
WHILE, SCAN, COND = "while", "scan", "cond"
"""The primitives of ``while_loop`` and ``fori_loop``, of ``scan`` and ``map``, of ``cond`` and ``switch``."""
REMAT = "remat2"
"""The primitive of ``jax.checkpoint``; ``jax_remat3`` has an object in its place, see ``remat_of``."""
CUSTOM_JVP, CUSTOM_VJP = "custom_jvp_call", "custom_vjp_call"
"""The primitives of functions with a derivative rule of their own."""
PALLAS, SHARD_MAP = "pallas_call", "shard_map"
"""A kernel, and a program of one device among several."""
VARYING = "pvary"
"""The primitive that says that a value may differ from device to device; it does nothing."""
SIZE = "dim_as_value"
"""The primitive that makes a number of a symbolic size."""
REMAT_SCOPE = "rematted_computation"
"""The scope under which JAX's remat recomputes, and the loops of ours."""
TRANSPOSE_SCOPE, JVP_SCOPE = "transpose(", "jvp("
"""How the scopes of a backward pass and of a differentiated forward pass begin."""


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


def inner_jaxprs(eqn: Any) -> list[tuple[Any, int]]:
    """The jaxprs that an equation holds, each with how often one run of the equation runs it.

    A ``while`` whose trip count can't be read from its program counts once.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == WHILE:
        trips = trip_count(eqn) or 1
        return [(params["cond_jaxpr"], trips + 1), (params["body_jaxpr"], trips)]
    times = 1
    if name == SCAN:
        times = params["length"]
    elif name == SHARD_MAP:
        times = math.prod(params["mesh"].shape[axis] for axis in _manual_axes(params))
    elif name == PALLAS:
        grid = params["grid_mapping"].grid
        times = math.prod(n for n in grid if isinstance(n, int))
    return [(jaxpr, times) for jaxpr in _jaxprs_in(params)]


def read_by_derivative(eqn: Any) -> Any:
    """The inside of an operation with a derivative rule of its own as the rule computes it, or None without a rule.

    The outputs are those of the operation. Names that stand in the operation alone are not in it, names that stand in
    the rule alone are: JAX sees the latter.
    """
    name, params = eqn.primitive.name, eqn.params
    if name not in (CUSTOM_VJP, CUSTOM_JVP):
        return None
    if name == CUSTOM_JVP and params.get("symbolic_zeros"):
        return None  # such as a stack's: what its rule computes depends on what is differentiated
    moving = [jax.dtypes.issubdtype(v.aval.dtype, np.inexact) for v in eqn.invars if hasattr(v.aval, "dtype")]
    if len(moving) != len(eqn.invars) or not any(moving):
        return None
    try:
        with eqn.ctx.manager:
            if name == CUSTOM_VJP:
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


def is_remat(eqn: Any) -> bool:
    """Whether an equation is JAX's remat: a primitive, or an object under a generic call with ``jax_remat3``."""
    return eqn.primitive.name == REMAT or isinstance(eqn.params.get("_prim"), ad_checkpoint.RematTraced)


@dataclass(frozen=True, eq=False)
class Remat:
    """What an equation of JAX's remat holds.

    Attributes:
        jaxpr: what it reruns, open or closed.
        policy: what it was given.
        prevent_cse: whether the compiler is kept from merging the rerun with the first run.
        third: whether it is of ``jax_remat3``.
    """

    jaxpr: Any
    policy: Any
    prevent_cse: bool
    third: bool


def remat_of(eqn: Any) -> Remat:
    """What an equation of JAX's remat holds."""
    held = eqn.params.get("_prim")
    if held is None:
        params = eqn.params
        cse = params["prevent_cse"]
        return Remat(params["jaxpr"], params["policy"], any(cse) if isinstance(cse, tuple) else bool(cse), False)
    return Remat(held.jaxpr, held.policy, bool(getattr(held, "prevent_cse", True)), True)


def tagged_name(primitive: Any, params: Mapping[str, Any]) -> str | None:
    """The name that an equation puts on its output, if it is JAX's ``checkpoint_name``, else None.

    ``ONCE`` is one that stands inside of a rule.

    >>> import jax, jax.numpy as jnp
    >>> from jremat.policy.names import tag
    >>> eqn = jax.make_jaxpr(lambda x: tag(x, "mlp_up"))(jnp.ones(2)).eqns[0]
    >>> tagged_name(eqn.primitive, eqn.params)
    'mlp_up'
    """
    if primitive.name == NAME:
        return params["name"]
    if primitive.name == CUSTOM_JVP:
        inside = opened(params["call_jaxpr"]).eqns
        return ONCE if len(inside) == 1 and tagged_name(inside[0].primitive, inside[0].params) == ONCE else None
    held = params.get("_prim")  # under jax_remat3 an object under a generic call
    return held.name if isinstance(held, ad_checkpoint.CheckpointName) else None


def decision_of(answer: Any) -> str:
    """What the answer of a policy means: ``save``, ``offload`` or ``recompute``.

    >>> [decision_of(answer) for answer in (True, False)]
    ['save', 'recompute']
    """
    if isinstance(answer, partial_eval.Offloadable):
        return "offload"
    return "save" if answer and not isinstance(answer, partial_eval.RecomputeType) else "recompute"


def remat3_is_on() -> bool:
    """Whether ``jax.checkpoint`` is the one that is to become JAX's default (``jax_remat3``)."""
    return bool(getattr(jax.config, "jax_remat3", False))


def cpu_drops_barriers() -> bool:
    """Whether XLA for CPU drops optimization barriers, and so undoes remat outside of loops."""
    return jax.__version_info__ < (0, 12)


def remat3_calls_policies() -> bool:
    """Whether ``jax_remat3`` calls a policy, at names alone; older JAX knows its own policies by type, calls none."""
    return jax.__version_info__ >= (0, 12)


def differentiates(eqn: Any) -> bool:
    """Whether an equation's derivative is a rule that may read its outputs: no loop, branch, kernel or effect."""
    name = eqn.primitive.name
    if eqn.effects or tagged_name(eqn.primitive, eqn.params) is not None:
        return False
    return name == CUSTOM_JVP or (eqn.primitive in ad.primitive_jvps and not inner_jaxprs(eqn))


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
    return all(isinstance(sharding, UnspecifiedValue) for sharding in placed)


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
    return isinstance(aval, AbstractRef)


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


def _remat_of_name(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of a name under older JAX's ``jax_remat3``, which recomputes what an integer comes from though kept."""

    def remat(self: Any, policy: Any, x: Any) -> tuple[Any, Callable[..., Any]]:
        out, recompute = rule(self, policy, x)
        is_kept = isinstance(recompute, functools.partial)
        whole = is_kept and not jax.dtypes.issubdtype(self.out_aval.dtype, np.inexact)
        return out, (lambda _: out) if whole else recompute

    return remat


# Rules of an identity that JAX's names lack: a linear map with a name in it is transposed, and under jax_remat3 (which
# older JAX can't batch) put under vmap.
ad.primitive_transposes.setdefault(name_p, _transposed_name)
if "batch" not in vars(ad_checkpoint.CheckpointName):
    ad_checkpoint.CheckpointName.batch = _batched_name  # type: ignore[method-assign]
    ad_checkpoint.CheckpointName.remat = _remat_of_name(ad_checkpoint.CheckpointName.remat)  # type: ignore[method-assign]


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


def on_host(aval: Any) -> bool:
    """Whether a value lies in the host's memory, where an offload puts it."""
    return "host" in str(getattr(aval, "memory_space", "")).lower()


def varying_axes(aval: Any) -> frozenset[str]:
    """The axes of a ``shard_map``, which checks it, over which a value differs from device to device."""
    return frozenset(getattr(getattr(aval, "manual_axis_type", None), "varying", None) or ())


def user_frames(traceback: Any) -> list[tuple[str, int, str]]:
    """(file, line, function) of the frames of a traceback that are not JAX's own, innermost first."""
    return [(f.file_name, f.start_line, f.function_name) for f in source_info_util.user_frames(traceback)]


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


def checks_key_reuse() -> bool:
    """Whether JAX looks for PRNG keys that are used twice (``jax.debug_key_reuse``)."""
    config: Any = jax.config
    return bool(config.jax_debug_key_reuse)


def live(jaxpr: Any) -> Any:
    """The jaxpr without what its outputs and effects don't need, inner jaxprs too."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def new_primitive(
    name: str, evaluate: Callable[..., Any], types: Callable[..., Any], jvp: Callable[..., Any],
    transpose: Callable[..., Any], batch: Callable[..., Any],
) -> core.Primitive:  # fmt: skip
    """A new primitive with several results.

    Args:
        name: of it.
        evaluate: it, as a traceable function.
        types: of its results.
        jvp, transpose, batch: its rules, as JAX's registries take them.
    """
    made = core.Primitive(name)
    made.multiple_results = True
    made.def_impl(evaluate)
    made.def_abstract_eval(types)
    mlir.register_lowering(made, mlir.lower_fun(evaluate, multiple_results=True))
    ad.primitive_jvps[made] = jvp
    ad.primitive_transposes[made] = transpose
    batching.fancy_primitive_batchers[made] = batch
    return made


def lift_linen(transform: Callable[..., Any], target: Any, **options: Any) -> Any:
    """A Linen class, or a function of a module, under a transformation of functions.

    Args:
        transform: takes the function of a scope, gives one of ``(scope_fn, repack_fn, variables, rngs, *args)``.
        target: the class or the function.
        options: ``methods`` of a class.
    """
    from flax.core import lift  # loads Flax, which few need
    from flax.linen.transforms import lift_transform

    def lifted(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lift.pack(transform(fn), (True,), (True,), (True,), name="remat", enable_kwargs=True)

    return lift_transform(lifted, target, **options)


def is_initializing(scope: Any) -> bool:
    """Whether a Flax scope is that of ``init``."""
    return bool(scope.get_flag("initializing", False))


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Compiles inside run the compiler: what JAX reads from its persistent cache has no buffer assignment.

    The flag of the cache is read once a process; what JAX asks of it at each compile is replaced in its place.
    """
    before = compilation_cache.is_cache_used
    compilation_cache.is_cache_used = lambda backend: False
    try:
        yield
    finally:
        compilation_cache.is_cache_used = before
