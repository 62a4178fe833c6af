"""Final losses of training runs whose residuals are compressed, beside those of an exact backward pass.

    python benchmarks/compressed_training.py --steps 2000 --seeds 5 --models tiny,tiny-llama

A run is one of ``scripts/train.py``, in a process of its own; the last line it writes of a run is the held-out loss
after the last step. A spread is the smallest and the largest over the seeds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

TRAIN = Path(__file__).parents[1] / "scripts" / "train.py"
FAMILIES = "conv+matmul"
SPECS = {
    "exact": f"ops:{FAMILIES}",
    "int8": f"compress_ops:{FAMILIES}",
    "fp8": f"fp8_ops:{FAMILIES}",
    "int4": f"compress_ops:{FAMILIES}@int4",
}


def losses(model: str, spec: str, seed: int, steps: int) -> tuple[float, float]:
    """The first training loss and the last held-out loss of one run."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures.json")
        options = {"model": model, "policy": spec, "seed": seed, "steps": steps, "json": figures, "out": folder}
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        subprocess.run([sys.executable, str(TRAIN), *flags], check=True, stdout=subprocess.DEVNULL)
        first = json.loads(Path(folder, "metrics.jsonl").read_text().splitlines()[0])
        return first["loss"], json.loads(figures.read_text())["val_loss"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, a row a model and a format."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--models", default="tiny,tiny-llama")
    chosen = parser.parse_args(arguments)
    print("| model | kept | first loss | held-out loss, mean | smallest | largest |")
    print("|---|---|---|---|---|---|", flush=True)
    for model in chosen.models.split(","):
        for name, spec in SPECS.items():
            runs = [losses(model, spec, seed, chosen.steps) for seed in range(chosen.seeds)]
            last = [val for _, val in runs]
            figures = (runs[0][0], sum(last) / len(last), min(last), max(last))
            print(f"| {model} | {name} | {' | '.join(f'{x:.4f}' for x in figures)} |", flush=True)


if __name__ == "__main__":
    main()
