"""Memory against the sequence's length, a line a policy."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jremat.estimator.training_step import TrainingStep
from jremat.estimator.transformer import ledger_of
from jremat.policy import LayerPlan, Policy
from jremat.report import plots


def lengths(seq: int) -> list[int]:
    """Sixteenths of a length to four times it, doubling.

    >>> lengths(1024)
    [64, 128, 256, 512, 1024, 2048, 4096]
    """
    return [n for k in range(-4, 3) if (n := seq * 2**k if k >= 0 else seq // 2**-k) >= 1]


def peaks(run: TrainingStep, chosen: Sequence[Policy | LayerPlan]) -> dict[str, list[tuple[int, int]]]:
    """(sequence, peak bytes) of each policy; lengths that the degrees don't divide are left out."""
    config = replace(run.config, max_seq=max(run.config.max_seq, 4 * run.seq))
    found: dict[str, list[tuple[int, int]]] = {}
    for policy in chosen:
        points = []
        for seq in lengths(run.seq):
            try:
                points.append((seq, ledger_of(replace(run, config=config, policy=policy, seq=seq)).peak_bytes))
            except ValueError:
                continue
        if points:
            found[policy.spec] = points
    return found


def draw(lines: dict[str, list[tuple[int, int]]], title: str, hbm_bytes: int | None, folder: Path) -> list[Path]:
    """Draw them, as PNG and SVG."""
    return plots.by_sequence(lines, folder=folder, title=title, hbm_bytes=hbm_bytes)
