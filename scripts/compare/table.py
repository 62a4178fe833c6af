"""The comparison as one table."""

from collections.abc import Iterator, Sequence
from typing import Any

from jremat.terminal.tables import Table, columns

FIGURES = (
    "kept KiB",
    "recomputed, of the forward",
    "gradient off by",
    "peak MiB",
    "time over none",
    "holds",
)


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """One row a policy, in each column JAX's figure, then PyTorch's; below it what a PyTorch user writes."""
    shown = columns(title, ("policy", *FIGURES), right=FIGURES)
    for row in rows:
        shown.add_row(row["policy"], *_cells(row), bold=True)
        for note in _notes(row):
            shown.add_note(note)
    shown.caption = "time: ~ where the two sides are not told apart" if any("overhead" in row for row in rows) else ""
    return shown


def _notes(row: dict[str, Any]) -> Iterator[str]:
    if row["pytorch"]:
        yield row["pytorch"]
    for found in row.get("differences", ()):
        yield f"  {found['tensor']} {_kib(found['jax'])} | {_kib(found['pytorch'])} {found['why']}"
    if "jax_spec" in row:
        yield _readings(row)
    fault = row.get("checks", {}).get("dropout", {}).get("pytorch_fault")
    if fault:
        yield f"  dropout: PyTorch's backward draws another mask ({fault})"
    if row["status"] != "compared":
        yield row["status"]


def _readings(row: dict[str, Any]) -> str:
    """What a budget comes to on each side by its own reading."""
    ours, whole = row["jax_own_reading"], row["pytorch_whole_stack"]
    share = ours["recomputed_flops"] / row["forward_flops"]["jax"]
    return (
        f"  JAX here {row['jax_spec']}; by its own reading {_kib(ours['kept_bytes'])}, "
        f"{share:.4f} of the forward recomputed; "
        f"PyTorch's stack as one program {_kib(whole['kept_bytes'])}"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    checks = row.get("checks", {})
    kept = checks.get("kept_bytes") or row.get("kept_bytes")
    if not kept:
        return ["", "", "", "", "", _holds(checks)]
    ours = "–" if kept["jax"] is None else _kib(kept["jax"])
    cells = [f"{ours} | {_kib(kept['pytorch'])}"]
    if "recomputed_flops" not in checks:
        return [*cells, "", "", "", "", ""]
    forward, again = row["forward_flops"], checks["recomputed_flops"]
    shares = [again[side] / forward[side] for side in ("jax", "pytorch")]
    peaks = [row["peak_bytes"][side] / 2**20 for side in ("jax", "pytorch")]
    overhead = row.get("overhead")
    return [
        *cells,
        f"{shares[0]:.4f} | {shares[1]:.4f}",
        f"{checks['gradients']['error']:.0e}",
        f"{peaks[0]:.1f} | {peaks[1]:.1f}",
        f"{overhead['jax']:.2f} {'|' if overhead['told_apart'] else '~'} {overhead['pytorch']:.2f}" if overhead else "",
        _holds(checks),
    ]


def _holds(checks: dict[str, Any]) -> str:
    wrong = [name for name, found in checks.items() if found["hard"] and not found["holds"]]
    return ", ".join(wrong) + " FAILS" if wrong else "yes" if checks else ""


def _kib(count: int) -> str:
    return f"{count / 1024:,.0f}" if count % 1024 == 0 or count > 10_240 else f"{count / 1024:,.2f}"
