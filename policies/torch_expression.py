"""How PyTorch says a policy, as data: the call that a PyTorch user writes, and what differs.

It needs no PyTorch, which has four means: no checkpoint, ``checkpoint`` around a block or around several,
``checkpoint`` around a part of a block, and a selective checkpoint (SAC) that is asked about each aten op. A tensor has
no name there; SAC speaks of it by the op that makes it and how often that op was called in the block.
"""

import itertools
from dataclasses import dataclass
from typing import Literal

from jremat.planner.request import Request
from jremat.policy import OFFLOAD, RECOMPUTE, SAVE, LayerPlan, Policy
from policies.entry import Spec
from policies.megatron import MODULES

Means = Literal["bare", "checkpoint", "parts", "sac", "inputs_on_host"]


class NotExpressible(ValueError):
    """PyTorch has no call with this effect; the message says why."""


@dataclass(frozen=True)
class Expression:
    """A policy of one block in PyTorch.

    Args:
        means: which of PyTorch's ways.
        line: what a PyTorch user writes, for ``block`` and its input ``x``; ``SAC [ops]`` is ``checkpoint(block, x,
            use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, [ops]))``.
        differs: what is not the same as here; empty: nothing.
        policy: what SAC's function decides by.
        parts: of the block, by name, that stand in a checkpoint of their own.
    """

    means: Means
    line: str
    differs: str = ""
    policy: Policy | None = None
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """Consecutive layers in PyTorch.

    Args:
        layers: how many.
        expression: of each of them.
        replayed: whether one ``checkpoint`` stands around them all.
    """

    layers: int
    expression: Expression
    replayed: bool


SAC_KEEPS = "SAC keeps every call that is listed, also those that the backward never reads"
SAC_RERUNS = "SAC reruns every call that is not listed, also those that nothing needs"
_HOST = (
    "eager SAC takes MUST_CPU_OFFLOAD as recompute, and save_on_cpu doesn't see what SAC keeps: only a block's inputs "
    "can go to the host"
)
# Megatron's two modules that are a checkpoint around a part of the block, without output-discarding.
_PARTS = ("core_attn", "mlp")


def express(policy: Policy) -> Expression:
    """A policy of one block in PyTorch.

    Raises:
        NotExpressible: PyTorch has no such call.

    >>> from policies.registry import get
    >>> express(get("full")).line
    'checkpoint(block, x, use_reentrant=False)'
    >>> express(get("megatron:core_attn")).parts
    ('core_attn',)
    """
    if policy.values:
        raise NotExpressible("a planned policy speaks of single values of a JAX program")
    if policy.places:
        raise NotExpressible("PyTorch's selective checkpoint sees neither modules nor lines")
    if policy.keeps_everything:
        return Expression("bare", "block(x)", "the ops' own derivative rules decide what is kept, there and here")
    if policy.compresses:
        raise NotExpressible("PyTorch's selective checkpoint keeps values as they are, not compressed")
    if policy.offloads:
        return _offloading(policy)
    parts = _parts(policy)
    if parts:
        wrapped = " and ".join(f"checkpoint({part}, …, use_reentrant=False)" for part in parts)
        return Expression("parts", f"{wrapped} inside the block", parts=parts)
    named = {name for name, decision in policy.names if decision is SAVE}
    if policy.default is RECOMPUTE and not policy.families and named <= {"block_in"}:
        return Expression("checkpoint", "checkpoint(block, x, use_reentrant=False)", "early stop there; here dead code")
    unknown = [family.name for family, _ in policy.families if not family.aten]
    if unknown:
        raise NotExpressible(f"the op family {unknown[0]!r} names no aten op")
    if policy.default is SAVE:
        return Expression(
            "sac",
            f"SAC [all but what makes {', '.join(name for name, d in policy.names if d is not SAVE)}]",
            "every call's result is kept there, read or not; here what the backward reads",
            policy,
        )
    return Expression("sac", _sac_line(policy), "what SAC keeps and reruns", policy)


def express_plan(plan: LayerPlan | Policy, num_layers: int) -> tuple[Group, ...]:
    """A plan over a stack of ``num_layers`` in PyTorch, first layer first.

    Raises:
        NotExpressible: a binomial schedule, or a policy that PyTorch has no call for.

    >>> from policies.registry import get
    >>> [(g.layers, g.expression.means, g.replayed) for g in express_plan(get("every_k:2"), 3)]
    [(2, 'bare', True), (1, 'bare', True)]
    """
    if isinstance(plan, Policy):
        return (Group(1, express(plan), False),) * num_layers
    groups: list[Group] = []
    for segment in plan.resolve(num_layers):
        if segment.slots is not None:
            raise NotExpressible("a binomial schedule needs a backward loop of its own")
        each = [express(policy) for policy in segment.pattern] * (segment.repeats or 1)
        starts = itertools.accumulate(segment.group_sizes, initial=0)
        groups += [Group(size, each[start], segment.group > 1) for size, start in zip(segment.group_sizes, starts)]
    return tuple(groups)


def line_of(spec: Spec) -> tuple[str, str]:
    """What a PyTorch user writes for a policy, plan or request, and what differs.

    Raises:
        NotExpressible: nothing has this effect there.

    >>> from policies.registry import get
    >>> line_of(get("budget:0.4"))[0]
    'torch._functorch.config.activation_memory_budget = 0.4; torch.compile(model)'
    """
    if isinstance(spec, Policy):
        found = express(spec)
        return found.line, found.differs
    if isinstance(spec, Request):
        return _request(spec)
    express_plan(spec, sum(len(s.pattern) * (s.repeats or s.group) for s in spec.segments) + 1)
    kinds = {_layers_line(segment.group, segment.pattern) for segment in spec.segments}
    return "; ".join(sorted(kinds)), "a loop over the layers there; one executor and one compiled body here"


def _layers_line(group: int, pattern: tuple[Policy, ...]) -> str:
    if group > 1:
        inner = "" if pattern[0].keeps_everything else f", each layer inside as {express(pattern[0]).line}"
        return f"checkpoint(run_{group}_layers, x, use_reentrant=False){inner}"
    lines = dict.fromkeys(express(policy).line for policy in pattern)
    return " or ".join(lines) + (", by the layer's index" if len(lines) > 1 else "")


def _request(request: Request) -> tuple[str, str]:
    if request.kind == "sqrt":
        return (
            "checkpoint_sequential(layers, round(sqrt(len(layers))), x, use_reentrant=False)",
            "there the last chunk isn't checkpointed, and the number is the user's; here K has the least compiled peak",
        )
    if request.kind == "budget":
        return (
            f"torch._functorch.config.activation_memory_budget = {request.amount}; torch.compile(model)",
            "there a share of what the default partition keeps beyond the graph's inputs, here of what lies between "
            "full and none; below 1 a dropout's mask is drawn anew in the backward there (pytorch issue 190758)",
        )
    why = {
        "auto": "PyTorch plans for a share of the saved bytes, not for a device's memory",
        "overhead": "PyTorch's partitioner takes no bound on the FLOPs recomputed",
    }
    raise NotExpressible(why[request.kind])


def _offloading(policy: Policy) -> Expression:
    moved = {name for name, decision in policy.names if decision is OFFLOAD}
    if policy.default is not RECOMPUTE or policy.families or moved != {"block_in"} or len(policy.names) > 1:
        raise NotExpressible(_HOST)
    return Expression(
        "inputs_on_host",
        "with save_on_cpu(pin_memory=True): checkpoint(block, x, use_reentrant=False)",
        "copies there wait for each other unless streams are written by hand; here XLA schedules them",
    )


def _parts(policy: Policy) -> tuple[str, ...]:
    """The parts of a block whose inside, and nothing else, the policy leaves out."""
    if policy.default is not SAVE or policy.families:
        return ()
    left_out = {name for name, _ in policy.names}
    for parts in (("core_attn",), ("mlp",), _PARTS):
        inside = {tensor.removesuffix("?") for part in parts for tensor in MODULES[part]}
        required = {tensor for part in parts for tensor in MODULES[part] if not tensor.endswith("?")}
        if required <= left_out <= inside:
            return parts
    return ()


def _sac_line(policy: Policy) -> str:
    """In short: ``SAC [mm, addmm, what makes query]``."""
    ops = dict.fromkeys(op for family, decision in policy.families if decision is SAVE for op in family.aten)
    kept = dict.fromkeys("SDPA" if "scaled_dot_product" in op else op for op in ops)
    named = [name for name, decision in policy.names if decision is SAVE]
    shown = [*kept, *[f"what makes {', '.join(named)}"] * bool(named)]
    return f"SAC [{', '.join(shown)}]"
