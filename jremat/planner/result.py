"""What a planner says: the plan, its proof, and what else there was."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jremat.policy import LayerPlan, Policy, PolicyLike
from jremat.policy.plan_file import write
from jremat.policy.planned_for import PlannedFor
from jremat.policy.shown import aligned, filled, human, human_flops, human_seconds, most


class DoesNotFit(ValueError):
    """Nothing fits the memory there is; ``leanest`` is the plan that comes nearest."""

    def __init__(self, message: str, leanest: "Plan"):
        super().__init__(message)
        self.leanest = leanest


@dataclass(frozen=True)
class KeptValue:
    """One value that a plan keeps in a block.

    Args:
        layers: in how many layers.
        name: the user's tag, or JAX's name of the operation that made it.
        nbytes: in one layer.
        where: ``device`` or ``host``.
        source: the user's line.
        spared: recompute, in one layer, that letting it go would add: seconds or FLOPs, as the objective.

    >>> print(KeptValue(8, "mlp_up", 2**20, "device", "model.py:7 (block)", 0.0))
    mlp_up  8.0 MiB  in 8 layers  on the device  model.py:7 (block)
    """

    layers: int
    name: str
    nbytes: int
    where: str
    source: str
    spared: float

    @property
    def cells(self) -> tuple[str, ...]:
        """Its figures for a table, of all layers."""
        layers = f"in {self.layers} layer{'s' * (self.layers != 1)}"
        return self.name, human(self.nbytes * self.layers), layers, f"on the {self.where}", self.source

    def __str__(self) -> str:
        return filled("  ".join(self.cells), "  ")

    __repr__ = __str__


@dataclass(frozen=True)
class Point:
    """One point of a frontier: no plan that was considered is both leaner and faster.

    Args:
        plan: a policy for all layers, or a plan over them.
        kept_bytes: of all layers, over what full remat keeps, on all devices.
        predicted_peak_bytes: of the whole step.
        expected_peak_bytes: the same, corrected by the compiled peaks of near plans that run in the same way; the
            compiled peak where this plan was compiled.
        recompute_seconds: modelled, of all layers; None under an objective of FLOPs.
        recompute_flops: matmuls, of all layers.
    """

    plan: Policy | LayerPlan
    kept_bytes: int
    predicted_peak_bytes: int
    expected_peak_bytes: int
    recompute_seconds: float | None
    recompute_flops: int

    @property
    def spec(self) -> str:
        """Of the plan; one that keeps values without a name, ``[dot_general+tanh+3 more]``, names the largest."""
        return self.plan.spec

    @property
    def cells(self) -> tuple[str, ...]:
        """Its figures for a table, of all devices."""
        expected = f"{human(self.expected_peak_bytes)} expected"
        seconds = "" if self.recompute_seconds is None else f" in {human_seconds(self.recompute_seconds)} modelled"
        return expected, f"recomputes {human_flops(self.recompute_flops)}{seconds}", self.spec

    def __str__(self) -> str:
        return aligned([self.cells])

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Every figure by name, ready for JSON."""
        return {"plan": self.spec} | {k: v for k, v in vars(self).items() if k != "plan"}


class Points(tuple[Point, ...]):
    """Points that print as a table."""

    def __str__(self) -> str:
        heads = ("peak of the step", "matmuls of the layers", "plan")
        return aligned([heads, *(point.cells for point in self)], right=(0,))

    __repr__ = __str__


@dataclass(frozen=True)
class Plan:
    """The best plan for a memory.

    Bytes and seconds are of one device.

    Args:
        policy: a policy of one block, or a plan over the layers.
        peak_bytes: of the whole step as compiled for ``target``; None where nothing was to be compiled.
        predicted_peak_bytes: before that, from the program alone.
        hbm_bytes: of the device.
        margin: the share of it that stays free.
        host_bytes: kept in the host's memory.
        kept_bytes: kept on the device, of all layers, over what full remat keeps.
        recompute_seconds, recompute_flops: of all layers (FLOPs on all devices); seconds are modelled, None
            under an objective of FLOPs.
        step_seconds: of the whole step, modelled; None under an objective of FLOPs.
        forward_flops: matmuls of one forward pass through the layers.
        objective: ``seconds`` or ``flops``.
        kept: what it keeps, most bytes first.
        frontier: what else there is, fastest first.
        beside: the policies that were to be considered too, under the same cost model, fitting or not.
        compiles: how many it took.
        target: what it was compiled for, as its label says.
        versions: of JAX and of what compiled.
        shapes: of the floating arrays that the block is given.
        num_layers: of the stack; None: a function without layers.
        whole_step: whether the peaks are those of a whole training step; else nothing but the function's own gradient
            is counted.
    """

    policy: PolicyLike
    peak_bytes: int | None
    predicted_peak_bytes: int
    hbm_bytes: int
    margin: float
    host_bytes: int
    kept_bytes: int
    recompute_seconds: float | None
    recompute_flops: int
    step_seconds: float | None
    forward_flops: int
    objective: str
    kept: tuple[KeptValue, ...]
    frontier: Points
    beside: Points
    compiles: int
    target: str
    versions: Mapping[str, str]
    shapes: tuple[str, ...]
    num_layers: int | None
    whole_step: bool = False

    @property
    def spec(self) -> str:
        """What ``policies.get`` reads back; a plan of values without a name must be saved first.

        Raises:
            ValueError: such a plan isn't saved.
        """
        if not self.needs_file:
            return self.policy.spec
        raise ValueError("spec: this plan keeps values that bear no name; save it first: plan.save('plan.json').spec")

    @property
    def needs_file(self) -> bool:
        """Whether it keeps values that bear no name and isn't saved yet, so that no spec says what it is."""
        every = (
            [self.policy] if isinstance(self.policy, Policy) else [p for s in self.policy.segments for p in s.pattern]
        )
        return not self.policy.spec.startswith("plan:") and any(policy.values for policy in every)

    @property
    def recompute_share(self) -> float:
        """Matmul FLOPs recomputed, as a share of one forward pass through the layers."""
        return self.recompute_flops / max(self.forward_flops, 1)

    def save(self, path: str | Path) -> "Plan":
        """Write the plan as JSON, with the shapes, layers and versions that it holds for; read back as ``plan:PATH``.

        On others ``plan:PATH`` is refused, whether it keeps values without a name or names alone. A plan of names alone
        also prints as a spec, which holds anywhere and proves nothing there.

        Returns:
            The same plan under that spec.
        """
        facts = {
            "target": self.target,
            "hbm_bytes": self.hbm_bytes,
            "peak_bytes": self.peak_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "recompute_flops": self.recompute_flops,
            "modelled_recompute_seconds": self.recompute_seconds,
        }
        planned_for = PlannedFor(self.shapes, self.num_layers, tuple(self.versions.items()))
        write(path, self.policy, planned_for, **facts)
        return replace(self, policy=replace(self.policy, label=f"plan:{path}"))

    def to_dict(self) -> dict[str, Any]:
        """Every figure by name, ready for JSON."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain |= {"policy": self.policy.spec, "versions": dict(self.versions)}
        plain |= {"kept": [dataclasses.asdict(row) for row in self.kept]}
        return plain | {key: [point.to_dict() for point in plain[key]] for key in ("frontier", "beside")}

    @property
    def not_counted(self) -> str:
        """What of a training step isn't in the peaks; empty where they are the whole step's."""
        if self.whole_step:
            return ""
        if self.num_layers is None:
            return "this function's gradient only: the optimizer's state and what is outside of it are not counted"
        return "layers only: the optimizer's state, embeddings, head and loss are not counted"

    def __str__(self) -> str:
        predicted = f"predicted {human(self.predicted_peak_bytes)}"
        compiled = "predicted, not compiled" if self.peak_bytes is None else f"{_compiled(self.target)}, {predicted}"
        peak = self.predicted_peak_bytes if self.peak_bytes is None else self.peak_bytes
        base = "the function's" if self.num_layers is None else "the layers'"
        seconds = f", {human_seconds(self.recompute_seconds)} modelled" if self.recompute_seconds is not None else ""
        figures = [
            ("plan", self.policy.spec),
            ("peak", f"{human(peak)}, {compiled}"),
            ("memory", f"{human(self.hbm_bytes)} less {self.margin:.0%}: {human(self.hbm_bytes * (1 - self.margin))}"),
            ("recompute", f"{self.recompute_share:.1%} of {base} forward matmul FLOPs{seconds}"),
        ]
        figures += [("step", f"{human_seconds(self.step_seconds)} modelled")] if self.step_seconds is not None else []
        figures += [("host", human(self.host_bytes))] if self.host_bytes else []
        figures += [("counted", self.not_counted)] if self.not_counted else []
        rows = [("keeps    " if not i else "", *k.cells) for i, k in enumerate(self.kept)]
        left = most([""] * len(rows), _ROWS, "values")[_ROWS:]
        kept = [aligned(rows[:_ROWS], right=(2,)), *left] if rows else ["keeps      the layers' inputs only"]
        return "\n".join([*_wrapped(figures), *kept])

    __repr__ = __str__


_ROWS = 12


def _wrapped(figures: Iterable[tuple[str, str]]) -> list[str]:
    indent = " " * 11
    return [filled(f"{name:<9}  {text}", indent) for name, text in figures]


def _compiled(target: str) -> str:
    return target if target.startswith("compiled") else f"compiled for {target}"
