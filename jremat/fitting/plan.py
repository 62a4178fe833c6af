"""A plan for any program, as data: its segments, what each keeps, and what they come to."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jremat.jax_internals import SCAN
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
        inside: the loops and branches in it whose bodies are planned.
        modules: the modules whose operations it begins and ends with.
    """

    start: int
    end: int
    kept: tuple[str, ...] | None
    held_bytes: int = 0
    seconds: float = 0.0
    flops: int = 0
    source: str = ""
    largest: str = ""
    inside: "tuple[PlannedInside, ...]" = ()
    modules: str = ""

    @property
    def rematted(self) -> bool:
        """Whether anything in it is."""
        return self.kept is not None or any(own.rematted for own in self.inside)


@dataclass(frozen=True)
class PlannedInside:
    """A loop or a branch, its bodies planned.

    Args:
        equation: its place.
        primitive: JAX's name of it.
        length: how often its body runs.
        group: iterations that are replayed together from the carry before them; 1: each by itself.
        bodies: the segments of each.
        held_bytes: modelled, that all iterations keep for the backward pass.
        source: the user's line.
    """

    equation: int
    primitive: str
    length: int
    group: int
    bodies: tuple[tuple[PlannedSegment, ...], ...]
    held_bytes: int = 0
    source: str = ""

    @property
    def rematted(self) -> bool:
        """Whether anything in it is."""
        return self.group > 1 or any(segment.rematted for body in self.bodies for segment in body)


@dataclass(frozen=True)
class FitPoint:
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
    frontier: tuple[FitPoint, ...] = ()

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
        again = sum(segment.rematted for segment in self.segments)
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
        rows = [row for segment in self.segments for row in _lines(segment, held, spent)]
        table = aligned(
            [("ops", "", "held", "", "recompute", "modules, lines, largest kept"), *rows], right=(0, 2, 3, 4)
        )
        return "\n".join([*(aligned([head]) for head in heads), table])

    __repr__ = __str__


def _lines(segment: PlannedSegment, held: int, spent: float, depth: int = 0) -> Iterator[tuple[str, ...]]:
    """Its line of the table, and those of the bodies inside of it, whose shares are the loop's."""
    yield (
        f"{segment.end - segment.start}",
        "  " * depth
        + ("as it is" if segment.kept is None else f"keeps {len(segment.kept)}" if segment.kept else "keeps none"),
        human(segment.held_bytes),
        f"{segment.held_bytes / held:.0%}" if not depth else "",
        f"{segment.seconds / spent:.0%}" if not depth else "",
        "  ".join(filter(None, (segment.modules, re.sub(r" \([^)]*\)", "", segment.source), segment.largest))),
    )
    for own in segment.inside:
        times = f"{own.primitive} of {own.length}" if own.primitive == SCAN else own.primitive
        groups = f", in groups of {own.group}" if own.group > 1 else ""
        yield ("", "  " * depth + times + groups, human(own.held_bytes), "", "", own.source)
        for body in own.bodies:
            for inner in body:
                yield from _lines(inner, held, spent, depth + 1)


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
            segments=tuple(map(_segment, fields["segments"])),
            frontier=tuple(FitPoint(**point) for point in fields.get("frontier", ())),
            versions=tuple((str(name), str(version)) for name, version in fields.get("versions", ())),
        )
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"plan: expected {path} to hold a plan of format {FORMAT!r}: {error}") from None


def _segment(content: dict[str, Any]) -> PlannedSegment:
    kept, inside = content["kept"], content.get("inside", ())
    read = {"kept": None if kept is None else tuple(map(str, kept)), "inside": tuple(map(_inside, inside))}
    return PlannedSegment(**(content | read))


def _inside(content: dict[str, Any]) -> PlannedInside:
    return PlannedInside(**(content | {"bodies": tuple(tuple(map(_segment, body)) for body in content["bodies"])}))
