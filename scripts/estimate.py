"""What a training step needs, in formulas: the ledger of one policy, or a line a policy, and what would make it fit.

    python scripts/estimate.py --model llama3-8b --batch 1 --seq 8192 --hbm 80GiB --policies all

The step is traced with letters for its sizes; nothing is compiled or run. Exit codes: 0 done; 1 with --hbm: nothing
fits; 2 something that the user can put right, named in one line.
"""

import gc
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C while modules load needs no traceback
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jremat.calibration import ESTIMATE
from jremat.estimator import textbook
from jremat.estimator.fit import Way, fit, ways_to_fit
from jremat.policy.files import write_json
from jremat.report.ledger import of_ledger
from jremat.terminal import tables
from jremat.terminal.command_line import command, parse, run, warn
from jremat.terminal.start_jax import start_jax
from jremat.terminal.tables import human
from jremat.terminal.text import printable
from scripts.estimating.config import Asked, Estimate, understood, zoo
from scripts.estimating.tables import Counted, fit_word, of_beside, of_policies, of_ways
from scripts.flags import read_bytes

PROGRAM = "estimate"


@command(PROGRAM)
def main(argv: Sequence[str] | None) -> int:
    """Run the command line ``argv``; returns the exit code."""
    flags = parse(Estimate, PROGRAM, argv)
    asked = understood(flags)
    start_jax()
    hbm_bytes = read_bytes("hbm", flags.hbm)
    counted, refused = count(asked)
    ways = () if hbm_bytes is None else ways_for(asked, counted, hbm_bytes)
    beside = textbook.beside(asked.run.config, asked.run.batch, asked.run.seq) if flags.textbook else ()
    if flags.json:
        write(flags.json, asked, counted, refused, ways, hbm_bytes)
    drawn = draw(flags, asked, hbm_bytes) if flags.sweep == "seq" else []
    for remark in asked.remarks:
        warn(PROGRAM, remark)
    show(asked, counted, refused, ways, hbm_bytes)
    if beside:
        tables.console().print(of_beside(beside))
    for path in drawn:
        print(printable(f"picture {path}"))
    return 0 if hbm_bytes is None or any(ledger.peak_bytes <= hbm_bytes for _, ledger in counted) else 1


def count(asked: Asked) -> tuple[list[Counted], list[str]]:
    """The ledger of every policy, and why some have none."""
    from jremat.estimator.transformer import ledger_of  # loads JAX, which no flag needs

    counted, refused = [], []
    gc.disable()  # a trace is many objects that live long; scanning them again and again takes a quarter of the time
    try:
        for policy in asked.chosen:
            try:
                counted.append((policy, ledger_of(replace(asked.run, policy=policy))))
            except ValueError as error:
                if not asked.whole_zoo or not str(error).startswith(("policy:", "num_layers:", "stack:")):
                    raise
                refused.append(f"{policy.spec!r}: {error}")
    finally:
        gc.enable()
    return counted, refused


def ways_for(asked: Asked, counted: Sequence[Counted], hbm_bytes: int) -> tuple[Way, ...]:
    """What would make the run fit, where none of the policies that were asked for does."""
    if any(ledger.peak_bytes <= hbm_bytes for _, ledger in counted):
        return ()
    return ways_to_fit(replace(asked.run, policy=least(counted)[0]), hbm_bytes, zoo())


def least(counted: Sequence[Counted]) -> Counted:
    """The policy with the lowest peak."""
    return min(counted, key=lambda pair: pair[1].peak_bytes)


def show(
    asked: Asked, counted: Sequence[Counted], refused: Sequence[str], ways: Sequence[Way], hbm_bytes: int | None
) -> None:
    """Print the tables."""
    out = tables.console()
    run, config = asked.run, asked.run.config
    devices = run.parallel.devices
    title = (
        f"{asked.name}: {config.num_params():,} parameters, batch {run.batch}, {run.seq} tokens, "
        f"{config.attention} attention, {config.compute_dtype}" + (f", {devices} devices" if devices > 1 else "")
    )
    if len(counted) == 1:
        ((policy, ledger),) = counted
        out.print(of_ledger(ledger, f"{title}, {policy.spec}"))
        share = 100 * ledger.recompute_flops / ledger.forward_flops
        peak = f"peak {human(ledger.peak_bytes)} in the {ledger.peak_phase}"
        tables.show(out, f"{peak}; recomputes {share:.1f}% of the forward's matmul FLOPs")
        tables.show(out, *(f"assumes: {assumption}" for assumption in ledger.assumptions), indent=9)
        if hbm_bytes is not None:
            tables.show(out, f"fits in {human(hbm_bytes)}: {fit_word(ledger, hbm_bytes)}")
            if fit(ledger.peak_bytes, hbm_bytes) == "tight":
                error, margin = f"the estimate's error ({ESTIMATE.error:.0%})", f"({ESTIMATE.margin:.0%})"
                tables.show(out, f"tight: within {error} and the margin for workspaces {margin}")
    else:
        out.print(of_policies(counted, title, hbm_bytes))
    if refused:
        names = ", ".join(reason.partition(": ")[0].strip("'") for reason in refused)
        tables.show(out, f"left out, since they name what this block doesn't have: {names}", indent=4)
    if ways:
        out.print(of_ways(ways, least(counted)[0].spec))
    elif hbm_bytes is not None and all(ledger.peak_bytes > hbm_bytes for _, ledger in counted):
        tables.show(out, "no change that is tried here makes it fit")


def write(
    path: Path,
    asked: Asked,
    counted: Sequence[Counted],
    refused: Sequence[str],
    ways: Sequence[Way],
    hbm_bytes: int | None,
) -> None:
    """Every figure, as JSON."""
    rows: list[dict[str, Any]] = [{"policy": policy.spec} | ledger.to_dict() for policy, ledger in counted]
    figures = {
        "model": asked.name,
        "config": asked.run.config.to_dict(),
        "batch": asked.run.batch,
        "seq": asked.run.seq,
        "parallel": vars(asked.run.parallel),
        "hbm_bytes": hbm_bytes,
        "ledgers": rows,
        "refused": list(refused),
        "ways_to_fit": [vars(way) for way in ways],
        "remarks": list(asked.remarks),
    }
    write_json(path, figures)


def draw(flags: Estimate, asked: Asked, hbm_bytes: int | None) -> list[Path]:
    """The picture of memory against the sequence."""
    from scripts.estimating import pictures  # Matplotlib takes a second to load

    title = f"{asked.name}, batch {asked.run.batch}, {asked.run.config.attention} attention"
    return pictures.draw(pictures.peaks(asked.run, asked.chosen), title, hbm_bytes, flags.plot or Path("estimates"))


if __name__ == "__main__":
    run(main, PROGRAM)
