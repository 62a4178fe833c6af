"""Pictures: the same bytes twice, no labels on one another, and told apart without colour."""

import colorsys
import html
import itertools
import re
import warnings

import pytest
from matplotlib.figure import Figure

from jremat.report import paint, plots
from jremat.report.labels import place
from jremat.report.timeline import Timeline, TimelinePoint

NAMED = [("none", 5e9, 0.0), ("full", 2e9, 0.01), ("selective", 3e9, 0.004)]
PLANNED = [(4e9, 0.001), (1.8e9, 0.009), (2.5e9, 0.003)]
LINE = Timeline(
    peak_bytes=3,
    peak_step=1,
    points=tuple(TimelinePoint(n, "forward", "sin", "", "", 0) for n in (1, 3, 2)),
    lines=(("arguments", (1, 1, 1)), ("work of the moment", (0, 2, 1))),
    buffers=(),
    untold=0,
    assumptions=(),
)
DRAW = {
    "frontier": lambda folder: plots.frontier(NAMED, PLANNED, folder=folder, name="p", title="t", hbm_bytes=6e9),
    "named alone": lambda folder: plots.frontier(NAMED, folder=folder, name="p"),
    "by sequence": lambda folder: plots.by_sequence({"none": [(1, 2e9), (2, 4e9)]}, folder=folder, name="p"),
    "ledger": lambda folder: plots.ledger_bars([("none", [("weights", 1e9), ("kept", 2e9)])], folder=folder, name="p"),
    "timeline": lambda folder: plots.timeline(LINE, folder=folder, name="p"),
}


@pytest.mark.parametrize("kind", DRAW)
def test_a_picture_is_drawn_as_png_and_svg_the_same_each_time(kind, tmp_path):
    first, again = (DRAW[kind](tmp_path / name) for name in ("first", "again"))
    assert [path.name for path in first] == ["p.png", "p.svg"]
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert first[0].read_bytes().startswith(b"\x89PNG") and b"Software" not in first[0].read_bytes()
    svg = first[1].read_text()
    assert "<svg" in svg and "<dc:date>" not in svg and "Matplotlib v" not in svg


def test_a_frontier_shows_every_policy_and_the_planned_line(tmp_path):
    _, svg = DRAW["frontier"](tmp_path)
    text = svg.read_text()  # matplotlib writes each text into a comment beside its outline
    assert all(f"<!-- {name} -->" in text for name, *_ in NAMED)
    assert "<!-- planned -->" in text and "<!-- device memory -->" in text


def test_the_bars_of_a_ledger_are_as_long_as_its_lines(tmp_path):
    bars = [("a", [("weights", 2**30), ("kept", 2**31)]), ("b", [("kept", 2**30)])]
    _, svg = plots.ledger_bars(bars, folder=tmp_path)
    assert re.findall(r"<!--  ([\d.]+) -->", svg.read_text()) == ["3.0", "1.0"]


def lightness(colour: str) -> float:
    return colorsys.rgb_to_hls(*(int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)))[1]


def test_lines_and_areas_are_told_apart_without_colour():
    assert len({(dash, mark) for _, dash, mark in paint.SERIES}) == len(paint.SERIES)
    for areas in (list(paint.LINES.values()), list(paint.AREAS)):
        for (colour, hatch), (other, pattern) in itertools.pairwise(areas):
            assert hatch != pattern or abs(lightness(colour) - lightness(other)) > 0.1


def test_labels_of_crowded_points_cover_no_other_label():
    figure = Figure(figsize=(7, 5))
    axes = figure.subplots()
    points = [(x / 10, y / 10, f"policy {x} {y}") for x in range(3) for y in range(3)]
    axes.scatter(*zip(*[(x, y) for x, y, _ in points], strict=True))
    place(axes, points)
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 9
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


ODD = ["$x_1$", "_hidden", "$\\frac{1}{", "[b]bold[/b]", "a\nb", "\x1b[31m", "幅", "<!-- -->", "\ud800", "x" * 90]
OF_NAMES = {
    "frontier": lambda names, folder: plots.frontier(
        [(name, 2e9 + 1e8 * k, k) for k, name in enumerate(names)], PLANNED, folder=folder, name="p", title=names[0]
    ),
    "by sequence": lambda names, folder: plots.by_sequence(
        {name: [(1, 1e9 * (k + 1)), (2, 2e9 * (k + 1))] for k, name in enumerate(names)}, folder=folder, name="p"
    ),
    "ledger": lambda names, folder: plots.ledger_bars(
        [(name, [(name, 1e9), ("_kept", 2e9)]) for name in names], folder=folder, name="p", title=names[0]
    ),
}


@pytest.mark.parametrize("kind", OF_NAMES)
@pytest.mark.parametrize("names", [ODD, [f"policy_{k}" for k in range(50)]], ids=["odd", "many"])
def test_every_name_is_drawn_as_it_stands_and_nothing_is_cut(kind, names, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, svg = OF_NAMES[kind](names, tmp_path)
    text = html.unescape(svg.read_text())
    wanted = [re.sub("--", "- -", line) for name in names for line in plots.drawable(name).split("\n")]
    for line in wanted:
        assert re.search(rf"(<!-- |\n|  ){re.escape(line)}( -->|\n)", text), line
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text).groups())
    for x, y in re.findall(r"translate\(([\d.-]+) ([\d.-]+)\) scale", text):
        assert -1 <= float(x) <= width and -1 <= float(y) <= height


def test_lines_that_coincide_share_a_name_and_no_two_others_look_alike():
    lines = {f"policy_{k}": [(1, 1e9 * (k + 1)), (2, 3e9 * (k + 1))] for k in range(40)}
    found = plots.together(lines | {"twin": lines["policy_39"]})
    assert len(found) == 40 and found[0][0] == "policy_39\ntwin"
    assert len({(k % len(paint.SERIES), k // len(paint.SERIES) % 3) for k in range(40)}) == 40
