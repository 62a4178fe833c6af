"""Draw every picture of the documentation, as PNG and SVG, from the figures in this folder and from estimates.

    python benchmarks/pictures.py [--out docs/pictures]

Nothing is compiled or run. The same figures give the same bytes.
"""

import argparse
import contextlib
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jremat.terminal.command_line import run
from jremat.terminal.start_jax import start_jax

POLICIES = ("none", "dots_saveable", "save_only_matmuls", "torchtitan_selective_op", "selective", "full")


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", help="a folder")
    folder = parser.parse_args().out
    start_jax()
    for draw in (compiled, by_sequence, ledgers, timelines, frontier):
        for path in draw(folder):
            print(f"picture {path}")
    return 0


def compiled(folder: Path) -> list[Path]:
    """Compiled peaks of GPT-2 against what is recomputed."""
    from scripts.benchmark.pictures import draw

    return draw(json.loads((ROOT / "benchmarks" / "gpt2_h200.json").read_text()), folder)


def by_sequence(folder: Path) -> list[Path]:
    """Memory of Llama 3 8B on eight devices against the sequence, estimated."""
    import policies
    from jremat.estimator.hardware import CHIPS
    from jremat.estimator.parallel import Parallel
    from jremat.estimator.training_step import TrainingStep
    from jremat.report import plots
    from models.config import get
    from scripts.estimating.pictures import peaks

    config = replace(get("llama3-8b"), attention="blockwise", compute_dtype="bfloat16")
    chosen = [
        policies.get(spec) for spec in ("none", "save_only_matmuls", "torchtitan_selective_op", "full", "every_k:4")
    ]
    run = TrainingStep(config=config, policy=chosen[0], batch=8, seq=8192, parallel=Parallel(fsdp=8), chunk=1024)
    title = "Llama 3 8B, one sequence a device, 8 devices, FSDP: estimated"
    room = CHIPS["h100"].hbm_bytes
    return plots.by_sequence(peaks(run, chosen), folder=folder, name="memory-by-seq", title=title, hbm_bytes=room)


def ledgers(folder: Path) -> list[Path]:
    """What GPT-2's memory is made of at its peak, a bar a policy."""
    import policies
    from jremat.estimator.transformer import estimate
    from jremat.report import plots
    from models.config import get

    config = replace(get("gpt2"), compute_dtype="bfloat16")
    bars = []
    for spec in POLICIES:
        ledger = estimate(config, policies.get(spec), batch=8, seq=1024)
        names = {"kept": "kept by the layers", "layer": "the layer under work", "head": "embedding, logits, loss"}
        bars.append((spec, [(names.get(line.part, line.name), line.device_bytes) for line in ledger.lines]))
    title = "GPT-2, batch 8, 1024 tokens, bf16, AdamW: the ledger at its peak"
    return plots.ledger_bars(bars, folder=folder, name="ledger", title=title)


def timelines(folder: Path) -> list[Path]:
    """What is alive at each moment of GPT-2's training step."""
    from jremat.command.output import policy_view
    from jremat.report import plots
    from scripts.explaining.config import Explain
    from scripts.explaining.subject import subject

    drawn = []
    for spec in ("full", "save_only_matmuls"):
        of = subject(Explain(), spec)
        drawn += plots.timeline(
            policy_view(of).timeline, folder=folder, name=f"timeline-{spec}", title=f"{of.title}, {spec}: predicted"
        )
    return drawn


def frontier(folder: Path) -> list[Path]:
    """What the planner finds for GPT-2, beside named policies, predicted."""
    from scripts import plan

    flags = "--model gpt2 --batch 8 --attention dot --hbm 4GiB --compiles 0 --plot"
    with contextlib.redirect_stdout(io.StringIO()):
        code = plan.main([*flags.split(), str(folder)])
    assert code == 0, "the planner says why on standard error"
    return [folder / f"frontier.{kind}" for kind in ("png", "svg")]


if __name__ == "__main__":
    run(main, "pictures")
