"""Pictures in one style: readable in grey, as PNG and SVG, the same bytes from the same figures.

Each function takes plain data and writes ``FOLDER/NAME.png`` and ``FOLDER/NAME.svg``.
"""

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from jremat.policy.files import write_whole
from jremat.report.labels import place
from jremat.report.paint import AREAS, LINES, SERIES

if TYPE_CHECKING:
    from jremat.report.timeline import Timeline  # which loads JAX

GIB = 2**30
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that every machine draws alike
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "hatch.color": "#00000066",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "jremat",  # ids of a picture's parts are random otherwise
    "svg.fonttype": "path",
    "savefig.dpi": 150,
}


def frontier(
    named: Sequence[tuple[str, float, float]],
    planned: Sequence[tuple[float, float]] = (),
    *,
    folder: Path,
    name: str = "frontier",
    title: str = "",
    cost: str = "modelled recompute, s",
    memory: str = "peak memory, GiB",
    hbm_bytes: float | None = None,
) -> list[Path]:
    """What memory is bought with: a point a policy, and the line that a planner found.

    Args:
        named: (label, bytes, cost) of policies.
        planned: (bytes, cost) of the frontier, in any order; none for no line.
        folder, name: where to.
        title: above it.
        cost, memory: what the axes say.
        hbm_bytes: device memory, as a line, where the points come near it.

    Returns:
        The files.
    """
    with _drawn(folder, name, (7.2, 4.6)) as (axes, files):
        points = [(seconds, nbytes / GIB) for _, nbytes, seconds in named]
        if planned:
            # Between two plans nothing is known: the frontier is a staircase.
            stairs = sorted((seconds, nbytes / GIB) for nbytes, seconds in planned)
            axes.step(*zip(*stairs), where="post", color="#b9583e", linewidth=1.4, label="planned", zorder=2)
            axes.plot(*zip(*stairs), "o", color="#b9583e", markersize=2.5, zorder=2)
        if points:
            label = "named policies" if planned else None
            axes.scatter(
                *zip(*points), s=34, facecolor="white", edgecolor="#1f3552", linewidth=1.4, zorder=3, label=label
            )
        axes.set_xlabel(cost)
        axes.set_ylabel(memory)
        axes.set_title(title)
        axes.margins(x=0.16, y=0.14)
        axes.set_xlim(left=-0.03 * max([x for x, _ in points] + [x for _, x in planned], default=1))
        top = max([*(y for _, y in points), *(nbytes / GIB for nbytes, _ in planned)], default=0)
        _device(axes, hbm_bytes, top)
        if planned:
            axes.legend(loc="best")
        place(axes, [(x, y, label) for (x, y), (label, _, _) in zip(points, named)])
    return files


def by_sequence(
    lines: Mapping[str, Sequence[tuple[int, float]]],
    *,
    folder: Path,
    name: str = "memory-by-seq",
    title: str = "",
    memory: str = "peak on one device, GiB",
    hbm_bytes: float | None = None,
) -> list[Path]:
    """Memory against the sequence's length, a line a policy, both axes logarithmic.

    Args:
        lines: (tokens, bytes) of each policy.
        folder, name, title, memory, hbm_bytes: as of ``frontier``.
    """
    with _drawn(folder, name, (8.2, 4.8)) as (axes, files):
        ordered = sorted(lines.items(), key=lambda item: -item[1][-1][1])
        for k, (label, points) in enumerate(ordered):
            colour, dash, mark = SERIES[k % len(SERIES)]
            tokens, nbytes = zip(*sorted(points))
            style = {"color": colour, "linestyle": dash, "marker": mark, "markersize": 4, "markerfacecolor": "white"}
            axes.plot(tokens, [b / GIB for b in nbytes], label=label, linewidth=1.4, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("tokens in a sequence")
        axes.set_ylabel(memory)
        axes.set_title(title)
        _device(axes, hbm_bytes, hbm_bytes / GIB if hbm_bytes else 0, side="left")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return files


def ledger_bars(
    bars: Sequence[tuple[str, Sequence[tuple[str, float]]]],
    *,
    folder: Path,
    name: str = "ledger",
    title: str = "",
    hbm_bytes: float | None = None,
) -> list[Path]:
    """The lines of a ledger as one bar a policy.

    Args:
        bars: (label, ((line, bytes), ...)) of each, top to bottom; equal lines bear equal paint.
        folder, name, title, hbm_bytes: as of ``frontier``.
    """
    with _drawn(folder, name, (8.2, 1.5 + 0.42 * len(bars))) as (axes, files):
        names = list(dict.fromkeys(line for _, lines in bars for line, nbytes in lines if nbytes))
        labels = [label for label, _ in bars]
        start = [0.0] * len(bars)
        for k, line in enumerate(names):
            colour, pattern = AREAS[k % len(AREAS)]
            widths = [sum(nbytes for own, nbytes in lines if own == line) / GIB for _, lines in bars]
            paint = {"color": colour, "hatch": pattern, "edgecolor": "white", "linewidth": 0.6}
            axes.barh(labels, widths, left=start, label=line, height=0.7, **paint)
            start = [a + b for a, b in zip(start, widths)]
        for k, total in enumerate(start):
            axes.text(total, k, f" {total:.1f}", va="center", fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, max([*start, 0.001]) * 1.1)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("memory of one device at its peak, GiB")
        axes.set_title(title)
        if hbm_bytes is not None and max(start, default=0) > hbm_bytes / GIB / 4:
            axes.axvline(hbm_bytes / GIB, color="black", linewidth=0.8, linestyle="--")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return files


def timeline(found: "Timeline", *, folder: Path, name: str = "timeline", title: str = "") -> list[Path]:
    """What is alive at each moment of a step, stacked by line; the peak marked."""
    with _drawn(folder, name, (9.2, 4.2)) as (axes, files):
        rows = list(zip(*(values for _, values in found.lines)))
        # Where nothing changes nothing is drawn; the last moment lasts as long as any other.
        steps = [k for k in range(len(rows)) if k == 0 or rows[k] != rows[k - 1]] + [len(rows)]
        layers = [[values[min(k, len(rows) - 1)] / GIB for k in steps] for _, values in found.lines]
        paints = [LINES[line] for line, _ in found.lines]
        areas = axes.stackplot(steps, *layers, colors=[colour for colour, _ in paints], step="post")
        for area, (line, _), (_, pattern) in zip(areas, found.lines, paints):
            area.set_hatch({"/": "/////", "x": "xxxx", ".": "|||||", "": ""}[pattern])
            area.set_edgecolor("white")
            area.set_linewidth(0.4)
            area.set_label(line)
        top = found.points[found.peak_step].alive_bytes / GIB
        axes.plot([found.peak_step], [top], "v", color="black", markersize=5, clip_on=False)
        axes.annotate(f"{top:.2f} GiB", (found.peak_step, top), xytext=(6, 4), textcoords="offset points", fontsize=8)
        axes.margins(x=0)
        axes.set_ylim(0, top * 1.1)
        axes.set_xlabel("moments of the step, in program order; a loop's body stands once")
        axes.set_ylabel("alive, GiB")
        axes.set_title(title)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1, 1))
    return files


@contextlib.contextmanager
def _drawn(folder: Path, name: str, size: tuple[float, float]) -> Iterator[tuple[Any, list[Path]]]:
    """Axes in the one style; on leaving, the files."""
    files: list[Path] = []
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure.subplots(), files
        folder.mkdir(parents=True, exist_ok=True)
        stem = name.replace("/", "_")
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
            path = folder / f"{stem}.{kind}"
            drawn = io.BytesIO()
            figure.savefig(drawn, format=kind, metadata=metadata)  # no dates and versions: the same figures, same file
            write_whole(path, drawn.getvalue())
            files.append(path)


def _device(axes: Any, hbm_bytes: float | None, top_gib: float, side: str = "right") -> None:
    """Device memory as a line, where the picture comes near it."""
    if hbm_bytes is not None and top_gib >= hbm_bytes / GIB / 4:
        axes.axhline(hbm_bytes / GIB, color="black", linewidth=0.8, linestyle="--")
        at = (0.99 if side == "right" else 0.01, hbm_bytes / GIB)
        axes.annotate("device memory", at, xycoords=("axes fraction", "data"), ha=side, va="bottom", fontsize=8)
