"""The comparison as one table."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """One line a row: JAX's figure, then PyTorch's."""
    shown = Table(title=title, pad_edge=False, expand=True)
    shown.add_column("policy · PyTorch", ratio=3, overflow="fold")
    for heading in (
        "kept KiB",
        "recomputed, share of the forward's matmul FLOPs",
        "gradient off by",
        "peak MiB",
        "time over none (~: not told apart)",
        "holds",
    ):
        shown.add_column(heading, ratio=1, justify="right", overflow="fold")
    for row in rows:
        shown.add_row(_names(row), *_cells(row))
    return shown


def _names(row: dict[str, Any]) -> Text:
    text = Text(row["policy"], style="bold")
    if row["pytorch"]:
        text.append(f"\n{row['pytorch']}", style="not bold dim")
    for found in row.get("differences", ()):
        text.append(f"\n  {found['tensor']} {_kib(found['jax'])} | {_kib(found['pytorch'])} {found['why']}", "not bold")
    if "jax_spec" in row:
        text.append(f"\n{_readings(row)}", style="not bold")
    fault = row.get("checks", {}).get("dropout", {}).get("pytorch_fault")
    if fault:
        text.append(f"\n  dropout: PyTorch's backward draws another mask ({fault})", style="not bold")
    if row["status"] != "compared":
        text.append(f"\n{row['status']}", style="not bold")
    return text


def _readings(row: dict[str, Any]) -> str:
    """What a budget comes to on each side by its own reading."""
    ours, whole = row["jax_own_reading"], row["pytorch_whole_stack"]
    share = ours["recomputed_flops"] / row["forward_flops"]["jax"]
    return (
        f"  JAX here {row['jax_spec']}; by its own reading {_kib(ours['kept_bytes'])}, {share:.4f} redone; "
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
