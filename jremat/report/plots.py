"""Pictures in one style: readable in grey, as PNG and SVG, the same bytes from the same figures.

Each function takes plain data and writes ``FOLDER/NAME.png`` and ``FOLDER/NAME.svg``. The sizes are those of the axes;
a picture is as large as its legend and its labels need beside them, so that nothing is cut. Names come from users: they
are drawn as they stand, never as mathematics.
"""

import contextlib
import functools
import io
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, ScalarFormatter

from jremat.policy.files import write_whole
from jremat.report.labels import place
from jremat.report.paint import AREAS, LINES, SERIES
from jremat.terminal.text import printable

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
    "text.parse_math": False,  # a $ in a name is a dollar
    "svg.hashsalt": "jremat",  # ids of a picture's parts are random otherwise
    "svg.fonttype": "path",
    "savefig.dpi": 150,
}
WIDE = 44
"""Characters of a name in a line of a picture."""
CROWD = 12
"""Points whose names stand beside them; beside more of them stand numbers, and the names in a list."""


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
    crowded = len(named) > CROWD
    with _drawn(folder, name, (6.2, max(3.9, crowded * _high(len(named)))), title) as (axes, files):
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
        axes.margins(x=0.16, y=0.14)
        axes.set_xlim(left=-0.03 * max([x for x, _ in points] + [x for _, x in planned], default=1))
        top = max([*(y for _, y in points), *(nbytes / GIB for nbytes, _ in planned)], default=0)
        _device(axes, hbm_bytes, top)
        if planned:
            axes.add_artist(axes.legend(loc="best"))  # a second legend would take the first one's place
        labels, joint = [drawable(label) for label, _, _ in named], "\n"
        if crowded:
            numbers = [str(k) for k in range(1, len(labels) + 1)]
            keys = [f"{number}  {label}" for number, label in zip(numbers, labels)]
            _legend(axes, [Line2D([], [], linestyle="none")] * len(keys), keys, handlelength=0, handletextpad=0)
            labels, joint = numbers, ", "
        place(axes, [(x, y, label) for (x, y), label in zip(points, labels)], joint=joint)
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
    drawn = together({label: sorted(points) for label, points in lines.items()})
    entries = sum(label.count("\n") + 1 for label, _ in drawn)
    with _drawn(folder, name, (5.6, max(4.0, _high(entries))), title) as (axes, files):
        for k, (_, points) in enumerate(drawn):
            turn, place_ = divmod(k, len(SERIES))
            colour, dash, mark = SERIES[place_]
            face = ("white", colour, "#00000055")[turn % 3]
            style = {"color": colour, "linestyle": dash, "marker": mark, "markersize": 4, "markerfacecolor": face}
            tokens, nbytes = zip(*points)
            axes.plot(tokens, [b / GIB for b in nbytes], linewidth=1.4, **style)
        handles = axes.get_lines()
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("tokens in a sequence")
        axes.set_ylabel(memory)
        _device(axes, hbm_bytes, hbm_bytes / GIB if hbm_bytes else 0, side="left")
        _legend(axes, handles[: len(drawn)], [label for label, _ in drawn])
    return files


def together(lines: Mapping[str, Sequence[tuple[int, float]]]) -> list[tuple[str, Sequence[tuple[int, float]]]]:
    """Lines that coincide to the eye as one, with all their names; the highest at the end first.

    >>> together({"a": [(1, 100.0)], "b": [(1, 300.0)], "c": [(1, 100.5)]})
    [('b', [(1, 300.0)]), ('c\\na', [(1, 100.5)])]
    """
    found: list[tuple[str, Sequence[tuple[int, float]]]] = []
    for label, points in sorted(lines.items(), key=lambda item: -item[1][-1][1]):
        for k, (names, others) in enumerate(found):
            pairs = zip(points, others)
            if len(points) == len(others) and all(x == y and abs(a - b) <= 0.01 * b for (x, a), (y, b) in pairs):
                found[k] = f"{names}\n{drawable(label)}", others
                break
        else:
            found.append((drawable(label), points))
    return found


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
    labels = [drawable(label) for label, _ in bars]
    tall = max((label.count("\n") + 1 for label in labels), default=1)
    with _drawn(folder, name, (5.4, 0.6 + max(0.42, 0.17 * tall) * len(bars)), title) as (axes, files):
        names = list(dict.fromkeys(line for _, lines in bars for line, nbytes in lines if nbytes))
        rows, areas = range(len(bars)), []
        start = [0.0] * len(bars)
        for k, line in enumerate(names):
            colour, pattern = AREAS[k % len(AREAS)]
            widths = [sum(nbytes for own, nbytes in lines if own == line) / GIB for _, lines in bars]
            paint = {"color": colour, "hatch": pattern, "edgecolor": "white", "linewidth": 0.6}
            areas.append(axes.barh(rows, widths, left=start, height=0.7, **paint))
            start = [a + b for a, b in zip(start, widths)]
        for k, total in enumerate(start):
            axes.text(total, k, f" {total:.1f}", va="center", fontsize=8)
        axes.set_yticks(rows, labels)
        axes.invert_yaxis()
        axes.set_xlim(0, max([*start, 0.001]) * 1.1)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("memory of one device at its peak, GiB")
        if hbm_bytes is not None and max(start, default=0) > hbm_bytes / GIB / 4:
            axes.axvline(hbm_bytes / GIB, color="black", linewidth=0.8, linestyle="--")
        _legend(axes, areas, [drawable(line) for line in names])
    return files


def timeline(found: "Timeline", *, folder: Path, name: str = "timeline", title: str = "") -> list[Path]:
    """What is alive at each moment of a step, stacked by line; the peak marked."""
    with _drawn(folder, name, (6.6, 3.6), title) as (axes, files):
        rows = list(zip(*(values for _, values in found.lines)))
        # Where nothing changes nothing is drawn; the last moment lasts as long as any other.
        steps = [k for k in range(len(rows)) if k == 0 or rows[k] != rows[k - 1]] + [len(rows)]
        layers = [[values[min(k, len(rows) - 1)] / GIB for k in steps] for _, values in found.lines]
        paints = [LINES[line] for line, _ in found.lines]
        areas = axes.stackplot(steps, *layers, colors=[colour for colour, _ in paints], step="post")
        for area, (_, pattern) in zip(areas, paints):
            area.set_hatch({"/": "/////", "x": "xxxx", ".": "|||||", "": ""}[pattern])
            area.set_edgecolor("white")
            area.set_linewidth(0.4)
        top = found.points[found.peak_step].alive_bytes / GIB
        axes.plot([found.peak_step], [top], "v", color="black", markersize=5, clip_on=False)
        axes.annotate(f"{top:.2f} GiB", (found.peak_step, top), xytext=(6, 4), textcoords="offset points", fontsize=8)
        axes.margins(x=0)
        axes.set_ylim(0, top * 1.1)
        axes.set_xlabel("moments of the step, in program order; a loop's body stands once")
        axes.set_ylabel("alive, GiB")
        _legend(axes, areas[::-1], [line for line, _ in found.lines][::-1])
    return files


def drawable(text: str) -> str:
    """A name as a picture shows it: long ones in several lines, and characters that the font lacks spelt out.

    >>> drawable("$x_1$"), drawable("幅")
    ('$x_1$', '\\\\u5e45')
    """
    known = _letters()
    shown = "".join(c if ord(c) in known else c.encode("unicode_escape").decode() for c in printable(text))
    lines = [""]
    for part in re.findall(rf"[^,;+ ]{{1,{WIDE}}}[,;+ ]*|[,;+ ]+", shown):  # a list breaks at its commas
        if lines[-1] and len(lines[-1] + part) > WIDE:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


@functools.cache
def _letters() -> frozenset[int]:
    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def _high(entries: int) -> float:
    """Inches of a legend of so many lines."""
    return 0.158 * entries


def _legend(axes: Any, handles: Sequence[Any], labels: Sequence[str], **options: Any) -> None:
    """A legend beside the axes. Matplotlib leaves out labels that begin with an underscore, so they are set later."""
    numbers = [str(k) for k in range(len(labels))]
    legend = axes.legend(handles, numbers, loc="upper left", bbox_to_anchor=(1.01, 1), **options)
    for text, label in zip(legend.get_texts(), labels):
        text.set_text(label)


@contextlib.contextmanager
def _drawn(folder: Path, name: str, size: tuple[float, float], title: str) -> Iterator[tuple[Any, list[Path]]]:
    """Axes of a size in the one style, under a title; on leaving, the files."""
    files: list[Path] = []
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_title("\n".join(textwrap.wrap(drawable(title).replace("\n", ""), int(13 * size[0]))))
        yield axes, files
        folder.mkdir(parents=True, exist_ok=True)
        stem = name.replace("/", "_")
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
            path = folder / f"{stem}.{kind}"
            drawn = io.BytesIO()
            # No dates and versions: the same figures, same file. Tight: as large as what stands beside the axes.
            figure.savefig(drawn, format=kind, metadata=metadata, bbox_inches="tight")
            write_whole(path, drawn.getvalue())
            files.append(path)


def _device(axes: Any, hbm_bytes: float | None, top_gib: float, side: str = "right") -> None:
    """Device memory as a line, where the picture comes near it."""
    if hbm_bytes is not None and top_gib >= hbm_bytes / GIB / 4:
        axes.axhline(hbm_bytes / GIB, color="black", linewidth=0.8, linestyle="--")
        at = (0.99 if side == "right" else 0.01, hbm_bytes / GIB)
        axes.annotate("device memory", at, xycoords=("axes fraction", "data"), ha=side, va="bottom", fontsize=8)
