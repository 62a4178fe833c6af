"""The comparison itself: for each way of rematting, both sides measured, and what must hold of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np

from jremat.estimator.config import TransformerConfig
from jremat.estimator.decoder.layers import dropout
from models.torch_twin import Run
from policies.torch_contexts import stack_run
from policies.torch_expression import NotExpressible, express_plan, line_of
from scripts.compare import jax_side, torch_side
from scripts.compare.config import Compare
from scripts.compare.rows import GRADIENT_LIMIT, check, differences, gradient_error, kept_check
from scripts.compare.torch_budget import DRAWN_AGAIN, Budgeted

SMALL_HEAD_DIM, SMALL_SEQ = 8, 16
"""Of the model on which dropout is compared: its masks are as good as a large one's, and compile sooner."""
SHARES = 10**9
"""A share is rounded up to so many parts, which is less than a byte of these models."""
BUDGETS_DIFFER = (
    "budget: PyTorch's is a share of what its default partition keeps beyond the inputs, JAX's of what lies between "
    "full and none; in these rows JAX is allowed the bytes that PyTorch keeps"
)
DROPPED, SIGMAS = 100_000, 5
"""Values whose mask is counted, and how many standard deviations from the rate its share of zeros may lie."""


@dataclass(frozen=True)
class Case:
    """One way of rematting on both sides.

    Args:
        spec: here.
        line: what a PyTorch user writes.
        run_of: PyTorch's stack, of a config: a dropout changes the order of calls by which SAC finds a tensor.
        listed: whether PyTorch keeps what a list says.
        differs: in words.
        budget: of ``torch.compile``, to which ``spec`` comes; None where the two sides say the same.
    """

    spec: str
    line: str
    run_of: Callable[[TransformerConfig], Run]
    listed: bool = False
    differs: str = ""
    budget: float | None = None

    @property
    def name(self) -> str:
        """The row's."""
        return self.spec if self.budget is None else f"budget:{self.budget:g}"


class Session:
    """One model and batch on both sides; what is compiled is compiled once."""

    def __init__(self, compare: Compare) -> None:
        self.compare = compare
        self.size = jax_side.Size(compare.config(), compare.batch, compare.config().max_seq)
        self.params, self.tokens, self.targets = filled(self.size)
        self.twin = torch_side.twin(self.size.config, self.params, self.tokens, self.targets)
        self.plan = lru_cache(None)(jax_side.plan_of)
        self.compiled = lru_cache(None)(lambda spec: jax_side.compiled(self.plan(spec, self.size), self.size))
        self.stack = lru_cache(None)(lambda spec: jax_side.measured_stack(self.plan(spec, self.size), self.size))
        self.result = lru_cache(None)(lambda spec: jax.device_get(self.jax_step(spec)()))

    def jax_step(self, spec: str) -> Callable[[], Any]:
        """The compiled step on the batch."""
        run = self.compiled(spec)[1]
        return lambda: jax.block_until_ready(run(self.params, self.tokens, self.targets))

    @property
    def own_ways(self) -> list[torch_side.Own]:
        """PyTorch's own ways, a few or all."""
        return [own for own in torch_side.own_ways(self.size.config) if own.few or self.compare.thorough]

    @property
    def count(self) -> int:
        """How many cases there are."""
        return len(self.compare.policies) + len(self.own_ways) + len(self.compare.budgets)

    def cases(self) -> Iterator[Case | dict[str, Any]]:
        """Every policy, as a case or, where a side can't say it, as a row that says so; then PyTorch's own ways
        and ``torch.compile``'s budgets."""
        for spec in self.compare.policies:
            try:
                plan = self.plan(spec, self.size)
                self.stack(spec)
            except ValueError as error:
                yield {"policy": spec, "pytorch": "", "status": f"not for this model: {error}"}
                continue
            try:
                groups = express_plan(plan, self.size.config.num_layers)
                run_of = partial(_run_of, plan)
                run_of(self.size.config)
                line, differs = line_of(plan)
            except NotExpressible as error:
                yield {"policy": spec, "pytorch": "", "status": f"not expressible in PyTorch: {error}"}
                continue
            listed = any(group.expression.means == "sac" for group in groups)
            yield Case(spec, line, run_of, listed, differs)
        for own in self.own_ways:
            yield Case(own.spec, own.line, partial(_always, own.run), "SAC" in own.line)
        for budget in self.compare.budgets:
            yield self.budget(budget)

    def row(self, case: Case) -> dict[str, Any]:
        """Everything about a case but its time."""
        ours, memory = self.stack(case.spec), self.compiled(case.spec)[0]
        run = case.run_of(self.size.config)
        theirs, work = torch_side.kept_bytes(self.twin, run), torch_side.stack_work(self.twin, run)
        loss, gradient = torch_side.gradient(self.twin, run)
        our_loss, our_gradient = self.result(case.spec)
        loss_error = abs(loss - float(our_loss)) / abs(float(our_loss))
        error = gradient_error(gradient, our_gradient)
        checks = {
            "loss": check(loss_error <= GRADIENT_LIMIT, hard=True, error=loss_error, limit=GRADIENT_LIMIT),
            "gradients": check(error <= GRADIENT_LIMIT, hard=True, error=error, limit=GRADIENT_LIMIT),
            "kept_bytes": kept_check(case.spec, ours.kept_bytes, sum(theirs.values())),
            "recomputed_flops": check(
                ours.recomputed_flops <= work.recomputed_flops,
                hard=True,
                jax=ours.recomputed_flops,
                pytorch=work.recomputed_flops,
            ),
        }
        if self.compare.dropout:
            checks["dropout"] = self._dropout(case)
        return {
            "policy": case.name,
            "pytorch": case.line,
            **({} if case.budget is None else self._budgets(case.spec, case.budget)),
            "differs": case.differs,
            "status": "compared",
            "forward_flops": {"jax": ours.forward_flops, "pytorch": work.forward_flops},
            "recomputed_matmuls": {"jax": ours.recomputed_matmuls, "pytorch": work.recomputed_matmuls},
            "peak_bytes": {
                "jax": memory.peak_bytes,
                "jax_label": memory.label,
                "pytorch": torch_side.peak(self.twin, run),
                "pytorch_label": "MemTracker, on the CPU",
            },
            "kept_by_tensor": {"jax": ours.kept, "pytorch": theirs},
            "differences": differences(ours.kept, theirs, self.stack("none").kept, case.listed),
            "checks": checks,
        }

    def _dropout(self, case: Case) -> dict[str, Any]:
        """Under remat the gradient is that without it under the same seed, so the masks are; on each side."""
        small = self.small()
        ours, others = (self._small_distance(case.spec, key) for key in (0, 1))
        twin = torch_side.twin(small.config, *filled(small))
        theirs, their_others = torch_side.dropout_error(twin, case.run_of(small.config))
        holds, theirs_hold = ours <= GRADIENT_LIMIT < others, theirs <= GRADIENT_LIMIT < their_others
        known = {"pytorch_fault": DRAWN_AGAIN} if case.budget is not None and not theirs_hold else {}
        return check(
            holds and (theirs_hold or bool(known)),
            hard=True,
            jax=ours,
            pytorch=theirs,
            jax_another_seed=others,
            pytorch_another_seed=their_others,
            **known,
        )

    @lru_cache(None)  # noqa: B019 - one session a process
    def small(self) -> jax_side.Size:
        """The model on which dropout is compared."""
        c = self.size.config
        hidden = c.heads * SMALL_HEAD_DIM
        config = replace(
            c,
            hidden=hidden,
            head_dim=SMALL_HEAD_DIM,
            mlp_hidden=2 * hidden,
            max_seq=SMALL_SEQ,
            vocab_size=32,
            dropout=self.compare.dropout,
        )
        return jax_side.Size(config, 2, SMALL_SEQ)

    @lru_cache(None)  # noqa: B019 - one session a process
    def _small_distance(self, spec: str, key: int) -> float:
        return tree_distance(self._small_gradient(spec, key), self._small_gradient("none", 0))

    @lru_cache(None)  # noqa: B019 - one session a process
    def _small_gradient(self, spec: str, key: int) -> Any:
        return jax.device_get(self._small_step(spec)(*filled(self.small()), jax.random.key(key))[1])

    @lru_cache(None)  # noqa: B019 - one session a process
    def _small_step(self, spec: str) -> Any:
        step = jax_side.step(self.plan(spec, self.small()), self.small().config)
        return jax.jit(step, compiler_options=_QUICKLY)

    def frequencies(self) -> dict[str, Any]:
        """The share of values that a dropout zeroes, on each side."""
        rate = self.compare.dropout
        ours = float((dropout(np.ones(DROPPED, np.float32), jax.random.key(0), rate) == 0).mean())
        theirs = torch_side.zero_share(rate, DROPPED)
        limit = SIGMAS * (rate * (1 - rate) / DROPPED) ** 0.5
        holds = abs(ours - rate) <= limit and abs(theirs - rate) <= limit
        found = check(holds, hard=True, jax=ours, pytorch=theirs, rate=rate, limit=limit)
        return {
            "policy": "dropout",
            "pytorch": "F.dropout",
            "status": "compared",
            "checks": {"frequency": found},
        }

    def budget(self, budget: float) -> Case:
        """Blocks compiled under a budget, beside the ``budget:B`` that allows the bytes that PyTorch keeps."""
        run_of = lru_cache(None)(lambda config: Budgeted(budget, torch_side.calls(config)))
        run = run_of(self.size.config)
        torch_side.step(self.twin, run)  # compiled now, while nothing counts
        theirs = sum(torch_side.kept_bytes(self.twin, run).values())
        share = -(-jax_side.share_keeping(theirs, self.size) * SHARES // 1) / SHARES
        line = f"torch.compile(block), activation_memory_budget={budget:g}"
        return Case(f"budget:{share:.9f}", line, run_of, differs=BUDGETS_DIFFER, budget=budget)

    def _budgets(self, spec: str, budget: float) -> dict[str, Any]:
        """What a budget's row says beside its figures: each side's own reading of the same number."""
        ours = self.stack(f"budget:{budget:g}")
        return {
            "jax_spec": spec,
            "jax_own_reading": {"kept_bytes": ours.kept_bytes, "recomputed_flops": ours.recomputed_flops},
            "pytorch_whole_stack": {"kept_bytes": torch_side.budgeted_bytes(self.twin, budget)},
        }


def _always(run: Run, config: TransformerConfig) -> Run:
    return run


@lru_cache(None)
def _run_of(plan: Any, config: TransformerConfig) -> Run:
    return stack_run(plan, config.num_layers, torch_side.calls(config))


# These programs run twice: most of LLVM's work on them would not pay.
_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def filled(size: jax_side.Size) -> tuple[Any, np.ndarray, np.ndarray]:
    """Parameters of the size that training starts from, no bias zero; tokens; targets."""
    random = np.random.default_rng(0)
    draw = lambda leaf: (0.05 * random.standard_normal(leaf.shape)).astype(leaf.dtype)
    params = jax.tree.map(draw, size.params)
    tokens = random.integers(0, size.config.vocab_size, (size.batch, size.seq + 1), np.int32)
    return params, tokens[:, :-1].copy(), tokens[:, 1:].copy()


def tree_distance(tree: Any, reference: Any) -> float:
    """The norm of the difference over the norm of the reference, all leaves together."""
    pairs = list(zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True))
    return float((sum(((a - b) ** 2).sum() for a, b in pairs) / sum((b**2).sum() for _, b in pairs)) ** 0.5)
