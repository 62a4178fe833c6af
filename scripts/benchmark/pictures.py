"""Rows as pictures: what memory is bought with, and how it grows with the sequence."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jremat.report import plots
from scripts.benchmark.table import label

Row = dict[str, Any]


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Pictures of the rows that have figures, as PNG and SVG:

    ``MODEL-TARGET-bB-sS``, peak memory against what it costs, a point a policy: the step's time where every policy ran,
    else the recomputed share of the model's FLOPs. ``MODEL-TARGET-bB-by-seq``, peak memory against the sequence, a line
    a policy, where there is more than one sequence.
    """
    good = [row for row in rows if "peak_bytes" in row]
    drawn = []
    for (model, target, batch, seq), group in _groups(good, "model", "target", "batch", "seq"):
        drawn += _trade(group, folder, f"{model}-{target}-b{batch}-s{seq}")
    for (model, target, batch), group in _groups(good, "model", "target", "batch"):
        if len({row["seq"] for row in group}) > 1:
            drawn += _by_seq(group, folder, f"{model}-{target}-b{batch}-by-seq")
    return drawn


def _groups(rows: Sequence[Row], *fields: str) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    key = lambda row: tuple(row[field] for field in fields)
    ordered = sorted(rows, key=lambda row: tuple(map(str, key(row))))
    return ((k, list(group)) for k, group in itertools.groupby(ordered, key=key))


def _trade(rows: Sequence[Row], folder: Path, name: str) -> list[Path]:
    ran, first = all("step_seconds" in row for row in rows), rows[0]
    cost = lambda row: row["step_seconds"] if ran else 100 * row["recompute_flops"] / row["model_flops"]
    return plots.frontier(
        [(row["policy"], row["peak_bytes"], cost(row)) for row in rows],
        folder=folder,
        name=name,
        title=f"{first['model']}, batch {first['batch']}, {first['seq']} tokens: {label(first)}",
        cost="time of a step, s" if ran else "recomputed, % of the model's FLOPs",
        memory="peak memory of a device, GiB",
        hbm_bytes=first.get("hbm_bytes"),
    )


def _by_seq(rows: Sequence[Row], folder: Path, name: str) -> list[Path]:
    first = rows[0]
    return plots.by_sequence(
        {policy: [(row["seq"], row["peak_bytes"]) for row in group] for (policy,), group in _groups(rows, "policy")},
        folder=folder,
        name=name,
        title=f"{first['model']}, batch {first['batch']}: {label(first)}",
        memory="peak memory of a device, GiB",
        hbm_bytes=first.get("hbm_bytes"),
    )
