"""Remat of a function, held to its word: every value gets its decision, a selector that matches nothing raises."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ParamSpec, TypeVar, cast

import jax

from jremat.graph.arguments import Arguments, take_apart
from jremat.graph.effects import rerunnable
from jremat.graph.evaluate import evaluate
from jremat.graph.graph import Graph
from jremat.graph.residuals import Residuals, read_residuals
from jremat.graph.trace import Program, capture, graph_of
from jremat.graph.two_passes import evaluate_compressed
from jremat.jax_internals import remat3_calls_policies, remat3_is_on, weakly_cached
from jremat.policy.decision import Decision
from jremat.policy.layers import LayerPlan, NeedsShapes
from jremat.policy.ops import SELECTABLE, Family
from jremat.policy.policy import Policy
from jremat.transform.closures import refuse_hijax, refuse_linen
from jremat.transform.decide import Decisions, candidates, check, decide

P = ParamSpec("P")
R = TypeVar("R")


def checkpoint(
    f: Callable[P, R],
    policy: Policy,
    *,
    strict: bool = True,
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    prevent_cse: bool = True,
) -> Callable[P, R]:
    """``f``, whose gradient keeps just the values that ``policy`` keeps and recomputes the others.

    The function is traced to its graph, each value gets its decision, and a name is put on those to keep: so the policy
    holds value by value, under every JAX version and under ``jax_remat3``. Matmuls inside a kernel with a derivative of
    its own (``custom_vjp``) are no matmuls to a policy; its tags count.

    Args:
        f: any traceable function of pytrees.
        policy: of one block, e.g. ``policies.get("save:attn_out")``.
        strict: a selector that matches nothing raises; if False, it warns.
        static_argnames: parameters of ``f`` to hold fixed. Booleans, strings, functions and all else that is no array
            are held fixed anyway, and so are numbers among a module's attributes.
        static_argnums: the same by position.
        prevent_cse: as of ``jax.checkpoint``; False is right inside a scan alone.

    Returns:
        A function like ``f``, under every transformation of JAX.

    Raises:
        ValueError: at the first call, where a selector matches nothing, a static argument names no parameter, or ``f``
            reads a traced value in Python, has an effect that a rerun would repeat (it reads or writes a Ref from
            outside, or calls ``io_callback``), or would write into a Linen module; at once, for a plan over layers.

    >>> import jax.numpy as jnp
    >>> from jremat.policy import Policy, tag
    >>> def f(x, w):
    ...     return jnp.sin(tag(x @ w, "up")) @ w
    >>> x, w = jnp.ones((8, 4)), jnp.ones((4, 4))
    >>> residuals(f, x, w, policy=Policy.save("up")).total_bytes
    128
    >>> checkpoint(f, Policy.save("upp"))(x, w)
    Traceback (most recent call last):
    ...
    ValueError: policy: 'save:upp' names 'upp' (did you mean 'up'?), which no value bears; names in this function: up

    Source: the selective recomputation of Chen et al. 2016, arXiv 1604.06174, section 4, decided per value.
    """
    expect_policy(policy)
    if policy.is_identity:
        return f

    @functools.wraps(f)
    def rematted(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_linen(f, args, kwargs)
        arguments = take_apart(f, args, kwargs, static_argnames, static_argnums)
        return cast(R, call_rematted(arguments, policy, strict=strict, prevent_cse=prevent_cse))

    return rematted


def call_rematted(arguments: Arguments, policy: Policy, *, strict: bool, prevent_cse: bool) -> Any:
    """One call, rematted: what ``checkpoint`` does once the arguments are known."""
    refuse_hijax(arguments.array_paths, arguments.arrays)
    program = rerunnable(capture(arguments))
    decisions = decisions_for(program, policy, strict=strict)
    if policy.keeps_everything:  # a plan, or names that it requires; they are there
        return arguments.result(program.out_tree, evaluate(program.jaxpr, program.consts, arguments.arrays, {}))
    _refuse_lost(policy, decisions)
    outs = _rematted(program.jaxpr, decisions, prevent_cse, policy)(program.consts, arguments.arrays)
    return arguments.result(program.out_tree, outs)


def residuals(
    f: Callable[..., Any],
    *args: Any,
    policy: Policy | None = None,
    strict: bool = True,
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    **kwargs: Any,
) -> Residuals:
    """Every value that ``f`` keeps for its backward pass, under ``policy``, or as it is without one.

    Nothing is run. Exact: it is what JAX's own program hands from the forward to the backward pass.

    Args:
        f: the forward function of a block or a loss.
        args, kwargs: arrays or ``jax.ShapeDtypeStruct``, in pytrees; differentiated by all that float.
        policy: of one block; None: what the function already does.
        strict, static_argnames, static_argnums: as of ``checkpoint``.

    Returns:
        Rows with name, shape, dtype, copies, bytes, decision and source line; ``.total_bytes``.

    >>> import jax.numpy as jnp
    >>> print(residuals(lambda x: jnp.sin(jnp.sin(x)), jnp.ones(4)).total_bytes)  # cos x and cos sin x
    32
    """
    if policy is not None:
        f = checkpoint(f, policy, strict=strict, static_argnames=static_argnames, static_argnums=static_argnums)
    return read_residuals(take_apart(f, args, kwargs, static_argnames, static_argnums))


def expect_matches(f: Callable[..., Any], policies: Iterable[Policy], *args: Any) -> None:
    """Raise where ``checkpoint(f, policy)`` would raise at its call, for each of ``policies``; nothing is rematted."""
    program = rerunnable(capture(take_apart(f, args, {})))
    for policy in policies:
        if not policy.is_identity:
            _refuse_lost(policy, decisions_for(program, policy, strict=True))


def decisions_for(program: Program, policy: Policy, *, strict: bool) -> Decisions:
    """What ``policy`` says of a traced function, checked."""
    graph = _graph(program.jaxpr, tuple(dict.fromkeys((*SELECTABLE, *(family for family, _ in policy.families)))))
    check(graph, policy, strict=strict)
    by_default = policy.leaves_out and not policy.values  # a plan names its values itself
    return decide(graph, policy, _needed(program.jaxpr, remat3_is_on()) if by_default else None)


@weakly_cached
def _graph(jaxpr: Any, families: tuple[Family, ...]) -> Graph:
    return graph_of(Program(jaxpr.replace(), (), None, ()), families)


@weakly_cached
def _needed(jaxpr: Any, remat3: bool) -> frozenset[str]:
    """The marks that the backward pass reads where every value may be kept."""
    every = tuple(candidates(_graph(jaxpr, tuple(SELECTABLE))))
    marks = {candidate.value.id: candidate.mark for candidate in every if not candidate.inside}
    everything = Decisions(marks, frozenset(candidate.mark for candidate in every), frozenset())
    inputs, consts = ([var.aval for var in some] for some in (jaxpr.invars, jaxpr.constvars))
    rows = read_residuals(take_apart(_rematted(jaxpr, everything, True, Policy()), (consts, inputs), {}))
    return frozenset(row.mark for row in rows if row.mark)


@dataclass(frozen=True)
class ByMarks:
    """JAX's policy over the marks of one program, with the policy that decided on them.

    Args:
        policy: of the user.
        by_name: of JAX.
    """

    policy: Policy
    by_name: Callable[..., Any]

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        """JAX's policy protocol."""
        return self.by_name(prim, *avals, **params)


def _rematted(jaxpr: Any, decisions: Decisions, prevent_cse: bool, policy: Policy) -> Callable[[Any, Any], list[Any]]:
    marks = tuple(sorted(decisions.marks.items()))
    packed = tuple(sorted(decisions.packed.items(), key=itemgetter(0)))
    return _remembered(jaxpr, marks, packed, decisions.saved, decisions.offloaded, prevent_cse, policy)


@weakly_cached
def _remembered(
    jaxpr: Any,
    marks: tuple[tuple[str, str], ...],
    packed: tuple[tuple[str, Decision], ...],
    saved: frozenset[str],
    offloaded: frozenset[str],
    prevent_cse: bool,
    policy: Policy,
) -> Callable[[Any, Any], list[Any]]:
    """One function for equal calls, so that JAX finds its traces again and an eager call compiles nothing twice."""
    body, named = jaxpr.replace(), dict(marks)  # not ``jaxpr`` itself: the cache would keep it alive

    def run(consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        if packed:
            return evaluate_compressed(body, consts, inputs, named, dict(packed))
        return evaluate(body, consts, inputs, named)

    by_name = _by_name(Decisions(named, saved, offloaded))
    # Older JAX's jax_remat3 knows its own policies by their type and asks no other.
    asked = by_name if _asks_no_policy() else ByMarks(policy, by_name)
    return jax.checkpoint(run, policy=asked, prevent_cse=prevent_cse)


def _asks_no_policy() -> bool:
    return remat3_is_on() and not remat3_calls_policies()


def _by_name(decisions: Decisions) -> Callable[..., Any]:
    """JAX's own policies by name: the ones that hold under every version, and under ``jax_remat3``."""
    if not decisions.saved and not decisions.offloaded:
        return jax.checkpoint_policies.nothing_saveable
    if not decisions.offloaded:
        return jax.checkpoint_policies.save_only_these_names(*decisions.saved)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted(decisions.saved),
        names_which_can_be_offloaded=sorted(decisions.offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )


def _refuse_lost(policy: Policy, decisions: Decisions) -> None:
    """Raise where ``jax_remat3`` would recompute what the policy keeps."""
    if decisions.offloaded and _asks_no_policy():
        raise ValueError(
            f"policy: {policy.spec!r} offloads, which jax_remat3 of jax {jax.__version__} recomputes instead; "
            "turn jax_remat3 off or use jax 0.12"
        )
    if decisions.in_rules and remat3_is_on():
        raise ValueError(
            f"policy: {policy.spec!r} keeps {', '.join(sorted(decisions.in_rules))} in the derivative rule of a "
            "custom_vjp or custom_jvp, where jax_remat3 reads no names and recomputes instead; turn jax_remat3 off"
        )


def expect_policy(policy: Any) -> None:
    """Raise unless it is a policy of one block."""
    if isinstance(policy, LayerPlan | NeedsShapes):
        policy()  # says which call takes it
    if not isinstance(policy, Policy):
        example = policy if isinstance(policy, str) else "dots_saveable"
        raise ValueError(f"policy: expected a Policy, e.g. policies.get({example!r}), got {policy!r}")
