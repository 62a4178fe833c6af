"""Remat and fused kernels: what a policy can't reach inside, and a name on the wrong side of a kernel's rule."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from jremat.calibration import LINT
from jremat.check.finding import Finding, Rule
from jremat.check.policy_answers import decision
from jremat.check.rules.costs import rerun_flops
from jremat.check.rules.names import Ruling, rulings, tags_in
from jremat.check.sites import HIDDEN, bodies, graph_of_jaxpr
from jremat.check.subject import Subject, of_body, subject_of
from jremat.graph.arguments import take_apart
from jremat.graph.trace import user_line
from jremat.jax_internals import tagged_name
from jremat.policy import RECOMPUTE, SAVE, Policy
from jremat.policy.ops import ATTENTION
from jremat.transform.checkpoint import checkpoint

# What may stand between a kernel's output and its name without being work.
_LAYOUT = frozenset(
    {"reshape", "transpose", "squeeze", "expand_dims", "convert_element_type", "sharding_constraint", "copy"}
)


@dataclass(frozen=True)
class KernelCall:
    """A fused operation that does matmuls.

    Args:
        eqn: it.
        jaxpr: the open program that it stands in.
        matmul_flops: of one run.
    """

    eqn: Any
    jaxpr: Any
    matmul_flops: int

    @property
    def source(self) -> str:
        """The user's line."""
        return user_line(self.eqn)


def kernels(jaxpr: Any) -> Iterator[KernelCall]:
    """Every fused operation of a program that does matmuls."""
    for body in bodies(jaxpr):
        for eqn in body.eqns:
            if eqn.primitive.name in HIDDEN or eqn.primitive.name in ATTENTION.primitives:
                alone = body.replace(eqns=[eqn], constvars=[], invars=_variables(eqn.invars), outvars=list(eqn.outvars))
                flops = graph_of_jaxpr(alone).matmul_flops
                if flops:
                    yield KernelCall(eqn, body, flops)


def _core_attention(subject: Subject) -> Iterator[Finding]:
    for ruling in rulings(subject):
        fused = next(kernels(ruling.site.body), None)
        if fused is None:
            continue
        left_out = {n for n, decision in ruling.decisions.items() if decision is RECOMPUTE}
        if left_out and not left_out & tags_in(ruling.piece):
            yield Finding(
                rule=CORE_ATTN_FUSED.slug,
                message=f"the policy leaves out {', '.join(sorted(left_out))}, which a fused attention never makes: "
                "it changes nothing",
                place=fused.source,
                cure="a fused attention keeps its output and log-sum-exp only, so nothing is left to leave out; to "
                "save more, leave out the MLP's (megatron:mlp) or use 'full'",
                cost_bytes=subject.rows.device_bytes,
            )
    for site in subject.sites:
        fused = next(kernels(site.body), None)
        if site.around or fused is None or fused.matmul_flops < LINT.nearly_all * site.graph.matmul_flops:
            continue
        again = rerun_flops(site)
        saved = subject.without([site]).rows.device_bytes - subject.rows.device_bytes
        if again and saved <= LINT.saves_nothing * of_body(site).rows.device_bytes * site.repeats:
            yield Finding(
                rule=CORE_ATTN_FUSED.slug,
                message="a remat around a fused attention alone: the kernel already recomputes its scores, so its "
                f"whole forward is rerun to save {max(saved, 0):,} bytes",
                place=site.source,
                cure="take this remat away, or put one around the whole block",
                cost_flops=again,
            )


def _named_outside(subject: Subject) -> Iterator[Finding]:
    for ruling in rulings(subject):
        for kernel in kernels(ruling.site.body):
            named = _named(kernel, ruling)
            if named is None:
                continue
            inside = tags_in(_piece(kernel.jaxpr, [kernel.eqn], list(kernel.eqn.outvars)))
            if any(decision is not RECOMPUTE and name in inside for name, decision in ruling.decisions.items()):
                continue
            piece = _piece(kernel.jaxpr, named, list(named[-1].outvars))
            again = subject_of(take_apart(_under(piece, ruling.policy), piece.avals, {})).recomputed
            if again:
                name = tagged_name(named[-1].primitive, named[-1].params)
                yield Finding(
                    rule=FLASH_NAME_OUTSIDE.slug,
                    message=f"{name!r} is put on a fused kernel's output outside of it: the output is kept, but not "
                    "where the kernel's backward reads it, so the forward runs again",
                    place=user_line(named[-1]),
                    cure="put the names on the output and the log-sum-exp inside the kernel's forward rule "
                    "(jremat.tag in the fwd of its custom_vjp) and keep both",
                    cost_flops=again * ruling.site.repeats,
                )


def _named(kernel: KernelCall, ruling: Ruling) -> list[Any] | None:
    """The equations from a kernel to a kept name on its output."""
    reached, path = set(kernel.eqn.outvars), [kernel.eqn]
    start = kernel.jaxpr.eqns.index(kernel.eqn)
    for eqn in kernel.jaxpr.eqns[start + 1 :]:
        if not reached & set(_variables(eqn.invars)):
            continue
        if tagged_name(eqn.primitive, eqn.params) is not None:
            if decision(ruling.policy, eqn) is SAVE:
                return [*path, eqn]
        elif eqn.primitive.name not in _LAYOUT:
            continue
        path.append(eqn)
        reached |= set(eqn.outvars)
    return None


def _piece(jaxpr: Any, eqns: list[Any], outvars: list[Any]) -> Subject:
    made = {v for eqn in eqns for v in eqn.outvars}
    read = dict.fromkeys(v for eqn in eqns for v in _variables(eqn.invars) if v not in made)
    alone = jaxpr.replace(eqns=eqns, constvars=[], invars=list(read), outvars=outvars)
    return Subject(core.ClosedJaxpr(alone, ()))


def _under(piece: Subject, policy: Any) -> Any:
    if isinstance(policy, Policy):
        return checkpoint(piece, policy, strict=False)
    return jax.checkpoint(piece.__call__, policy=policy)


def _variables(inputs: Any) -> list[Any]:
    return [v for v in inputs if not isinstance(v, core.Literal)]


CORE_ATTN_FUSED = Rule(
    "core-attn-fused",
    "core_attn (selective) under a fused attention: no effect",
    "a fused kernel never keeps its scores; leaving them out saves nothing, and a remat around it reruns it",
    "leave out something else, or remat the whole block",
    _core_attention,
)
FLASH_NAME_OUTSIDE = Rule(
    "flash-name-outside",
    "a flash attention's output is kept by name, and its forward is rerun all the same",
    "its backward reads what its forward rule handed it, which bears no name",
    "name the output and the log-sum-exp inside the forward rule",
    _named_outside,
)
RULES = (CORE_ATTN_FUSED, FLASH_NAME_OUTSIDE)
