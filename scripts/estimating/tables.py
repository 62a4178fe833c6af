"""An estimate as tables for people."""

from collections.abc import Sequence

from jremat.estimate.fit import Way
from jremat.estimate.ledger import MOMENTS, Ledger
from jremat.estimate.textbook import SLIPS, SOURCE, Beside
from jremat.policy import LayerPlan, Policy
from jremat.report.tables import Table, columns, human

Counted = tuple[Policy | LayerPlan, Ledger]


def of_ledger(ledger: Ledger, title: str) -> Table:
    """Every line of one ledger, and the sum at each moment."""
    sums = ("in all", "a device") if ledger.devices > 1 else ("bytes",)
    table = columns(title, ("part", "line", *sums, "formula", "alive"), right=sums, loose=("formula", "alive"))
    previous = None
    for line in ledger.lines:
        sizes = [human(line.total_bytes), human(line.device_bytes)]
        where = "host" if line.on_host else " ".join(line.alive) if line.alive != MOMENTS else "always"
        part, previous = (line.part if line.part != previous else ""), line.part
        if part and table.rows:
            table.add_section()
        table.add_row(part, line.name, *(sizes if ledger.devices > 1 else sizes[1:]), line.formula, where)
    table.add_section()
    for moment in MOMENTS:
        mark = "  peak" if moment == ledger.peak_moment else ""
        blank = ("",) * (ledger.devices > 1)
        table.add_row("sum", f"at {moment}", *blank, human(ledger.bytes_at(moment)), mark.strip(), "")
    return table


def of_policies(counted: Sequence[Counted], title: str, hbm_bytes: int | None) -> Table:
    """A line a policy, least memory first."""
    figures = ("peak", "kept by layers", "on the host", "recomputed, of the forward")
    fit = () if hbm_bytes is None else ("fits",)
    table = columns(title, ("policy", *figures, "peak at", *fit), right=figures)
    for policy, ledger in sorted(counted, key=lambda pair: (pair[1].peak_bytes, pair[1].recompute_flops)):
        share = f"{100 * ledger.recompute_flops / ledger.forward_flops:.1f}%"
        fits = () if hbm_bytes is None else (fit_word(ledger, hbm_bytes),)
        host = human(ledger.host_bytes) if ledger.host_bytes else "–"
        kept = sum(line.device_bytes for line in ledger.of("kept") if not line.on_host)
        table.add_row(policy.spec, human(ledger.peak_bytes), human(kept), host, share, ledger.peak_moment, *fits)
    return table


def fit_word(ledger: Ledger, hbm_bytes: int) -> str:
    """Whether the peak fits, and by how much."""
    free = hbm_bytes - ledger.peak_bytes
    return f"yes, {human(free)} free" if free >= 0 else f"no, {human(-free)} over"


def of_ways(ways: Sequence[Way], spec: str) -> Table:
    """What would make it fit."""
    figures = ("peak", "recomputed, of the forward")
    table = columns(f"what would make {spec} fit, smallest change first", ("change", *figures), right=figures)
    for way in ways:
        table.add_row(way.change, human(way.peak_bytes), f"{100 * way.recompute:.1f}%")
    return table


def of_beside(rows: Sequence[Beside]) -> Table:
    """The papers' count of one layer without remat, and the program's, in bytes over b·s·h."""
    slips = "\n".join(f"Where texts say {said!r}: {holds}." for said, holds in SLIPS.items())
    caption = f"textbook: 16-bit values, 1-byte masks, {SOURCE}.\n{slips}"
    heads, figures = ("tensor", "textbook", "program", "why they differ"), ("textbook", "program")
    table = columns("one layer under none, bytes over b·s·h", heads, right=figures, loose=("why they differ",))
    table.caption = caption
    for row in rows:
        table.add_row(row.tensor, f"{row.textbook:g}", f"{row.program:g}", row.why)
    table.add_section()
    table.add_row("sum", f"{sum(r.textbook for r in rows):g}", f"{sum(r.program for r in rows):g}")
    return table
