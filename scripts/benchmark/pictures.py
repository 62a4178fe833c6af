"""Rows as pictures: what memory is bought with, and how it grows with the sequence."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from scripts.benchmark.table import label

Row = dict[str, Any]


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Pictures of the rows that have figures, one file each:

    ``MODEL-TARGET-bB-sS.svg``, peak memory against what it costs, a point a policy: the step's time where every policy
    ran, else the recomputed share of the model's FLOPs. ``MODEL-TARGET-bB-by-seq.svg``, peak memory against the
    sequence, a line a policy, where there is more than one sequence.
    """
    good = [row for row in rows if "peak_bytes" in row]
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for (model, target, batch, seq), group in _groups(good, "model", "target", "batch", "seq"):
        drawn.append(_save(folder, f"{model}-{target}-b{batch}-s{seq}", _trade, group))
    for (model, target, batch), group in _groups(good, "model", "target", "batch"):
        if len({row["seq"] for row in group}) > 1:
            drawn.append(_save(folder, f"{model}-{target}-b{batch}-by-seq", _by_seq, group))
    return drawn


def _groups(rows: Sequence[Row], *fields: str) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    key = lambda row: tuple(row[field] for field in fields)
    ordered = sorted(rows, key=lambda row: tuple(map(str, key(row))))
    return ((k, list(group)) for k, group in itertools.groupby(ordered, key=key))


def _trade(axes: Axes, rows: Sequence[Row]) -> None:
    ran = all("step_seconds" in row for row in rows)
    cost = lambda row: row["step_seconds"] if ran else 100 * row["recompute_flops"] / row["model_flops"]
    points = [(cost(row), row["peak_bytes"] / 2**30) for row in rows]
    axes.scatter(*zip(*points, strict=True), zorder=3)
    for point, names in _labels(rows, points).items():
        axes.annotate(names, point, xytext=(6, 5), textcoords="offset points", fontsize=8)
    axes.set_xlabel("time of a step, s" if ran else "recomputed, % of the model's FLOPs")
    axes.margins(x=0.25, y=0.15)
    axes.set_title(
        f"{rows[0]['model']}, batch {rows[0]['batch']}, {rows[0]['seq']} tokens: {label(rows[0])}", fontsize=9
    )
    _memory_axis(axes, rows)


def _labels(rows: Sequence[Row], points: Sequence[tuple[float, float]]) -> dict[tuple[float, float], str]:
    """The policies at each point; those that a reader could not tell apart share one, a line each."""
    highest = max(memory for _, memory in points)
    widest = max(max(cost for cost, _ in points), 1e-9)
    found: dict[tuple[float, float], str] = {}
    for row, (cost, memory) in zip(rows, points, strict=True):
        near = [at for at in found if abs(at[0] - cost) < widest / 100 and abs(at[1] - memory) < highest / 50]
        at = near[0] if near else (cost, memory)
        found[at] = f"{found[at]}\n{row['policy']}" if near else row["policy"]
    return found


def _by_seq(axes: Axes, rows: Sequence[Row]) -> None:
    for (policy,), group in _groups(rows, "policy"):
        line = sorted((row["seq"], row["peak_bytes"] / 2**30) for row in group)
        axes.plot(*zip(*line, strict=True), marker="o", label=policy)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("tokens in a sequence")
    axes.legend(fontsize=8)
    axes.set_title(f"{rows[0]['model']}, batch {rows[0]['batch']}: {label(rows[0])}", fontsize=9)
    _memory_axis(axes, rows)


def _memory_axis(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set_ylabel("peak memory of a device, GiB")
    axes.grid(alpha=0.3)
    room = rows[0].get("hbm_bytes")
    if room and max(row["peak_bytes"] for row in rows) > room / 4:
        axes.axhline(room / 2**30, color="black", linewidth=0.8, linestyle="--")
        axes.annotate("device memory", (1, room / 2**30), xycoords=("axes fraction", "data"), fontsize=7, ha="right")


def _save(folder: Path, name: str, draw_on: Callable[[Axes, Sequence[Row]], None], rows: Sequence[Row]) -> Path:
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    draw_on(axes, rows)
    path = folder / f"{name.replace('/', '_')}.svg"
    figure.savefig(path, metadata={"Date": None})  # or every run changes the file
    plt.close(figure)
    return path
