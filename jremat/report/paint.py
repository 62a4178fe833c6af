"""One palette for pictures and pages: neighbours differ in lightness, lines in dash and mark, areas in hatch."""

LINES: dict[str, tuple[str, str]] = {
    "arguments": ("#27374d", ""),
    "optimizer state": ("#8fa6c4", "/"),
    "results": ("#4b5f7a", "x"),
    "gradients": ("#b9583e", ""),
    "weights, cast": ("#e3d5c0", "x"),
    "kept for the backward pass": ("#f1bc57", ""),
    "logits and loss": ("#6f8f4e", "."),
    "recomputed": ("#f6e7c4", "/"),
    "work of the moment": ("#4f9d94", "."),
    "workspace": ("#cfd4da", "x"),
    "other": ("#9aa1ab", ""),
}
"""Colour and hatch (``/`` strokes, ``x`` crossed, ``.`` dots) of each line of a timeline."""

SERIES: tuple[tuple[str, str, str], ...] = tuple(
    (colour, dash, mark)
    for dash, colours in (
        ("-", ("#1f3552", "#b9583e", "#3d8f86", "#8a6d1a", "#6b4a86")),
        ("--", ("#4f79b0", "#d98a6f", "#67b5ab", "#c9a63a", "#9d80b8")),
        (":", ("#27374d", "#8c3f2a", "#2c6b64", "#6b5410", "#4d3361")),
    )
    for colour, mark in zip(colours, "osD^v", strict=True)
)
"""Colour, dash and mark of each line among several; no two are alike in grey."""

AREAS: tuple[tuple[str, str], ...] = (
    *(("#27374d", ""), ("#8fa6c4", "////"), ("#b9583e", ""), ("#f1bc57", "||||"), ("#4f9d94", ""), ("#e3d5c0", "xxxx")),
    *(
        ("#6b4a86", ""),
        ("#cfd4da", "\\\\\\\\"),
        ("#6f8f4e", ""),
        ("#f6e7c4", "----"),
        ("#4b5f7a", ""),
        ("#9aa1ab", "++++"),
    ),
)
"""Colour and hatch of each area among several, one after the other."""
