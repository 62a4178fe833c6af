"""Flax's scans of layers under a plan: ``nn.scan`` and ``nnx.scan`` with their own arguments and parameter layout."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from jax.extend import core

from jremat.graph.arguments import Arguments, take_apart
from jremat.graph.effects import rerunnable
from jremat.graph.interpret import consts_of, interpret
from jremat.graph.trace import capture, user_line
from jremat.jax_internals import SCAN, bind, is_initializing, lift_linen, loop_parts, opened
from jremat.policy.layers import LayerPlan
from jremat.policy.policy import Policy
from jremat.transform.chain import stack
from jremat.transform.closures import refuse_nnx
from jremat.transform.nnx import over_state
from jremat.transform.scan import resolved
from jremat.transform.subclass import in_place_of


def scan_layers(target: Any, plan: LayerPlan | Policy, **options: Any) -> Any:
    """``nn.scan(Block, ...)`` or ``nnx.scan(f, ...)``, its layers under a plan that may differ from layer to layer.

    Parameters, statistics and random streams are those of the plain scan: one snapshot serves every plan. Kept and
    recomputed is what the plan says, layer by layer, as in ``jremat.stack``, which runs the layers: blocks that write
    collections or return a value beside the carry run there as scans, and a warning says what that costs.

    Args:
        target: a Linen module class; or a function of NNX modules and arrays, as ``nnx.scan`` takes it.
        plan: over layers, e.g. ``policies.get("every_k:4")``, or one policy for all of them.
        options: of ``flax.linen.scan`` (``variable_axes``, ``split_rngs``, ``length``, ...) or of ``flax.nnx.scan``
            (``in_axes``, ``out_axes``, ...).

    Returns:
        What ``nn.scan`` or ``nnx.scan`` return: a class of the same name, or a function. In ``init`` a Linen class runs
        as the plain scan, since nothing is differentiated there.

    Raises:
        ValueError: ``target`` is neither; at the call, the plan doesn't fit the number of layers, or as of
            ``jremat.stack``.

    >>> import jax.numpy as jnp
    >>> from jremat.policy import FULL
    >>> class Layer(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x, _):
    ...         return jnp.tanh(nn.Dense(4)(x)), None
    >>> layers = scan_layers(Layer, FULL, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    >>> variables = layers.init(jax.random.key(0), jnp.ones((2, 4)), None)
    >>> jax.tree.map(jnp.shape, variables["params"]["Dense_0"])
    {'bias': (3, 4), 'kernel': (3, 4, 4)}

    Source: Chen et al. 2016, arXiv 1604.06174, for the segments.
    """
    if not isinstance(plan, Policy):
        plan = plan if isinstance(plan, LayerPlan) else resolved(plan, 1)  # which raises
    if inspect.isclass(target) and issubclass(target, nn.Module):
        scanned = nn.scan(target, **options)
        methods = options.get("methods") or ["__call__"]
        made = lift_linen(functools.partial(_planned_linen, plan=plan), scanned, methods=list(methods))
        return in_place_of(made, scanned, lambda: scan_layers(target, plan, **options))
    if inspect.isclass(target) or isinstance(target, nn.Module) or not callable(target):
        raise ValueError(
            f"target: expected a Linen module class or a function of NNX modules and arrays, got {target!r}"
        )
    refuse_nnx(target)
    return _planned_nnx(nnx.scan(target, **options), plan)


def _planned_linen(fn: Callable[..., Any], plan: LayerPlan | Policy) -> Callable[..., Any]:
    def inner(scope_fn: Any, repack_fn: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        def call(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            scope = scope_fn(variables, rngs)
            return fn(scope, *args, **kwargs), repack_fn(scope)

        if any(is_initializing(scope) for scope in jax.tree.leaves(scope_fn(variables, rngs))):
            return call(variables, rngs, *args, **kwargs)
        return call_planned(take_apart(call, (variables, rngs, *args), kwargs), plan)

    return inner


def _planned_nnx(f: Callable[..., Any], plan: LayerPlan | Policy) -> Callable[..., Any]:
    @functools.wraps(f)
    def planned(*args: Any, **kwargs: Any) -> Any:
        return over_state(f, args, kwargs, (), functools.partial(call_planned, plan=plan))

    return planned


def call_planned(arguments: Arguments, plan: LayerPlan | Policy) -> Any:
    """One call of a function whose only scan, loops inside of others aside, runs its iterations under a plan.

    Raises:
        ValueError: it has no scan, or several.
    """
    program = rerunnable(capture(arguments))
    found: list[Any] = []

    def rule(eqn: Any, given: Sequence[Any], around: tuple[Any, ...]) -> list[Any]:
        if eqn.primitive.name != SCAN:
            return bind(eqn, given)
        found.append(eqn)
        return planned_scan(eqn, given, plan)

    outs = interpret(program.jaxpr, program.consts, arguments.arrays, rule)
    if len(found) != 1:
        lines = ", ".join(user_line(eqn) for eqn in found) or "none"
        raise ValueError(f"target: expected one scan of layers, got {len(found)} ({lines})")
    return arguments.result(program.out_tree, outs)


def planned_scan(eqn: Any, given: Sequence[Any], plan: LayerPlan | Policy) -> list[Any]:
    """A scan whose iterations run as layers of a stack."""
    num_shared, num_carry = loop_parts(eqn)
    length, reverse, body = eqn.params["length"], eqn.params["reverse"], eqn.params["jaxpr"]
    inner = opened(body)
    turned = lambda rows: [row[::-1] for row in rows] if reverse else list(rows)
    shared, carry, rows = given[:num_shared], list(given[num_shared:][:num_carry]), given[num_shared + num_carry :]
    # What an iteration hands out as it was handed in (NNX's parameters) is there already.
    handed = dict(zip(inner.invars[num_shared + num_carry :], rows))
    passed = [isinstance(v, core.Var) and v in handed for v in inner.outvars[num_carry:]]
    made = [k for k, own in enumerate(passed) if not own]

    def layer(own: list[Any], carry: list[Any], *shared: Any) -> Any:
        outs = interpret(inner, consts_of(body), [*shared, *carry, *own], lambda e, x, _: bind(e, x))
        written = [outs[num_carry:][k] for k in made]
        return (outs[:num_carry], written) if written else outs[:num_carry]

    out = stack(layer, plan, num_layers=length)(turned(rows), carry, *shared)
    carry, written = out if made else (out, [])
    supply = iter(turned(written))
    ys = [handed[v] if own else next(supply) for own, v in zip(passed, inner.outvars[num_carry:])]
    return [*carry, *ys]
