"""Rows on screen."""

from collections.abc import Callable, Sequence
from typing import Any

from jremat.terminal.tables import Table, human

Row = dict[str, Any]

# jremat.measure.collectives.KINDS, which would load JAX here
_COLLECTIVES = "all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all"


def _of_kind(kind: str) -> Callable[[Row], str]:
    """How often such a collective runs in a step, and its bytes on each device, on average."""

    def show(row: Row) -> str:
        found = [c for c in row.get("collectives", ()) if c["kind"] == kind]
        return f"{found[0]['executions']} × {human(found[0]['nbytes'] // found[0]['executions'])}" if found else ""

    return show


# A column's head, and what it shows of a row; a column that no row fills is left out.
_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("model", lambda r: r["model"]),
    ("policy", lambda r: r["policy"]),
    ("b × s", lambda r: f"{r['batch']} × {r['seq'] or '?'}"),
    ("peak", lambda r: human(r["peak_bytes"]) if "peak_bytes" in r else ""),
    ("without device", lambda r: human(r["described_peak_bytes"]) if "described_peak_bytes" in r else ""),
    ("device's own", lambda r: _device(r)),
    ("temp", lambda r: human(r["temp_bytes"]) if "temp_bytes" in r else ""),
    ("host", lambda r: human(r["host_bytes"]) if r.get("host_bytes") else ""),
    ("recompute, of model FLOPs", lambda r: _of_model(r)),
    *((kind, _of_kind(kind)) for kind in _COLLECTIVES),
    ("compile", lambda r: f"{r['compile_seconds']:.1f} s" if "compile_seconds" in r else ""),
    ("step", lambda r: f"{r['step_seconds']:.4g} s ±{r['spread_seconds']:.2g}" if "step_seconds" in r else ""),
    ("tokens/s", lambda r: f"{r['tokens_per_second']:,.0f}" if "tokens_per_second" in r else ""),
    ("MFU full", lambda r: f"{r['mfu_full']:.1%}" if "mfu_full" in r else ""),
    ("MFU half", lambda r: f"{r['mfu_half']:.1%}" if "mfu_half" in r else ""),
    ("HFU", lambda r: f"{r['hfu']:.1%}" if "hfu" in r else ""),
    ("largest batch", lambda r: str(r["largest_batch_found"]) if "largest_batch_found" in r else ""),
    ("", lambda r: "" if r["status"] == "ok" else r["status"].replace("_", " ")),
)


def table(rows: Sequence[Row], title: str) -> Table:
    """One target's rows as a table. Recompute is a share of the model's FLOPs (full convention)."""
    found = Table(title)
    cells = [[show(row) for _, show in _COLUMNS] for row in rows]
    used = [i for i in range(len(_COLUMNS)) if any(line[i] for line in cells)]
    for i in used:
        head = _COLUMNS[i][0]
        found.add_column(head, right=head not in ("model", "policy", ""))
    for line in cells:
        found.add_row(*(line[i] for i in used))
    return found


def label(row: Row) -> str:
    """What a row's figures are of: ``compiled for h200, not run``, or the device that it ran on."""
    kind = row.get("hardware", {}).get("device_kind")
    ran = f"{row['target']}: run on {kind}" if "step_seconds" in row else None
    return ran or row.get("label") or row["target"]


def _of_model(row: Row) -> str:
    return f"{row['recompute_flops'] / row['model_flops']:.1%}" if "recompute_flops" in row else ""


def _device(row: Row) -> str:
    held = row.get("device_memory") or {}
    return human(held["peak_bytes"]) if held.get("peak_bytes") else ""
