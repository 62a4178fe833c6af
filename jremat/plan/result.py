"""What a planner says: the plan, its proof, and what else there was."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jremat.policy import LayerPlan, Policy, PolicyLike
from jremat.policy.made_for import MadeFor
from jremat.policy.plan_file import write


def in_units(nbytes: float) -> str:
    """Bytes for people.

    >>> in_units(3 * 2**29), in_units(2**20), in_units(1536), in_units(12)
    ('1.50 GiB', '1.0 MiB', '1.5 KiB', '12 bytes')
    """
    size = abs(nbytes)
    if size >= 2**30:
        return f"{nbytes / 2**30:.2f} GiB"
    if size >= 2**20:
        return f"{nbytes / 2**20:.1f} MiB"
    return f"{nbytes / 2**10:.1f} KiB" if size >= 2**10 else f"{nbytes:.0f} bytes"


def readable(spec: str) -> str:
    """A spec for people: without fingerprints.

    >>> readable("mix:3*9 planned values of graph 3099ac561d0f43cf,rest*full")
    'mix:3*9 values,rest*full'
    """
    return re.sub(r" planned values of graph \w+", " values", spec)


class DoesNotFit(ValueError):
    """Nothing fits the memory there is; ``leanest`` is the plan that comes nearest."""

    def __init__(self, message: str, leanest: "Plan"):
        super().__init__(message)
        self.leanest = leanest


@dataclass(frozen=True)
class Kept:
    """One value that a plan keeps in a block.

    Args:
        layers: in how many layers.
        name: the user's tag, or JAX's name of the operation that made it.
        nbytes: in one layer.
        where: ``device`` or ``host``.
        source: the user's line.
        spared: recompute, in one layer, that letting it go would add: seconds or FLOPs, as the objective.
    """

    layers: int
    name: str
    nbytes: int
    where: str
    source: str
    spared: float


@dataclass(frozen=True)
class Point:
    """One point of a frontier: no plan that was considered is both leaner and faster.

    Args:
        plan: a policy for all layers, or a plan over them.
        kept_bytes: of all layers, over what full remat keeps, on all devices.
        predicted_peak_bytes: of the whole step.
        expected_peak_bytes: the same, corrected by what the compiler said of near plans that run in the same way; what
            the compiler said of this plan where it was compiled.
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
        """Of the plan; one that keeps values without a name says how many."""
        return self.plan.spec

    def to_dict(self) -> dict[str, Any]:
        """Every figure by name, ready for JSON."""
        return {"plan": self.spec} | {k: v for k, v in vars(self).items() if k != "plan"}


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
    kept: tuple[Kept, ...]
    frontier: tuple[Point, ...]
    beside: tuple[Point, ...]
    compiles: int
    target: str
    versions: Mapping[str, str]
    shapes: tuple[str, ...]
    num_layers: int | None

    @property
    def spec(self) -> str:
        """What ``policies.get`` reads back; a plan of values without a name must be saved first.

        Raises:
            ValueError: such a plan isn't saved.
        """
        if self.policy.spec.startswith("plan:") or not self._by_value:
            return self.policy.spec
        raise ValueError("spec: this plan keeps values that bear no name; save it first: plan.save('plan.json').spec")

    @property
    def _by_value(self) -> bool:
        every = (
            [self.policy] if isinstance(self.policy, Policy) else [p for s in self.policy.segments for p in s.pattern]
        )
        return any(policy.values for policy in every)

    @property
    def recompute_share(self) -> float:
        """Matmul FLOPs done again, as a share of one forward pass through the layers."""
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
        made_for = MadeFor(self.shapes, self.num_layers, tuple(self.versions.items()))
        write(path, self.policy, made_for, **facts)
        return replace(self, policy=replace(self.policy, label=f"plan:{path}"))

    def to_dict(self) -> dict[str, Any]:
        """Every figure by name, ready for JSON."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain |= {"policy": self.policy.spec, "versions": dict(self.versions)}
        plain |= {"kept": [dataclasses.asdict(row) for row in self.kept]}
        return plain | {key: [point.to_dict() for point in plain[key]] for key in ("frontier", "beside")}

    def __str__(self) -> str:
        peak = f"{in_units(self.peak_bytes)} {self.target}" if self.peak_bytes is not None else "not compiled"
        step = f", step {self.step_seconds * 1e3:.1f} ms (modelled)" if self.step_seconds is not None else ""
        lines = [
            self.policy.spec,
            f"  peak {peak}, predicted {in_units(self.predicted_peak_bytes)}, "
            f"of {in_units(self.hbm_bytes)} less {self.margin:.0%}",
            f"  recomputes {self.recompute_share:.1%} of the layers' forward matmul FLOPs{step}",
        ]
        lines += [
            f"  keeps {k.name} ({in_units(k.nbytes * k.layers)} on the {k.where}, {k.layers} layers) {k.source}"
            for k in self.kept
        ]
        return "\n".join(lines if self.kept else [*lines, "  keeps the layers' inputs only"])
