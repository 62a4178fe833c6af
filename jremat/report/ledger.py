"""A ledger as a table for people."""

from jremat.estimator.ledger import Ledger, Line
from jremat.terminal.tables import Table, columns, human

_ORDER = ("state", "kept", "layer", "head", "other")


def of_ledger(ledger: Ledger, title: str) -> Table:
    """What is alive at the peak, what the layers keep, and the most in each phase."""
    several = ledger.devices > 1
    sums = ("in all", "a device") if several else ("bytes",)
    table = columns(title, ("part", "line", *sums, "formula"), right=sums, loose=("formula",))
    for lines in (ledger.lines, ledger.kept):
        table.add_section()
        table.add_row("", f"at the peak, in the {ledger.peak_phase}" if lines is ledger.lines else "kept by the layers")
        for line in sorted(lines, key=_place):
            sizes = [human(line.total_bytes), human(line.device_bytes)][not several :]
            table.add_row(line.part, line.name, *sizes, line.formula + "  (host)" * line.on_host)
    table.add_section()
    for phase, nbytes in ledger.phase_bytes:
        mark = "peak" if phase == ledger.peak_phase else ""
        table.add_row("most", f"in the {phase}", *("",) * several, human(nbytes), mark)
    return table


def _place(line: Line) -> tuple[int, int]:
    return _ORDER.index(line.part), -line.device_bytes
