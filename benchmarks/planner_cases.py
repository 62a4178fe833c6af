"""Training steps to plan, their peaks, and the planner held beside every named policy on them."""

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import policies
from jremat.graph.peak import predicted_memory
from jremat.measure import compiled_memory, target
from jremat.measure.memory_analysis import versions
from jremat.planner.planner import cost_of
from jremat.planner.read_block import read_block
from jremat.planner.search import Found, search
from jremat.planner.stack import Choice, Stack
from jremat.policy import FULL, NONE, OFFLOAD, RECOMPUTE, LayerPlan, Policy
from jremat.policy.files import write_json
from models.config import get
from models.remat import remat
from models.transformer import Carry, block_apply, init_params, layer_shapes, mean_loss

TARGET = target("h200")
FILE = Path(__file__).parent / "planner.json"
OBJECTIVES = "seconds", "flops"


class OutOfTime(Exception):
    """The run's minutes are over: what would be compiled next isn't."""


@dataclass(frozen=True)
class Model:
    """A training step to plan.

    Args:
        name: of models/config.py, at its own depth; no dropout, bfloat16 compute, float32 parameters.
        attention: ``dot`` materialises the scores, ``blockwise`` is fused.
        batch, seq: of the step.
        layers: in place of the model's own; 0 keeps it.
    """

    name: str
    attention: str
    batch: int
    seq: int
    layers: int = 0

    @property
    def title(self) -> str:
        layers = f" L={self.layers}" if self.layers else ""
        return f"{self.name} {self.attention} b={self.batch} s={self.seq}{layers}"

    @cached_property
    def config(self) -> Any:
        config = get(self.name)
        changes = {"attention": self.attention, "compute_dtype": "bfloat16", "dropout": 0.0}
        return replace(config, num_layers=self.layers or config.num_layers, **changes)

    def layer_shapes(self) -> tuple[Any, Carry]:
        """One layer's parameters and its carry."""
        return layer_shapes(self.config, self.batch, self.seq)

    def step(self, plan: Policy | LayerPlan) -> tuple[Callable[..., Any], Any, Any]:
        """The whole step under a plan, and the shapes of its arguments."""
        model, adamw = remat(plan, self.config, "chain").model(self.config), optax.adamw(1e-4)

        def train(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
            params, inner = state
            loss = lambda p: mean_loss(model, p, tokens[:, :-1], tokens[:, 1:])
            value, gradient = jax.value_and_grad(loss)(params)
            updates, inner = adamw.update(gradient, inner, params)
            return (optax.apply_updates(params, updates), inner), value

        params = jax.eval_shape(lambda: init_params(self.config, jax.random.key(0)))
        tokens = jax.ShapeDtypeStruct((self.batch, self.seq + 1), jnp.int32)
        return jax.jit(train, donate_argnums=0), (params, jax.eval_shape(adamw.init, params)), tokens

    def stack(self, objective: str) -> Stack:
        """The layers as the planner reads them, host link included."""
        return _stack(self, objective)


@cache
def _stack(model: Model, objective: str) -> Stack:
    link = TARGET.chip.host_link_bytes_per_second if objective == "seconds" else np.inf
    shapes = model.layer_shapes()
    cost = cost_of(TARGET, objective)
    block = read_block(block_apply(model.config), *shapes, cost=cost, fetched=1, host_link_bytes_per_second=link)
    return Stack(block, model.config.num_layers, sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes[1])))


# Each model once, then with the other attention. A 70B layer stands alone on one device with few beside it.
MODELS = (
    Model("gpt2", "dot", 4, 1024),
    Model("llama-1b", "blockwise", 4, 1024),
    Model("gpt2-medium", "dot", 4, 512),
    Model("llama3-8b", "blockwise", 2, 2048, 8),
    Model("gpt2-large", "dot", 2, 1024),
    Model("llama3-70b", "blockwise", 1, 4096, 4),
    Model("gpt2-xl", "dot", 4, 1024, 12),
    Model("tiny-llama", "blockwise", 64, 256),
    Model("gpt2", "blockwise", 8, 1024),
    Model("llama-1b", "dot", 2, 1024),
    Model("gpt2-medium", "blockwise", 4, 1024),
    Model("llama3-8b", "dot", 2, 1024, 8),
    Model("gpt2-large", "blockwise", 2, 1024),
    Model("llama3-70b", "dot", 1, 1024, 4),
    Model("gpt2-xl", "blockwise", 4, 1024, 12),
    Model("tiny-llama", "dot", 64, 256),
)


class Peaks:
    """Peaks of a model's step by plan, looked up in the file or found and written to it."""

    def __init__(self, until: float):
        self.until = until
        self.folder = tempfile.TemporaryDirectory()
        self.rows: dict[str, dict[str, Any]] = json.loads(FILE.read_text())["peaks"] if FILE.exists() else {}

    def traced(self, model: Model, plan: Policy | LayerPlan) -> int:
        return self._row(model, plan, "traced", lambda f, *args: predicted_memory(f, *args).peak_bytes)

    def compiled(self, model: Model, plan: Policy | LayerPlan) -> int:
        # Kernels that steps of one model share are compiled once: memory is planned before them, so it is the same.
        kernels = Path(self.folder.name) / model.title.replace(" ", "_")
        options = {
            "xla_gpu_enable_llvm_module_compilation_parallelism": True,
            "xla_gpu_kernel_cache_file": str(kernels),
        }
        find = lambda f, *a: compiled_memory(f, *a, target=TARGET, compiler_options=options, num_buffers=0).peak_bytes
        return self._row(model, plan, "compiled", find)

    @property
    def num_compiled(self) -> int:
        """Programs in the file."""
        return sum("compiled" in row for rows in self.rows.values() for row in rows.values())

    def known(self, model: Model, plan: Policy | LayerPlan) -> int | None:
        """What was compiled, if it was."""
        return self.rows.get(model.title, {}).get(program_key(model, plan), {}).get("compiled")

    def within(self, find: Callable[..., int], wanted: list[tuple[Any, ...]]) -> None:
        """Find as many as there is time for."""
        with contextlib.suppress(OutOfTime):
            for args in wanted:
                find(*args)

    def _row(self, model: Model, plan: Policy | LayerPlan, figure: str, find: Callable[..., int]) -> int:
        row = self.rows.setdefault(model.title, {}).setdefault(program_key(model, plan), {"spec": plan.spec})
        if figure not in row:
            if time.time() > self.until:
                raise OutOfTime
            started = time.time()
            row[figure] = find(*model.step(plan))
            if figure == "compiled":
                print(f"{time.time() - started:5.1f} s {model.title} {plan.spec[:60]}", file=sys.stderr, flush=True)
                write_json(FILE, {"versions": versions(TARGET), "peaks": self.rows})
        return row[figure]


def program_key(model: Model, plan: Policy | LayerPlan) -> str:
    """Equal for plans that come to the same program: what is kept counts, not how it is called."""
    block = model.stack("seconds").block

    def kept(policy: Policy) -> str:
        if policy.default is not RECOMPUTE:
            return policy.canonical_spec
        outcome = block.outcome(policy)
        host = [p for p in outcome.held if block.problem.nodes[p].mark in outcome.offloaded]
        input_too = policy.decide(names=("block_in",)) is OFFLOAD
        return f"{[p for p in outcome.held if p not in host]}{host or ''}{'block_in' if input_too else ''}"

    if isinstance(plan, Policy):
        return kept(plan)
    return "; ".join(f"{s.repeats}*{[kept(p) for p in s.pattern]}/{s.group}/{s.slots}" for s in plan.segments)


@dataclass(frozen=True)
class Rival:
    """A named policy or plan.

    Args:
        spec: of it, the first of those that come to the same.
        plan: it.
        figures: what it costs.
        time: of them, in the objective's unit.
        device_bytes: kept, inputs that lie on the host taken off.
    """

    spec: str
    plan: Policy | LayerPlan
    figures: Choice
    time: float
    device_bytes: int


def rivals(model: Model, objective: str) -> list[Rival]:
    """The named policies and plans that the model can run, one for each program, leanest first."""
    stack, layers = model.stack(objective), model.config.num_layers
    specs = [entry.policy.spec for entry in policies.table() if not entry.is_form]
    plans = ("every_k:4", "revolve:4", "alternate:2", "alternate:4", f"block:{layers // 2}")
    found: dict[str, Rival] = {}
    for spec in (*specs, *plans):
        plan = policies.get(spec)
        if not isinstance(plan, (Policy, LayerPlan)):
            continue
        try:
            figures = stack.choice(plan)
        except ValueError:  # a name that this model hasn't, more layers than it has
            continue
        moved = isinstance(plan, Policy) and plan.decide(names=("block_in",)) is OFFLOAD
        device_bytes = figures.kept_bytes - moved * layers * stack.carry_bytes
        found.setdefault(program_key(model, plan), Rival(spec, plan, figures, _time(figures, objective), device_bytes))
    return sorted(found.values(), key=lambda rival: rival.device_bytes)


def spread(field: list[Rival], most: int) -> list[Rival]:
    """At most so many, from the leanest to the one that keeps most, evenly by their number."""
    return [field[k] for k in sorted({round(i) for i in np.linspace(0, len(field) - 1, most)})]


def _time(choice: Choice, objective: str) -> float:
    return choice.recompute_seconds if objective == "seconds" else choice.recompute_flops


@dataclass(frozen=True)
class Duel:
    """The planner given the compiled peak and the host bytes of a named policy.

    Args:
        rival: whose.
        limit_bytes: its compiled peak, no margin.
        named: least time of the named policies at no more peak and no more host bytes.
        planned: the planner's, infinite where it found nothing that fits.
        compiles: that the planner was allowed.
        answer: what it came to.
        itself: whether that is a named policy.
    """

    rival: Rival
    limit_bytes: int
    named: float
    planned: float
    compiles: int
    answer: Found
    itself: bool

    @property
    def no_worse(self) -> bool:
        return self.planned <= self.named * (1 + 1e-9)

    @property
    def better(self) -> bool:
        return self.planned < self.named * (1 - 1e-6)


ALLOWED = 2, 6
"""Compiles: the planner's default, and, where a named policy is faster than what that finds, more."""


def duels(model: Model, objective: str, peaks: Peaks, most: int) -> list[Duel]:
    """The planner beside the named policies, those whose steps there was time to compile.

    Args:
        most: named policies, spread from the leanest to the one that keeps most.
    """
    field = rivals(model, objective)
    chosen = spread(field, most)
    peaks.within(peaks.compiled, [(model, rival.plan) for rival in chosen])
    named = [(peaks.known(model, rival.plan), rival) for rival in field]
    named = [(peak, rival) for peak, rival in named if peak is not None]
    found = []
    for limit, rival in named:
        try:
            found.append(_duel(model, objective, peaks, named, limit, rival))
        except OutOfTime:
            continue
    return found


def _duel(
    model: Model,
    objective: str,
    peaks: Peaks,
    named: list[tuple[int, Rival]],
    limit: int,
    rival: Rival,
) -> Duel:
    stack, host = model.stack(objective), rival.figures.host_bytes
    least = min(r.time for p, r in named if p <= limit and r.figures.host_bytes <= host)
    lines = lines_of(stack, host)
    others = [r.figures for _, r in named if r.figures.host_bytes <= host]
    for compiles in ALLOWED:
        found = search(lines, limit, *looked_up(model, peaks), others, compiles, stack.with_tail)
        time_ = _time(found.choice, objective) if found.fits else np.inf
        if time_ <= least * (1 + 1e-9):
            break
    return Duel(rival, limit, least, time_, compiles, found, found.fits and found.choice in others)


def lines_of(stack: Stack, host_bytes: int = 0) -> list[tuple[Choice, ...]]:
    """What the planner looks at."""
    return [stack.choices(host_bytes), stack.tailed(host_bytes)]


def looked_up(model: Model, peaks: Peaks) -> tuple[Callable[..., int], Callable[..., int]]:
    return lambda plan: peaks.traced(model, plan), lambda plan: peaks.compiled(model, plan)


SHARES = 0.02, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95


def budgets(model: Model, peaks: Peaks) -> list[tuple[int, Found]]:
    """Memory between what full remat and keeping all need; no margin, two compiles, no policies by name beside."""
    lines = lines_of(model.stack("seconds"))
    found = []
    with contextlib.suppress(OutOfTime):
        low, high = peaks.compiled(model, FULL), peaks.compiled(model, NONE)
        for share in SHARES:
            limit = int(low + share * (high - low))
            found.append(
                (limit, search(lines, limit, *looked_up(model, peaks), improved=model.stack("seconds").with_tail))
            )
    return found
