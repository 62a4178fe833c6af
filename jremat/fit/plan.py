"""A plan for any program, as data: its segments, what each keeps, and what they come to."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jremat.policy.files import read_json, write_whole
from jremat.policy.messages import shown
from jremat.policy.shown import aligned, human, human_flops, human_seconds

FORMAT = "jremat-fit-1"


@dataclass(frozen=True)
class PlannedSegment:
    """Consecutive equations of a program under one decision.

    Args:
        start, end: of its equations, calls entered; the second exclusive.
        kept: ids of the values that are kept of it; None: it is left as it is.
        held_bytes: modelled, that it adds to what is alive until its backward pass.
        seconds: modelled recompute, in the unit of the cost.
        flops: of recomputed matmuls.
        source: the user's lines that it begins and ends with.
        largest: names and bytes of the largest values kept.
    """

    start: int
    end: int
    kept: tuple[str, ...] | None
    held_bytes: int = 0
    seconds: float = 0.0
    flops: int = 0
    source: str = ""
    largest: str = ""


@dataclass(frozen=True)
class Point:
    """One point of a frontier.

    Args:
        expected_peak_bytes: of the whole step, predicted, corrected by what the compiler said of near plans.
        seconds: modelled recompute, in the unit of the cost.
        flops: of recomputed matmuls.
        segments: how many are rematted.
    """

    expected_peak_bytes: int
    seconds: float
    flops: int
    segments: int


@dataclass(frozen=True)
class FitPlan:
    """Which segments of a program are rematted, and what each keeps.

    Args:
        fingerprint: of the program.
        segments: all of its equations, in order.
        peak_bytes: of the step, compiled; None where nothing was compiled.
        predicted_peak_bytes: before that.
        hbm_bytes, margin: the memory that it was made for, and the share of it to leave free.
        objective: ``seconds`` or ``flops``, the unit of the segments' ``seconds``.
        base_seconds: modelled, of the function's forward and backward pass without recompute.
        target: compiled for.
        versions: of JAX and of what compiled.
        compiles: how many it took.
        frontier: what else there was, fastest first.
    """

    fingerprint: str
    segments: tuple[PlannedSegment, ...]
    peak_bytes: int | None = None
    predicted_peak_bytes: int = 0
    hbm_bytes: int = 0
    margin: float = 0.0
    objective: str = "seconds"
    base_seconds: float = 0.0
    target: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    compiles: int = 0
    frontier: tuple[Point, ...] = ()

    @property
    def seconds(self) -> float:
        """Modelled recompute of all segments, in the unit of the cost."""
        return sum(segment.seconds for segment in self.segments)

    @property
    def overhead(self) -> float:
        """Modelled recompute as a share of the function's forward and backward pass."""
        return self.seconds / self.base_seconds if self.base_seconds else 0.0

    @property
    def recompute_flops(self) -> int:
        """Matmul FLOPs that are run again."""
        return sum(segment.flops for segment in self.segments)

    def save(self, path: str | Path) -> None:
        """Write it as JSON, which ``jremat.fit(..., plan=PATH)`` reads back.

        Args:
            path: of the file, overwritten.

        Raises:
            OSError: it can't be written.
        """
        write_whole(path, json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n")

    def __str__(self) -> str:
        peak = self.predicted_peak_bytes if self.peak_bytes is None else self.peak_bytes
        how = "predicted, not compiled" if self.peak_bytes is None else f"{self.target}, {self.compiles} compiled"
        again = sum(segment.kept is not None for segment in self.segments)
        extra = human_flops(self.recompute_flops)
        if self.objective == "seconds":
            extra = (
                f"{human_seconds(self.seconds)} modelled, {self.overhead:.1%} of the function's {_step(self)}; {extra}"
            )
        heads = [
            (
                "peak",
                human(peak),
                f"of {human(self.hbm_bytes)} less {self.margin:.0%}; {how}" if self.hbm_bytes else how,
            ),
            ("recompute", extra),
            ("segments", f"{len(self.segments)}, {again} of them under remat"),
        ]
        held, spent = sum(s.held_bytes for s in self.segments) or 1, self.seconds or 1.0
        rows = [
            (
                f"{segment.end - segment.start}",
                "as it is" if segment.kept is None else f"keeps {len(segment.kept)}" if segment.kept else "keeps none",
                human(segment.held_bytes),
                f"{segment.held_bytes / held:.0%}",
                f"{segment.seconds / spent:.0%}",
                "  ".join(filter(None, (segment.source, segment.largest))),
            )
            for segment in self.segments
        ]
        table = aligned([("ops", "", "held", "", "recompute", "lines, largest kept"), *rows], right=(0, 2, 3, 4))
        return "\n".join([*(aligned([head]) for head in heads), table])

    __repr__ = __str__


def _step(plan: FitPlan) -> str:
    return human_seconds(plan.base_seconds)


def load(path: str | Path) -> FitPlan:
    """A plan from its file.

    Raises:
        ValueError: the file can't be read, isn't JSON or isn't such a plan.
    """
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else content
        raise ValueError(f"plan: expected {path} to be a file of format {FORMAT!r}, got {shown(found)}")
    try:
        fields = {key: value for key, value in content.items() if key != "format"}
        plan = FitPlan(**fields)
        return replace(
            plan,
            segments=tuple(PlannedSegment(**_segment(segment)) for segment in fields["segments"]),
            frontier=tuple(Point(**point) for point in fields.get("frontier", ())),
            versions=tuple((str(name), str(version)) for name, version in fields.get("versions", ())),
        )
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"plan: expected {path} to hold a plan of format {FORMAT!r}: {error}") from None


def _segment(content: dict[str, Any]) -> dict[str, Any]:
    kept = content["kept"]
    return content | {"kept": None if kept is None else tuple(map(str, kept))}
