"""What must not be done twice: effects on the world, and decisions that might turn out otherwise."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from jremat.check.finding import Finding, Rule
from jremat.check.sites import equations
from jremat.check.subject import Subject
from jremat.graph.trace import aval_bytes, user_line
from jremat.jax_internals import REMAT_SCOPE, inner_jaxprs, is_call, opened, scopes, tagged_name
from jremat.policy.ops import TOP_K

_HOST = frozenset(
    {"pure_callback", "io_callback", "debug_callback", "debug_print", "outside_call", "host_callback_call"}
)
# What gives the same bits wherever it is compiled.
_EXACT = frozenset(
    {"reshape", "squeeze", "expand_dims", "transpose", "copy", "neg", "stop_gradient", "reduce_precision", "slice"}
    | {"optimization_barrier", "sharding_constraint", "convert_element_type", "device_put"}
)
_WRITES = frozenset({"swap", "addupdate", "masked_swap"})


def reruns(jaxpr: Any, inside: bool = False, repeats: int = 1, call: Any = None) -> Iterator[tuple[Any, int, str, Any]]:
    """Every equation of a gradient that remat does again: (equation, how often, the user's line, where it stands)."""
    jaxpr = opened(jaxpr)
    for eqn in jaxpr.eqns:
        again = inside or REMAT_SCOPE in scopes(eqn)
        own = inner_jaxprs(eqn)
        if again and not own:
            yield eqn, repeats, user_line(eqn, call), jaxpr
        for inner, times in own:
            yield from reruns(inner, again, repeats * times, eqn if is_call(eqn) else call)


def _effects(subject: Subject) -> Iterator[Finding]:
    try:
        again = {(eqn.primitive.name, line) for eqn, _, line, _ in reruns(subject.gradient)}
        refused = ""
    except NotImplementedError as error:
        again, refused = set(), str(error).partition(":")[0]
    done = set()
    for site in subject.sites:
        for eqn, times, line in equations(site.body):
            key = eqn.primitive.name, line
            if eqn.primitive.name not in _HOST | _WRITES or key in done:
                continue
            if key not in again and not (refused and eqn.effects):
                continue
            done.add(key)
            written = eqn.primitive.name in _WRITES
            what = "writes to a Ref (a counter, running statistics)" if written else f"calls the host ({key[0]})"
            twice = f"JAX refuses its gradient: {refused}" if refused else "the backward pass does it once more"
            yield Finding(
                rule=SIDE_EFFECT.slug,
                message=f"the block {what} inside a remat: {twice}",
                place=line,
                cure="return what is to be recorded from the block and record it outside the remat (Flax's batch_stats "
                "and sown losses are returned so)",
                cost_bytes=sum(aval_bytes(v.aval) for v in (*eqn.invars, *eqn.outvars)) * times * site.repeats,
            )


def _decisions(subject: Subject) -> Iterator[Finding]:
    done = set()
    for eqn, times, line, jaxpr in reruns(subject.gradient):
        key = eqn.primitive.name, line
        if eqn.primitive.name not in TOP_K.primitives or key in done:
            continue
        if not any(jnp.issubdtype(v.aval.dtype, jnp.inexact) and _made_again(v, jaxpr) for v in eqn.invars):
            continue
        done.add(key)
        yield Finding(
            rule=DECISION_RERUN.slug,
            message=f"{key[0]} is decided again in the backward pass: where rounding differs from the first run "
            "(another fusion, another precision), a tie falls the other way and gradients go to other rows",
            place=line,
            cure="keep the decision, which is small: tag what it is made from (jremat.tag(logits, 'router')) or what "
            "it gives, and keep that name, or keep the family: ops:top_k",
            cost_bytes=sum(aval_bytes(v.aval) for v in eqn.outvars) * times,
        )


def _made_again(var: Any, jaxpr: Any) -> bool:
    """Whether a value is computed here, not handed in, nor a kept one in another layout."""
    makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    while var in makers:
        eqn = makers[var]
        if eqn.primitive.name not in _EXACT and tagged_name(eqn.primitive, eqn.params) is None:
            return REMAT_SCOPE in scopes(eqn)
        var = eqn.invars[0] if len(eqn.invars) == 1 else eqn.invars[eqn.outvars.index(var)]
        if isinstance(var, core.Literal):
            return False
    return False


SIDE_EFFECT = Rule(
    "side-effect",
    "side effects in the block run twice: counters, running statistics, callbacks",
    "a rerun does all that the first run did",
    "return it from the block, and act on it outside",
    _effects,
)
DECISION_RERUN = Rule(
    "decision-rerun",
    "a router's top-k is recomputed, and may choose differently",
    "a rerun compiled otherwise rounds otherwise; a decision is not continuous",
    "keep the decision",
    _decisions,
)
RULES = (SIDE_EFFECT, DECISION_RERUN)
