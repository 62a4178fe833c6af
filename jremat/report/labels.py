"""Labels beside points that don't lie on one another."""

from collections.abc import Sequence
from typing import Any

# Where a label may stand from its point, the best place first: (points right, points up, side, height).
_PLACES = (
    *((7, 4, "left", "bottom"), (7, -4, "left", "top"), (-7, 4, "right", "bottom"), (-7, -4, "right", "top")),
    *((0, 8, "center", "bottom"), (0, -8, "center", "top"), (12, 14, "left", "bottom"), (12, -14, "left", "top")),
    *((-12, 14, "right", "bottom"), (-12, -14, "right", "top"), (16, 26, "left", "bottom"), (16, -26, "left", "top")),
)
_NEAR = 0.012
"""Of an axis: points nearer than this in both directions are indistinguishable, and share a label."""


def merged(
    points: Sequence[tuple[float, float, str]], spans: tuple[float, float], joint: str = "\n"
) -> list[tuple[float, float, str]]:
    """Points that a reader could not tell apart share a label, their names joined by ``joint``.

    >>> merged([(0, 0, "a"), (0.001, 0, "b"), (1, 1, "c")], (1, 1))
    [(0, 0, 'a\\nb'), (1, 1, 'c')]
    """
    found: list[tuple[float, float, str]] = []
    for x, y, label in points:
        for k, (x0, y0, names) in enumerate(found):
            if abs(x - x0) <= _NEAR * spans[0] and abs(y - y0) <= _NEAR * spans[1]:
                found[k] = x0, y0, f"{names}{joint}{label}"
                break
        else:
            found.append((x, y, label))
    return found


def place(axes: Any, points: Sequence[tuple[float, float, str]], fontsize: float = 8, joint: str = "\n") -> None:
    """Write each label where it covers no other label and no point, as near to its point as there is room."""
    if not points:
        return
    figure = axes.figure
    figure.draw_without_rendering()
    spans = abs(axes.get_xlim()[1] - axes.get_xlim()[0]), abs(axes.get_ylim()[1] - axes.get_ylim()[0])
    taken = [_around(axes.transData.transform((x, y))) for x, y, _ in points]
    frame = axes.get_window_extent()
    for x, y, label in merged(points, spans, joint):
        best = None
        for right, up, side, height in _PLACES:
            text = axes.annotate(
                label,
                (x, y),
                xytext=(right, up),
                textcoords="offset points",
                fontsize=fontsize,
                ha=side,
                va=height,
                arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": "#888"} if abs(up) > 8 else None,
            )
            box = text.get_window_extent()
            outside = not (frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1)
            covered = sum(_overlap(box, other) for other in taken) + 1e6 * outside
            if best is None or covered < best[0]:
                if best is not None:
                    best[1].remove()
                best = covered, text, box
            else:
                text.remove()
            if covered == 0:
                break
        assert best is not None
        taken.append(best[2])


def _around(point: Any) -> Any:
    from matplotlib.transforms import Bbox

    return Bbox.from_extents(point[0] - 4, point[1] - 4, point[0] + 4, point[1] + 4)


def _overlap(a: Any, b: Any) -> float:
    wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
    return wide * high if wide > 0 and high > 0 else 0.0
