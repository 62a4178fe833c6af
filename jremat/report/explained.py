"""An explanation as tables for people: value by value, by segment, and two side by side."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jremat.policy.places import numbered_alike
from jremat.report.changes import Change, changes
from jremat.report.explain import ExplainedValue, Explanation, Fate
from jremat.terminal.tables import Table, changed, columns, human, human_flops

SMALL_SHARE = 1e-3
"""Of all kept bytes: values below it that cost no matmul are listed together, one line a part."""

FATE_WORDS: dict[Fate, str] = {"kept": "kept", "offloaded": "host", "recomputed": "again"}


def of_values(found: Explanation, title: str, *, every: bool = False) -> Table:
    """One row a value, by part of the model, with the sum of each part.

    Args:
        found: what is explained.
        title: above the table.
        every: whether the small values get a row each.
    """
    plan = any(row.layers for row in found)
    heads = ["value", *(["layers"] if plan else []), "fate", "shape", "bytes", "share", "again", "made at", "why"]
    table = columns(title, heads, right=("bytes", "share", "again"), loose=("shape", "made at", "why"))
    held = max(found.kept_bytes + found.offloaded_bytes, 1)
    for part, group in itertools.groupby(found.of(*FATE_WORDS), key=lambda row: row.part):
        rows = list(group)
        total, again = _sums(rows)
        blank = ("",) * (3 if plan else 2)
        table.add_section()
        table.add_row(part, *blank, human(total) if total else "", _share(total, held), _cost(again), bold=True)
        large = [row for row in rows if every or not is_small(row, held)]
        for row in large:
            table.add_row(*_cells(row, held, plan))
        rest = len(rows) - len(large)
        if rest:
            small = _sums([row for row in rows if is_small(row, held)])[0]
            size = human(small) if small else ""
            table.add_row(f"  {rest} small value{'s' * (rest > 1)}", *blank, size, _share(small, held))
    return table


def totals(found: Explanation) -> list[str]:
    """The sums, a line each."""
    kept, host, again = found.of("kept"), found.of("offloaded"), found.of("recomputed")
    inputs = sum(row.bytes for row in found.of("input"))
    lines = [f"kept         {human(found.kept_bytes)} in {_count(kept)} on the device"]
    if host:
        lines.append(f"offloaded    {human(found.offloaded_bytes)} in {_count(host)} in the host's memory")
    share = (
        f", {found.recompute_flops / found.forward_flops:.1%} of the forward's matmul FLOPs"
        if found.forward_flops
        else ""
    )
    cost = f"{human_flops(found.recompute_flops)} in matmuls{share}" if again else "nothing"
    lines.append(f"recomputed   {cost}")
    if inputs:
        lines.append(f"read anyway  {human(inputs)} of arguments and constants, which are there without a policy")
    if found.unread:
        lines.append(f"names        {', '.join(found.unread)}: nothing is kept or recomputed under them")
    paths = sorted((row for row in found.of(*FATE_WORDS) if row.path), key=lambda row: -row.bytes)
    if paths:
        module, line = numbered_alike(paths[0].path).rpartition("/")[2], paths[0].source.partition(" ")[0]
        lines.append(f"paths        a policy selects by module, 'save:*/{module}/*', or by line, 'at:{line}'")
    return lines


@dataclass(frozen=True)
class Segment:
    """Consecutive layers of a plan, summed up."""

    layers: str
    kept_bytes: int
    offloaded_bytes: int
    recompute_flops: int
    values: tuple[str, ...]


def by_segment(found: Explanation) -> tuple[Segment, ...]:
    """What each segment of a plan keeps and recomputes, first layer first."""
    rows = sorted((row for row in found.of(*FATE_WORDS) if row.layers), key=_first_layer)
    segments = []
    for layers, group in itertools.groupby(rows, key=lambda row: row.layers):
        own = list(group)
        named = sorted((row for row in own if row.fate != "recomputed"), key=lambda row: -row.bytes)
        segments.append(
            Segment(
                layers,
                sum(row.bytes for row in own if row.fate == "kept"),
                sum(row.bytes for row in own if row.fate == "offloaded"),
                sum(row.recompute_flops for row in own),
                tuple(f"{row.value} ×{row.copies}" for row in named),
            )
        )
    return tuple(segments)


def of_segments(found: Explanation, title: str) -> Table:
    """A row a segment of a plan."""
    segments = by_segment(found)
    host = any(segment.offloaded_bytes for segment in segments)
    heads = ["layers", "kept", *(["host"] if host else []), "again", "keeps, with copies"]
    table = columns(title, heads, right=("kept", "host", "again"), loose=("keeps, with copies",))
    for s in segments:
        names = ", ".join(s.values[:12]) + (f", {len(s.values) - 12} more" if len(s.values) > 12 else "")
        on_host = [human(s.offloaded_bytes)] if host else []
        table.add_row(s.layers, human(s.kept_bytes), *on_host, _cost(s.recompute_flops), names)
    return table


def of_changes(before: Explanation, after: Explanation, title: str) -> Table:
    """Two policies side by side: the values whose fate or cost differs."""
    left, right = before.policy or "as it is", after.policy or "as it is"
    heads = ("value", left, right, "bytes", "again", "source")
    table = columns(title, heads, right=("bytes", "again"), loose=(left, right, "source"))
    found = [change for change in changes(before, after) if change.differs]
    for part, group in itertools.groupby(found, key=lambda change: change.part):
        table.add_section()
        table.add_row(part, bold=True)
        for change in group:
            table.add_row(*_changed_cells(change))
    table.add_section()
    held = [
        f"{human(e.kept_bytes + e.offloaded_bytes)} kept, {human_flops(e.recompute_flops)} again"
        for e in (before, after)
    ]
    more = after.kept_bytes + after.offloaded_bytes - before.kept_bytes - before.offloaded_bytes
    table.add_row(
        "sum", *held, changed(more, "bytes"), changed(after.recompute_flops - before.recompute_flops, "flops")
    )
    return table


def _changed_cells(change: Change) -> tuple[str, ...]:
    more = change.after.held_bytes - change.before.held_bytes
    again = change.after.recompute_flops - change.before.recompute_flops
    return (
        f"  {change.value}",
        str(change.before),
        str(change.after),
        changed(more, "bytes"),
        changed(again, "flops"),
        change.source.partition(" ")[0],
    )


def _cells(row: ExplainedValue, held: int, plan: bool) -> list[str]:
    kept = row.fate != "recomputed"
    return [
        f"  {row.value}",
        *([row.layers] if plan else []),
        FATE_WORDS[row.fate],
        shape_text(row),
        human(row.bytes) if kept else "",
        _share(row.bytes, held) if kept else "",
        _cost(row.recompute_flops),
        f"{row.path}  {row.source.partition(' ')[0]}".strip(),
        f"{row.why}; for {needed(row.read_by)}" if kept and row.read_by else row.why if kept else "",
    ]


def needed(readers: Sequence[str]) -> str:
    """The first of those who need a value; of a replay the modules alone."""
    short = [
        r.partition(" of ")[2] and f"replay of {r.partition(' of ')[2]}" if r[:7] == "replay:" else r for r in readers
    ]
    short = list(dict.fromkeys(short))
    return ", ".join(short[:2]) + (f" and {len(short) - 2} more" if len(short) > 2 else "")


def shape_text(row: ExplainedValue) -> str:
    """Dtype, shape and copies: ``bf16[8,1024,768] ×12``."""
    copies = f" ×{row.copies}" if row.copies > 1 else ""
    return f"{_SHORT.get(row.dtype, row.dtype)}[{','.join(map(str, row.shape))}]{copies}"


_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "int32": "i32", "uint32": "u32"}


def is_small(row: ExplainedValue, held: int) -> bool:
    """Whether a value is listed together with others: next to no bytes of all that are held, and no matmul."""
    kept = row.fate != "recomputed"
    return not row.recompute_flops and (row.fetched or row.bytes < SMALL_SHARE * held if kept else not _tagged(row))


def _tagged(row: ExplainedValue) -> bool:
    """Whether a recomputed value has a name of its own."""
    return " of " not in row.value and not row.fetched


def _sums(rows: Sequence[ExplainedValue]) -> tuple[int, int]:
    return sum(row.bytes for row in rows if row.fate != "recomputed"), sum(row.recompute_flops for row in rows)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if part else ""


def _cost(flops: int) -> str:
    return human_flops(flops) if flops else ""


def _count(rows: Sequence[ExplainedValue]) -> str:
    return f"{len(rows)} value{'s' * (len(rows) != 1)}"


def _first_layer(row: ExplainedValue) -> tuple[int, str]:
    return int(row.layers.partition("-")[0].partition(" ")[0]), row.layers
