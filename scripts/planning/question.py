"""One question to the planner: the best plan of a training step on its target."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

import jremat
import policies
from jremat.measure import target
from jremat.planner.request import Request
from jremat.planner.result import DoesNotFit, Plan
from jremat.policy import LayerPlan, Policy
from models.remat import remat
from models.transformer import layer_shapes
from scripts.benchmark.build import built_under, config_of, layer_of, seq_of
from scripts.benchmark.config import Case
from scripts.flags import MOST_TOKENS
from scripts.planning.config import Planning


@dataclass(frozen=True)
class Answer:
    """A plan, and the step that it is for."""

    case: Case
    plan: Plan
    tokens: int

    @property
    def devices(self) -> int:
        """That the step is spread over."""
        return target(self.case.target).num_devices

    @property
    def tokens_per_second(self) -> float | None:
        """Modelled, on all devices."""
        return self.tokens / self.plan.step_seconds if self.plan.step_seconds else None


def _nothing(*_: str) -> None:
    """Reports nothing."""


def ask(
    flags: Planning,
    case: Case,
    compiles: int | None = None,
    beside: bool = True,
    begin: Callable[[], None] = _nothing,
    drop: Callable[[str], None] = _nothing,
) -> Answer:
    """The best plan of ``case``.

    Args:
        flags: everything that is not in the case.
        compiles: in place of the flags'.
        beside: whether named policies are traced too.
        begin: called before each step that is traced or compiled, which takes its time.
        drop: called with each named policy that this model can't run and why.

    Raises:
        DoesNotFit: nothing fits.
        ValueError: a flag that is wrong.
    """
    config = config_of(case)
    seq = seq_of(case, config)
    if seq > config.max_seq:
        raise ValueError(f"seq: {case.model} takes at most {config.max_seq} tokens, got {seq}")

    def step(plan: Policy | LayerPlan) -> tuple[Any, tuple[Any, Any]]:
        begin()
        built = built_under(case, remat(plan, config))
        return built.step, (built.state, built.tokens)

    others = named(flags.named) if beside else ()
    unfit = {policy: problem for policy in others if (problem := _problem(case, policy))}
    for policy, problem in unfit.items():
        drop(f"named: {policy.spec!r} is left out: {problem}")
    plan = jremat.plan(
        layer_of(case),
        *layer_shapes(config, case.batch, seq),
        num_layers=config.num_layers,
        hbm_bytes=flags.hbm_bytes,
        target=case.target,
        step=step,
        compiles=flags.compiles if compiles is None else compiles,
        options=jremat.PlanOptions(
            host_bytes=flags.host_bytes,
            objective=None if flags.objective == "auto" else flags.objective,
            also=[policy for policy in others if policy not in unfit],
            keep=flags.keep,
            names_only=flags.names_only,
            margin=flags.margin,
        ),
    )
    return Answer(case, plan, case.batch * seq)


def named(specs: Iterable[str]) -> tuple[Policy | LayerPlan, ...]:
    """The policies of these specs.

    Raises:
        ValueError: an unknown one, or a request, which is itself the planner's.
    """
    found = []
    for spec in specs:
        policy = policies.get(spec)
        if isinstance(policy, Request):
            raise ValueError(f"named: {spec!r} is what the planner is asked, no policy to stand beside its answer")
        found.append(policy)
    return tuple(found)


def _problem(case: Case, policy: Policy | LayerPlan) -> str | None:
    """Why the model's block can't run under a policy, such as a name that no value bears; None where it can."""
    config = config_of(case)
    block, shapes = layer_of(case), layer_shapes(config, case.batch, seq_of(case, config))
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((config.num_layers, *leaf.shape), leaf.dtype), shapes[0])
    try:
        jax.eval_shape(jremat.stack(block, policy, num_layers=config.num_layers), layer, shapes[1])
    except ValueError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Tried:
    """One size that was tried, and what came of it."""

    case: Case
    answer: Answer | None


def largest(
    flags: Planning,
    sizes: Iterator[Case],
    worth: Callable[[Answer], float],
    begin: Callable[[], None] = _nothing,
    drop: Callable[[str], None] = _nothing,
) -> tuple[Answer, list[Tried]]:
    """The best size together with its plan: every size is predicted until one doesn't fit, the best is compiled.

    Args:
        sizes: growing.
        worth: of an answer, the more the better.
        begin, drop: as of ``ask``.

    Raises:
        DoesNotFit: not even the first size fits.
    """
    tried: list[Tried] = []
    refused: DoesNotFit | None = None
    for case in sizes:
        try:
            tried.append(Tried(case, ask(flags, case, compiles=0, beside=False, begin=begin)))
        except DoesNotFit as error:
            refused = error
            tried.append(Tried(case, None))
            break
    found = sorted((t.answer for t in tried if t.answer is not None), key=worth, reverse=True)
    for answer in found:
        try:
            return ask(flags, answer.case, begin=begin, drop=drop), tried
        except DoesNotFit as error:  # predicted to fit, and doesn't: the next best
            refused = error
    assert refused is not None, "where nothing was found something was refused"
    raise refused


def batches(case: Case, devices: int) -> Iterator[Case]:
    """The step with ever more sequences: one a device, two, three, four, six, eight, twelve …"""
    size = 1
    while True:
        yield replace(case, batch=size * devices)
        if size > 1 and size & (size - 1) == 0:
            yield replace(case, batch=size * 3 // 2 * devices)
        size *= 2


def seqs(case: Case, max_seq: int) -> Iterator[Case]:
    """The step with ever longer sequences, from 1,024 tokens, or the model's context, on."""
    size = min(MOST_TOKENS, max_seq)
    while size <= max_seq:
        yield replace(case, seq=size)
        size *= 2
