"""An explanation as one page: tables, and a chart of what is alive at each moment, in one file."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape as escape_html
from importlib.resources import files
from string import Template
from typing import Any

from jremat.report import paint
from jremat.report.changes import changes
from jremat.report.explain import ExplainedValue, Explanation
from jremat.report.explained import FATE_WORDS, by_segment, is_small, needed, shape_text
from jremat.report.timeline import LINES, Timeline, peak_line, thinned
from jremat.terminal.tables import changed, human, human_flops
from jremat.terminal.text import printable

MOST_MOMENTS = 1500
"""Moments that a chart shows: a step of more shows the fullest among neighbours."""
TABLE_MOMENTS = 240
"""Moments in the table beside a chart, the ones where most is alive."""
MOST_ROWS = 800
"""Values that get a row each, the ones with most bytes or FLOPs."""


@dataclass(frozen=True)
class PolicyView:
    """One function under one policy, as it is shown.

    Args:
        found: its values.
        timeline: of its step.
    """

    found: Explanation
    timeline: Timeline

    @property
    def name(self) -> str:
        """The policy's."""
        return self.found.policy or "as it is"


def page(title: str, view: PolicyView, against: PolicyView | None = None, findings: Sequence[Any] = ()) -> str:
    """The page as text.

    Args:
        title: what is explained.
        view: under the policy asked for.
        against: under another one, to compare.
        findings: of ``jremat.lint``.
    """
    shown = [replace(one, timeline=thinned(one.timeline, MOST_MOMENTS)) for one in (view, against) if one]
    home = files("jremat.report")
    part = {name: (home / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")}
    return Template(part["page.html"]).substitute(
        title=escape(title),
        subtitle=f"under <code>{escape(view.name)}</code>"
        + (f", against <code>{escape(against.name)}</code>" if against else ""),
        style=part["page.css"].strip(),
        script=part["page.js"].strip(),
        cards=_cards(view),
        timelines="".join(_timeline(one, k) for k, one in enumerate(shown)),
        values=_values(view.found),
        segments=_segments(view.found),
        changes=_changes(view.found, against.found) if against else "",
        findings=_findings(findings),
        notes=_notes(view.timeline),
        data=_json({"lines": LINES, "paint": paint.LINES, "timelines": [one.timeline.to_dict() for one in shown]}),
    )


def escape(text: str) -> str:
    """A name as text of the page: no markup, and no control character."""
    return escape_html(printable(text))


def _json(figures: Any) -> str:
    """Text that can't close its own script element."""
    return json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c")


def _cards(view: PolicyView) -> str:
    found, timeline = view.found, view.timeline
    share = (
        f"{found.recompute_flops / found.forward_flops:.1%} of the forward's matmul FLOPs"
        if found.forward_flops
        else ""
    )
    cards = [
        (human(timeline.peak_bytes), f"predicted peak: {peak_line(timeline)}"),
        (human(found.kept_bytes), f"kept for the backward pass, {len(found.of('kept'))} values"),
        (human_flops(found.recompute_flops), f"recomputed{f', {share}' if share else ''}"),
    ]
    if found.offloaded_bytes:
        cards.insert(2, (human(found.offloaded_bytes), "in the host's memory"))
    items = "".join(f"<li><b>{escape(figure)}</b><span>{escape(text)}</span></li>" for figure, text in cards)
    return f'<ul class="cards">{items}</ul>'


def _timeline(view: PolicyView, index: int) -> str:
    timeline, name = view.timeline, escape(view.name)
    last = max(len(timeline.points) - 1, 0)
    return f"""
<section aria-labelledby="timeline-{index}">
<h2 id="timeline-{index}">What is alive at each moment under <code>{name}</code></h2>
<div class="timeline">
<div class="chart" tabindex="0" role="slider" aria-label="Moment of the step under {name}" aria-valuemin="0"
 aria-valuemax="{last}" aria-valuenow="{timeline.peak_step}" aria-orientation="horizontal"
 aria-describedby="keys-{index}"></div>
<p class="keys" id="keys-{index}"><kbd>←</kbd> <kbd>→</kbd> a moment, with <kbd>Shift</kbd> or <kbd>Page</kbd> ten;
<kbd>Home</kbd> <kbd>End</kbd> the ends; <kbd>P</kbd> the peak. <button type="button">Go to the peak</button></p>
<div class="below">
<div><p class="now"></p>
<table class="legend"><caption>Alive then, by line</caption><tbody></tbody></table></div>
<div class="scroll"><table class="alive"><caption>The largest values alive then</caption>
{_head(("value", ""), ("bytes", "n"), ("line", ""), ("source", ""))}<tbody></tbody></table></div>
</div>
{_moments(timeline)}
</div>
</section>
"""


def _moments(timeline: Timeline) -> str:
    """The chart as a table, for those who don't see it."""
    names = [name for name, _ in timeline.lines]
    order = sorted(range(len(timeline.points)), key=lambda k: -timeline.points[k].alive_bytes)
    rows = []
    for k in sorted(order[:TABLE_MOMENTS]):
        point = timeline.points[k]
        what = f"{point.operation}{f' of {point.place}' if point.place else ''}"
        cells = [_cell(human(values[k]) if values[k] else "–", "n") for _, values in timeline.lines]
        rows.append(
            f'<tr><th scope="row" class="n">{k}</th>{_cell(point.phase)}{_cell(what)}'
            f"{_cell(human(point.alive_bytes), 'n')}{''.join(cells)}</tr>"
        )
    left = len(timeline.points) - len(rows)
    note = f", the {len(rows)} where most is alive" if left else ""
    heads = _head(("moment", "n"), ("phase", ""), ("operation", ""), ("alive", "n"), *((name, "n") for name in names))
    table = f"<table><caption>Bytes alive at each moment{note}</caption>{heads}<tbody>{''.join(rows)}</tbody></table>"
    return f"<details><summary>The same as a table</summary><div class='scroll'>{table}</div></details>"


def _values(found: Explanation) -> str:
    plan = any(row.layers for row in found)
    held = max(found.kept_bytes + found.offloaded_bytes, 1)
    heads = _head(
        ("value", ""),
        *([("layers", "")] if plan else []),
        ("fate", ""),
        ("shape", ""),
        ("bytes", "n"),
        ("share", ""),
        ("again", "n"),
        ("source", ""),
        ("why", ""),
    )
    bodies = []
    every = sorted(found.of(*FATE_WORDS), key=lambda row: (row.fetched, -row.recompute_flops, -row.bytes))
    view = set(map(id, every[:MOST_ROWS]))
    for part, group in itertools.groupby(found.of(*FATE_WORDS), key=lambda row: row.part):
        rows = list(group)
        total = sum(row.bytes for row in rows if row.fate != "recomputed")
        again = sum(row.recompute_flops for row in rows)
        blank = f'<td colspan="{3 if plan else 2}"></td>'
        sums = f"{_cell(human(total) if total else '', 'n')}{_bar(total, held)}{_cell(_cost(again), 'n')}"
        head = f'<tr><th scope="rowgroup">{escape(part)}</th>{blank}{sums}<td colspan="2"></td></tr>'
        shown = "".join(_row(row, held, plan) for row in rows if id(row) in view)
        left = sum(id(row) not in view for row in rows)
        more = f'<tr><td class="value" colspan="{9 if plan else 8}">and {left} smaller</td></tr>' if left else ""
        bodies.append(f'<tbody class="part">{head}{shown}{more}</tbody>')
    return f'<div class="scroll"><table>{heads}{"".join(bodies)}</table></div>'


def _row(row: ExplainedValue, held: int, plan: bool) -> str:
    kept = row.fate != "recomputed"
    small = " small" if is_small(row, held) else ""
    readers = f"; for {needed(row.read_by)}" if row.read_by else ""
    title = f' title="{escape("; ".join(row.read_by))}"' if row.read_by else ""
    return (
        f'<tr class="{row.fate}{small}"><td class="value">{escape(row.value)}</td>'
        + (_cell(row.layers) if plan else "")
        + f'<td><span class="fate {row.fate}">{FATE_WORDS[row.fate]}</span></td>'
        + f"<td><code>{escape(shape_text(row))}</code></td>"
        + _cell(human(row.bytes) if kept else "", "n")
        + (_bar(row.bytes, held) if kept else "<td></td>")
        + _cell(_cost(row.recompute_flops), "n")
        + _line(row.source)
        + f'<td class="why"{title}>{escape(row.why + readers if kept else "")}</td></tr>'
    )


def _bar(part: int, whole: int) -> str:
    share = part / whole
    bar = f'<span class="percent">{share:.1%}</span><span class="bar" style="width:{4 * share:.2f}rem"></span>'
    return f'<td class="share">{bar if part else ""}</td>'


def _segments(found: Explanation) -> str:
    segments = by_segment(found)
    if not segments:
        return ""
    rows = [
        f"<tr>{_cell(s.layers)}{_cell(human(s.kept_bytes), 'n')}{_cell(human(s.offloaded_bytes), 'n')}"
        f"{_cell(_cost(s.recompute_flops), 'n')}{_cell(', '.join(s.values), 'why')}</tr>"
        for s in segments
    ]
    heads = _head(("layers", ""), ("kept", "n"), ("host", "n"), ("again", "n"), ("keeps, with copies", ""))
    return _section("segments", "Segment by segment", f"<table>{heads}<tbody>{''.join(rows)}</tbody></table>")


def _changes(before: Explanation, after: Explanation) -> str:
    rows = []
    for change in changes(before, after):
        if change.differs:
            more = change.after.held_bytes - change.before.held_bytes
            again = change.after.recompute_flops - change.before.recompute_flops
            rows.append(
                f"<tr>{_cell(change.part)}{_cell(change.value, 'value')}{_cell(str(change.before))}"
                f"{_cell(str(change.after))}{_cell(changed(more, 'bytes'), 'n')}{_cell(changed(again, 'flops'), 'n')}"
                f"{_line(change.source)}</tr>"
            )
    names = [found.policy or "as it is" for found in (before, after)]
    heads = _head(
        *(("part", ""), ("value", ""), (names[0], ""), (names[1], "")),
        *(("bytes", "n"), ("again", "n"), ("source", "")),
    )
    title = f"What changes from {names[0]} to {names[1]}"
    return _section("changes", title, f"<table>{heads}<tbody>{''.join(rows)}</tbody></table>")


def _findings(findings: Sequence[Any]) -> str:
    if not findings:
        return ""
    items = [
        f'<div class="finding"><p><b>{escape(str(finding.rule))}</b></p>'
        + "".join(f"<p>{escape(line)}</p>" for line in str(finding).splitlines())
        + "</div>"
        for finding in findings
    ]
    return _section("findings", "Findings", "".join(items))


def _notes(timeline: Timeline) -> str:
    summary = (
        "Kept bytes and matmuls recomputed are exact, read from the program of the function and its gradient. The "
        "memory's timeline is predicted from the program; nothing was compiled or run. It assumes:"
    )
    items = "".join(f"<li>{escape(text)}</li>" for text in timeline.assumptions)
    return f"<p>{summary}</p><ul>{items}</ul>"


def _section(key: str, title: str, body: str) -> str:
    return (
        f'<section aria-labelledby="{key}-title"><h2 id="{key}-title">{escape(title)}</h2>'
        f'<div class="scroll">{body}</div></section>'
    )


def _head(*columns: tuple[str, str]) -> str:
    cells = (f'<th scope="col"{f" class={kind}" if kind else ""}>{escape(name)}</th>' for name, kind in columns)
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def _cell(text: str, kind: str = "") -> str:
    return f"<td{f' class={kind}' if kind else ''}>{escape(text)}</td>"


def _line(source: str) -> str:
    """File and line; the function when pointed at."""
    return f'<td class="source" title="{escape(source)}">{escape(source.partition(" ")[0])}</td>'


def _cost(flops: int) -> str:
    return human_flops(flops) if flops else ""
