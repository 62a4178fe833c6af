"""What would free memory, tried on the step: compiled again, never run."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jremat.fitting.planner import DoesNotFit, fit
from jremat.graph.flops import flops
from jremat.measure.compile import CompileError, as_jitted, is_array
from jremat.measure.memory import compiled_memory
from jremat.measure.memory_analysis import Memory
from jremat.measure.targets import Target
from jremat.oom.launch import CONTEXT_BYTES, MEMORY_FRACTION
from jremat.policy import FULL, OFFLOAD, Policy
from jremat.policy.ops import MATMUL

Step = Callable[..., Any]


@dataclass(frozen=True)
class Cure:
    """A change of the step, compiled.

    Attributes:
        what: the change, as it is written.
        peak_bytes: compiled, with the change.
        freed_bytes: less than the step as it is; of a larger share for the allocator, what it has more.
        seconds: modelled time of a step more; None where the target's chip is unknown.

    >>> Cure("donate_argnums=(0,)", 2**30, 2**29, 0.0).freed_bytes
    536870912
    """

    what: str
    peak_bytes: int
    freed_bytes: int
    seconds: float | None


@dataclass(frozen=True)
class Subject:
    """A step and how it may be changed.

    Attributes:
        step, args: as they are.
        memory: of it.
        kind: the target.
        under: of a policy, to the step and its arguments; None where the step takes none.
        loss: that the step differentiates by its first argument; None where only the step is known.
        hbm_bytes: that a fitted loss is to need.
    """

    step: Step
    args: tuple[Any, ...]
    memory: Memory
    kind: Target
    under: Step | None
    loss: Step | None
    hbm_bytes: int

    def peak(self, step: Step, args: tuple[Any, ...]) -> int:
        """Of a changed step."""
        return compiled_memory(step, *args, target=self.kind, num_buffers=0).peak_bytes

    def cure(self, what: str, peak_bytes: int, seconds: float | None) -> Cure:
        """A change with what it frees."""
        return Cure(what, peak_bytes, self.memory.peak_bytes - peak_bytes, seconds)


def cures(subject: Subject, not_donated: bool, activations: bool) -> tuple[Cure, ...]:
    """Changes that free memory, those that cost the least time first.

    Args:
        subject: the step.
        not_donated: whether its results stand beside the arguments that they replace.
        activations: whether what its forward and backward pass make is a cause.
    """
    found = [*_larger_pool(subject)]
    if not_donated:
        found += _donation(subject)
    if activations:
        found += [*_policies(subject), *_fitted(subject), *_half_batch(subject)]
    helpful = [cure for cure in found if cure.freed_bytes > 0]
    unknown = float("inf")
    return tuple(sorted(helpful, key=lambda c: (unknown if c.seconds is None else c.seconds, -c.freed_bytes)))


def _larger_pool(subject: Subject) -> Iterator[Cure]:
    """Where the step is larger than what JAX reserves of a GPU, and fits what it could reserve."""
    hbm = subject.kind.hbm_bytes
    if subject.kind.platform != "cuda" or not hbm:
        return
    share = int(100 * (1 - CONTEXT_BYTES / hbm)) / 100
    if MEMORY_FRACTION * hbm < subject.memory.peak_bytes <= share * hbm:
        more = int((share - MEMORY_FRACTION) * hbm)
        yield Cure(f"XLA_PYTHON_CLIENT_MEM_FRACTION={share}", subject.memory.peak_bytes, more, 0.0)


def _donation(subject: Subject) -> Iterator[Cure]:
    if places := replaced(subject.step, subject.args):
        donating = jax.jit(lambda *given: as_jitted(subject.step, given)[0](*given), donate_argnums=places)
        yield subject.cure(f"jax.jit(step, donate_argnums={places})", subject.peak(donating, subject.args), 0.0)


def _policies(subject: Subject) -> Iterator[Cure]:
    if not subject.under:
        return
    chip = subject.kind.chip
    named = [("dots_saveable", Policy.ops(MATMUL)), ("full", FULL)]
    if subject.kind.platform != "cpu":  # which has one memory only
        named.append(("offload_dots", Policy(families=((MATMUL, OFFLOAD),))))
    for name, policy in named:
        with warnings.catch_warnings():
            # That the backend that is here, maybe a CPU, ignores an offload: the target's compiler does not.
            warnings.filterwarnings("ignore", "policy: .* offloads to pinned_host")
            step, args = subject.under(policy)
            memory = compiled_memory(step, *args, target=subject.kind, num_buffers=0)
        seconds = None
        if chip:
            seconds = flops(step, *args).matmul.recompute / chip.matmul_flops_per_second(_dtype(args))
            seconds += 2 * memory.host_bytes / chip.host_link_bytes_per_second  # there and back
        yield subject.cure(f"policies.get({name!r})", memory.peak_bytes, seconds)


def _fitted(subject: Subject) -> Iterator[Cure]:
    """``jremat.fit`` of the loss, where it is known, on one device."""
    if subject.loss is None or subject.kind.num_devices > 1:
        return
    what = f"jremat.fit(loss, ..., hbm_bytes='{subject.hbm_bytes / 2**20:.0f}MiB')"
    try:
        fitted = fit(subject.loss, *subject.args, hbm_bytes=subject.hbm_bytes, target=subject.kind, compiles=1)
    except DoesNotFit as error:
        fitted, what = error.leanest, "jremat.fit(loss, ...), the leanest plan"
    plan = fitted.plan
    peak = plan.peak_bytes or subject.peak(jax.value_and_grad(fitted), subject.args)
    yield subject.cure(what, peak, plan.seconds if plan.objective == "seconds" else None)


def _half_batch(subject: Subject) -> Iterator[Cure]:
    """The step on half of its batch; with a loss, both halves one after the other with their gradients added."""
    places = _batched(subject)
    if not places:
        return
    halved = tuple(jax.tree.map(_half, arg) if place in places else arg for place, arg in enumerate(subject.args))
    if subject.loss is None:
        what, step, args = "half of the batch, gradients of two steps accumulated", subject.step, halved
    else:
        what, step, args = "two micro-batches, gradients accumulated", accumulated(subject.loss, places), subject.args
    try:
        peak = subject.peak(step, args)
    except (TypeError, ValueError, CompileError):
        return  # written for this batch size alone: the cure does not apply
    yield subject.cure(what, peak, 0.0)


def accumulated(loss: Step, places: Sequence[int]) -> Step:
    """Loss and gradient of the mean over two halves of the batch, one at a time."""

    def step(*args: Any) -> Any:
        halves = [jax.tree.map(lambda x: x.reshape(2, x.shape[0] // 2, *x.shape[1:]), args[place]) for place in places]

        def add(total: Any, half: Any) -> Any:
            given = dict(zip(places, half))
            one = jax.value_and_grad(loss)(*(given.get(place, arg) for place, arg in enumerate(args)))
            return jax.tree.map(jnp.add, total, one), None

        nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(jax.value_and_grad(loss), *args))
        total = jax.lax.scan(add, nothing, halves)[0]
        return jax.tree.map(lambda leaf: leaf / 2, total)

    return step


def _batched(subject: Subject) -> tuple[int, ...]:
    """Places of the arguments that are data: no state that the step returns, all with one even leading dimension."""
    state = {0} if subject.loss else {*replaced(subject.step, subject.args)}
    data = [place for place, arg in enumerate(subject.args) if place not in state and jax.tree.leaves(arg)]
    leaves = [leaf for place in data for leaf in jax.tree.leaves(subject.args[place])]
    if not leaves or not all(is_array(leaf) and leaf.ndim for leaf in leaves):
        return ()
    sizes = {leaf.shape[0] for leaf in leaves}
    return tuple(data) if len(sizes) == 1 and max(sizes) % (2 * subject.kind.num_devices) == 0 else ()


def _half(leaf: Any) -> jax.ShapeDtypeStruct:
    shape = (leaf.shape[0] // 2, *leaf.shape[1:])
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _dtype(args: Any) -> str:
    """The dtype whose matmul peak the model's is."""
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(args) if is_array(leaf)}
    return "float32" if "float32" in dtypes and not dtypes & {"bfloat16", "float16"} else "bfloat16"


def replaced(step: Step, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Places of the arguments for each of whose arrays the step returns one of the same shape and dtype."""
    key = lambda leaf: (leaf.shape, leaf.dtype)
    left = [key(leaf) for leaf in jax.tree.leaves(jax.eval_shape(step, *args))]
    places = []
    for place, arg in enumerate(args):
        wanted = [key(leaf) for leaf in jax.tree.leaves(arg) if hasattr(leaf, "dtype")]
        if wanted and all(wanted.count(one) <= left.count(one) for one in wanted):
            places.append(place)
            for one in wanted:
                left.remove(one)
    return tuple(places)
