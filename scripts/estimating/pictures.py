"""Memory against the sequence's length, a line a policy."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter, ScalarFormatter

from jremat.estimate.fit import Run
from jremat.policy import LayerPlan, Policy

_STYLES = ("-", "--", "-.", ":")


def lengths(seq: int) -> list[int]:
    """Sixteenths of a length to four times it, doubling.

    >>> lengths(1024)
    [64, 128, 256, 512, 1024, 2048, 4096]
    """
    return [n for k in range(-4, 3) if (n := seq * 2**k if k >= 0 else seq // 2**-k) >= 1]


def peaks(run: Run, chosen: Sequence[Policy | LayerPlan]) -> dict[str, list[tuple[int, int]]]:
    """(sequence, peak bytes) of each policy; lengths that the degrees don't divide are left out."""
    config = replace(run.config, max_seq=max(run.config.max_seq, 4 * run.seq))
    found: dict[str, list[tuple[int, int]]] = {}
    for policy in chosen:
        points = []
        for seq in lengths(run.seq):
            try:
                points.append((seq, replace(run, config=config, policy=policy, seq=seq).ledger().peak_bytes))
            except ValueError:
                continue
        if points:
            found[policy.spec] = points
    return found


def draw(lines: dict[str, list[tuple[int, int]]], title: str, hbm_bytes: int | None, folder: Path) -> list[Path]:
    """Draw them, as PNG and SVG."""
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    for k, (spec, points) in enumerate(sorted(lines.items(), key=lambda item: -item[1][-1][1])):
        style = _STYLES[k // 10 % len(_STYLES)]
        axes.plot([s for s, _ in points], [b / 2**30 for _, b in points], style, marker="o", markersize=3, label=spec)
    if hbm_bytes is not None:
        axes.axhline(hbm_bytes / 2**30, color="black", linewidth=1)
        axes.annotate("device memory", (0.01, hbm_bytes / 2**30), xycoords=("axes fraction", "data"), va="bottom")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("sequence, tokens")
    axes.set_ylabel("peak on one device, GiB")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [folder / f"memory-by-seq.{kind}" for kind in ("png", "svg")]
    for path in drawn:
        figure.savefig(path, dpi=150)
    plt.close(figure)
    return drawn
