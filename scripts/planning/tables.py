"""A plan as tables for people."""

from collections.abc import Sequence
from dataclasses import replace

from jremat.planner.result import KeptValue, Plan, Point
from jremat.terminal.tables import Table, columns, human, human_flops
from scripts.planning.question import Answer, Tried

_POINTS = 10  # of the frontier in the table; --json has all


def of_kept(answer: Answer) -> Table:
    """What the plan keeps on one device, most bytes first."""
    plan, devices = answer.plan, answer.devices
    figures = ("layers", "bytes in all", "where", "spares recompute of")
    heads = ("value", "made at", *figures)
    table = columns("kept for the backward pass, on one device", heads, right=figures, loose=("made at",))
    for row in _together(plan.kept):
        spared = row.spared * row.layers / devices
        saved = f"{spared * 1e3:.2f} ms" if plan.objective == "seconds" else human_flops(spared)
        size = human(row.nbytes * row.layers / devices)
        table.add_row(row.name, row.source, str(row.layers), size, row.where, saved)
    return table


def _together(rows: Sequence[KeptValue]) -> list[KeptValue]:
    """Values of one tag and one line as one row."""
    found: dict[tuple[str, str, str, int], KeptValue] = {}
    for row in rows:
        key = row.name, row.source, row.where, row.layers
        before = found.get(key)
        found[key] = row if before is None else replace(
            row, nbytes=row.nbytes + before.nbytes, spared=row.spared + before.spared
        )  # fmt: skip
    return list(found.values())


def of_frontier(answer: Answer) -> Table:
    """The frontier, thinned, with the named policies in their places, most memory first.

    Peaks are predicted; near a compiled plan that runs in the same way they are corrected by the compiler's figure.
    """
    plan = answer.plan
    title = "frontier, predicted; named policies under the same cost model"
    if plan.peak_bytes is not None:
        title += "; near the compiled plan corrected by its compile"
    seconds = plan.objective == "seconds"
    modelled = ("recompute", "step", "tokens/s") if seconds else ()
    figures = ("peak", "fits", "recomputed, of the layers' forward", *modelled)
    table = columns(title, ("plan", *figures), right=figures)
    rows = [(point, "named") for point in plan.beside] + [(point, "") for point in thinned(plan)]
    own = any(point.plan == plan.policy for point in plan.frontier)
    for point, kind in sorted(rows, key=lambda row: -row[0].expected_peak_bytes):
        chosen = point.plan == plan.policy and not (kind and own)
        notes = [note for note in (kind, "chosen" * chosen) if note]
        cells = [
            point.spec + (f" ({', '.join(notes)})" if notes else ""),
            human(point.expected_peak_bytes),
            fit_word(plan, point),
            f"{point.recompute_flops / max(plan.forward_flops, 1):.1%}",
        ]
        if point.recompute_seconds is not None:
            cells.append(f"{point.recompute_seconds / answer.devices * 1e3:.2f} ms")
        if (step := _step_seconds(answer, point)) is not None:
            cells += [f"{step * 1e3:.1f} ms", f"{answer.tokens / step:,.0f}"]
        table.add_row(*cells, bold=chosen)
    return table


def fit_word(plan: Plan, point: Point) -> str:
    """Whether a point fits, for a table; what is faster than the chosen plan was not shown to, or it would be that."""
    within = point.expected_peak_bytes <= plan.hbm_bytes * (1 - plan.margin)
    if plan.peak_bytes is None or not within:
        return "yes" if within else "no"
    if point.plan == plan.policy:
        return "compiled"
    chosen = next((p for p in (*plan.frontier, *plan.beside) if p.plan == plan.policy), point)
    return "not shown" if _cost(point) < _cost(chosen) else "yes"


def _cost(point: Point) -> float:
    return point.recompute_flops if point.recompute_seconds is None else point.recompute_seconds


def _step_seconds(answer: Answer, point: Point) -> float | None:
    plan = answer.plan
    if plan.step_seconds is None or plan.recompute_seconds is None or point.recompute_seconds is None:
        return None
    return plan.step_seconds - plan.recompute_seconds + point.recompute_seconds / answer.devices


def thinned(plan: Plan) -> list[Point]:
    """About ten points of the frontier, evenly spread, the chosen one among them."""
    last = len(plan.frontier) - 1
    places = {round(k * last / (_POINTS - 1)) for k in range(_POINTS)}
    return [p for k, p in enumerate(plan.frontier) if k in places or p.plan == plan.policy]


def of_sizes(tried: Sequence[Tried], name: str) -> Table:
    """The sizes that were tried."""
    heads = (name, "peak", "recomputed, of the layers' forward", "step", "tokens/s")
    table = columns(f"{name}, predicted", heads, right=heads)
    for row in tried:
        size = str(getattr(row.case, name))
        if row.answer is None:
            table.add_row(size, "does not fit")
            continue
        plan, speed = row.answer.plan, row.answer.tokens_per_second
        step = f"{plan.step_seconds * 1e3:.1f} ms" if plan.step_seconds else ""
        rate = f"{speed:,.0f}" if speed else ""
        table.add_row(size, human(plan.predicted_peak_bytes), f"{plan.recompute_share:.1%}", step, rate)
    return table
