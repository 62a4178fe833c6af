"""Mistakes in the use of remat, found on the traced program, each with its place, its cost and its cure."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jremat.check.finding import Finding, Findings, Rule
from jremat.check.rules import kept, kernels, names, peaks, placement, policies, reruns
from jremat.check.sites import equations
from jremat.check.subject import Subject, subject_of
from jremat.graph.arguments import map_arrays, take_apart
from jremat.graph.differentiate import inexact_places
from jremat.planner.request import Request
from jremat.policy import NONE, LayerPlan, Policy
from jremat.policy.whole_number import whole_number
from jremat.transform.chain import stack
from jremat.transform.checkpoint import checkpoint
from jremat.transform.scan import ONE_BY_ONE

OF_A_REMAT: tuple[Rule, ...] = (
    *names.RULES,
    *policies.RULES,
    *placement.RULES,
    *kernels.RULES,
    *kept.RULES,
)
"""The rules that look at remats one by one."""

RULES: tuple[Rule, ...] = (*OF_A_REMAT, *reruns.RULES, *peaks.RULES)
"""Every rule, in the order in which they are tried."""


def lint(
    f: Callable[..., Any],
    *args: Any,
    policy: Any = None,
    num_layers: int | None = None,
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    **kwargs: Any,
) -> Findings:
    """Mistakes in how ``f`` is rematted: each with its line, what it costs in bytes or FLOPs, and the cure.

    Nothing is run, and no name is guessed from: the rules read the traced program, its gradient, what it keeps, and the
    same without its remats. ``docs/lint.md`` lists them.

    Args:
        f: the forward function of a block or a loss, as it is differentiated.
        args, kwargs: arrays or ``jax.ShapeDtypeStruct``, in pytrees; differentiated by all that float.
        policy: put on ``f``: ours, or a plain one of JAX's; None reads what ``f`` already does. A ``LayerPlan`` or
            ``Request`` takes ``num_layers``, and ``f`` as ``f(layer_parameters, carry, *shared)`` to the next carry.
        num_layers: of the stack that ``f`` is one block of.
        static_argnames, static_argnums: as of ``jremat.checkpoint``.

    Returns:
        The findings, costliest rule first; empty where nothing is found.

    Raises:
        ValueError: nothing in the arguments floats; or the policy is none, or needs ``num_layers``.

    >>> import jax.numpy as jnp
    >>> f = jax.checkpoint(lambda x, w: jnp.sin(x @ w) @ w, policy=jax.checkpoint_policies.save_only_these_names("up"))
    >>> [finding] = lint(f, jnp.ones((8, 4)), jnp.ones((4, 4)))
    >>> finding.rule, finding.cost_flops
    ('unknown-name', 256)
    """
    num_layers = None if num_layers is None else whole_number("num_layers", num_layers)
    if isinstance(policy, Request):
        policy = policy.resolve(f, *args, num_layers=layers_of(policy, num_layers), **kwargs)
    distinct = dict.fromkeys(policy.policies(layers_of(policy, num_layers))) if isinstance(policy, LayerPlan) else ()
    static: dict[str, Any] = {"static_argnames": static_argnames, "static_argnums": static_argnums}
    found: list[Finding] = []
    for one in distinct or (policy,):
        call = take_apart(with_policy(f, one, **static), args, kwargs, **static)
        subject = subject_of(call)
        if not inexact_places(subject.avals):
            raise ValueError("args: expected a floating-point array to differentiate by, got none")
        subject = subject.of(one, num_layers is not None)
        with ONE_BY_ONE(True):  # the loops of ``stack`` hold no remats: its layers are read one by one
            layers = subject_of(call).of(one, num_layers is not None)
        if _steps(layers) == _steps(subject):
            found += findings(subject, RULES)
        else:
            of_layers = findings(layers, (*OF_A_REMAT, *reruns.RULES))
            known = {(finding.rule, finding.place) for finding in of_layers}
            of_loops = findings(subject, (*reruns.RULES, *peaks.RULES))
            found += [*of_layers, *(f for f in of_loops if (f.rule, f.place) not in known)]
    if num_layers is not None and policy is not None:
        try:
            found += _of_stack(f, args, policy, num_layers)
        except ValueError:  # a stack refuses a policy that matches nothing
            if not found:
                raise
    return Findings(dict.fromkeys(found))


def findings(subject: Subject, rules: Sequence[Rule]) -> tuple[Finding, ...]:
    """What the rules find in a program; where JAX has no gradient of it, those that read it as written."""
    found: list[Finding] = []
    for rule in rules:
        try:
            found += rule.find(subject)
        except (
            NotImplementedError
        ):  # an effect in a remat, of which side-effect says more: there is no gradient to read
            continue
    return tuple(found)


def _steps(subject: Subject) -> list[str]:
    return [eqn.primitive.name for eqn, _, _ in equations(subject.jaxpr)]


def _of_stack(f: Callable[..., Any], args: Any, plan: Any, num_layers: int) -> list[Finding]:
    layer, *rest = args
    of_all = lambda leaf: jax.ShapeDtypeStruct((num_layers, *jax.numpy.shape(leaf)), jax.numpy.result_type(leaf))
    stacked = map_arrays(of_all, layer)
    whole = subject_of(take_apart(stack(f, plan, num_layers=num_layers), (stacked, *rest), {}))
    whole.bare = subject_of(take_apart(stack(f, NONE, num_layers=num_layers), (stacked, *rest), {}))
    return list(findings(whole, peaks.RULES))


def with_policy(f: Callable[..., Any], policy: Any, **static: Any) -> Callable[..., Any]:
    """``f`` under a policy of any kind; one of ours, leniently: what it would raise or warn of is a finding.

    Raises:
        ValueError: no policy at all.
    """
    if policy is None:
        return f
    if not callable(policy):
        raise ValueError(f"policy: expected a policy, e.g. policies.get('dots_saveable'), got {policy!r}")
    if not isinstance(policy, Policy):

        @functools.wraps(f)
        def plain(*args: Any, **kwargs: Any) -> Any:
            call = take_apart(f, args, kwargs, **static)
            return jax.checkpoint(call.call, policy=policy)(*call.arrays)

        return plain
    lenient = checkpoint(f, policy, strict=False, **static)

    @functools.wraps(f)
    def quietly(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return lenient(*args, **kwargs)

    return quietly


def layers_of(policy: Any, num_layers: int | None) -> int:
    """``num_layers``, or a ValueError that says what it is for."""
    if num_layers is None:
        raise ValueError(f"num_layers: expected the number of layers that {str(policy)!r} is planned for, got None")
    return num_layers
