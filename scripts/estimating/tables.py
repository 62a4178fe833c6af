"""An estimate as tables for people."""

from collections.abc import Sequence

from jremat.estimator.fit import Way, fit
from jremat.estimator.ledger import Ledger
from jremat.estimator.textbook import SLIPS, SOURCE, Beside
from jremat.policy import LayerPlan, Policy
from jremat.terminal.tables import Table, columns, human

Counted = tuple[Policy | LayerPlan, Ledger]


def of_policies(counted: Sequence[Counted], title: str, hbm_bytes: int | None) -> Table:
    """A line a policy, least memory first."""
    figures = ("peak", "kept by layers", "on the host", "recomputed, of the forward")
    heads = () if hbm_bytes is None else ("fits",)
    table = columns(title, ("policy", *figures, "peak at", *heads), right=figures)
    for policy, ledger in sorted(counted, key=lambda pair: (pair[1].peak_bytes, pair[1].recompute_flops)):
        share = f"{100 * ledger.recompute_flops / ledger.forward_flops:.1f}%"
        fits = () if hbm_bytes is None else (fit_word(ledger, hbm_bytes),)
        host = human(ledger.host_bytes) if ledger.host_bytes else "–"
        kept = sum(line.device_bytes for line in ledger.kept if not line.on_host)
        table.add_row(policy.spec, human(ledger.peak_bytes), human(kept), host, share, ledger.peak_phase, *fits)
    return table


def fit_word(ledger: Ledger, hbm_bytes: int) -> str:
    """Whether the peak fits, and by how much."""
    free, found = hbm_bytes - ledger.peak_bytes, fit(ledger.peak_bytes, hbm_bytes)
    if found == "no":
        return f"no, {human(-free)} over"
    return f"{'yes' if found == 'fits' else found}, {human(free)} free"


def of_ways(ways: Sequence[Way], spec: str) -> Table:
    """What would make it fit."""
    figures = ("peak", "recomputed, of the forward")
    table = columns(f"what would make {spec} fit, smallest change first", ("change", *figures), right=figures)
    for way in ways:
        table.add_row(way.change, human(way.peak_bytes), f"{100 * way.recompute:.1f}%")
    return table


def of_beside(rows: Sequence[Beside]) -> Table:
    """The papers' count of one layer without remat beside the program's, term by term, and in all over b·s·h."""
    slips = "\n".join(f"Where texts say {claim!r}: {holds}." for claim, holds in SLIPS.items())
    heads = ("tensor", "textbook", "program", "why they differ")
    table = columns("one layer under none, bytes", heads, loose=("why they differ",))
    table.caption = f"textbook: sbh(34 + 5as/h), 16-bit values, 1-byte masks, {SOURCE}.\n{slips}"
    for row in rows:
        table.add_row(row.tensor, row.textbook, row.program, row.why)
    table.add_section()
    totals = (f"{sum(units):g}" for units in zip(*((row.textbook_units, row.program_units) for row in rows)))
    table.add_row("sum, over b·s·h", *totals)
    return table
