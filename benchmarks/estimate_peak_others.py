"""The traced peak against the one that XLA plans for an H200, on train steps that hold no model of ours.

The rules of ``jremat.predicted_memory`` were read from transformers of this repository
(``benchmarks/estimate_peak.py``); this table says what the prediction is worth elsewhere. Every third step, by the
alphabet, is held out: no rule was made or changed with a look at it.

    python benchmarks/estimate_peak_others.py                 # the table, of the JAX that is installed
    python benchmarks/estimate_peak_others.py --measure 10    # first compile up to ten steps more

Needs no GPU, but the compiler for one (the ``deviceless`` extra) to measure. Some steps are models of other packages,
left out where these aren't installed. Numbers are compiled, not run; they are those of the JAX that the results' file
is named after.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

from benchmarks.estimate_peak import summary
from benchmarks.estimate_peak_others_cases import NEEDS, STEPS
from jremat.policy.files import write_whole
from jremat.terminal.command_line import run

HELD_OUT = frozenset(sorted(STEPS)[::3])


@dataclasses.dataclass(frozen=True)
class Row:
    """One step with what was compiled and what was predicted."""

    name: str
    compiled: Mapping[str, int]
    traced_bytes: int

    @property
    def error(self) -> float:
        """As a share of the compiled peak."""
        return self.traced_bytes / self.compiled["peak_bytes"] - 1

    @property
    def beyond_arguments(self) -> float:
        """As a share of the peak less arguments."""
        peak = self.compiled["peak_bytes"]
        return (self.traced_bytes - peak) / (peak - self.compiled["argument_bytes"])


def results(version: str) -> Path:
    """The file of what was measured with one JAX."""
    return Path(__file__).with_name(f"estimate_peak_others-{version}.json")


def measure(name: str) -> dict[str, int]:
    """Compile one step; its peak and the arguments' share of it."""
    from jremat.measure.memory import compiled_memory

    step, args = STEPS[name]()
    found = compiled_memory(step, *args, target="h200", num_buffers=0)
    return {"peak_bytes": found.peak_bytes, "argument_bytes": found.argument_bytes}


def row_of(name: str, compiled: Mapping[str, int]) -> Row:
    """The prediction beside what was compiled."""
    from jremat.graph.peak import predicted_memory

    step, args = STEPS[name]()
    return Row(name, compiled, predicted_memory(step, *args).peak_bytes)


def lines(rows: Sequence[Row]) -> list[str]:
    """Each step, then the looked-at and the held-out together."""
    found = [f"{'':42} {'compiled':>12} {'traced':>8} {'less arguments':>15}"]
    for row in rows:
        mark = "  held out" if row.name in HELD_OUT else ""
        peak = f"{row.compiled['peak_bytes'] / 2**20:8,.0f} MiB"
        found.append(f"{row.name:42} {peak} {row.error:+8.1%} {row.beyond_arguments:+15.1%}{mark}")
    for name, chosen in (("looked at", False), ("held out", True)):
        part = [row for row in rows if (row.name in HELD_OUT) is chosen]
        found.append(f"\ntraced, {name}: {summary([row.error for row in part])}")
        found.append(f"  of the peak less arguments: {summary([row.beyond_arguments for row in part])}")
    return found


def main() -> int:
    """Measure what is asked for, then print the table."""
    import jax

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", type=int, default=0, metavar="N", help="compile up to N steps not yet measured")
    flags = parser.parse_args()
    path = results(jax.__version__)
    found = json.loads(path.read_text()) if path.exists() else {}
    here = []
    for name in STEPS:
        try:
            STEPS[name]()
        except ModuleNotFoundError as missing:
            if name not in NEEDS:
                raise
            print(f"left out: {name}: {missing}; pip install {NEEDS[name]}", file=sys.stderr)
        else:
            here.append(name)
    for name in [name for name in here if name not in found][: flags.measure]:
        found[name] = measure(name)
        write_whole(path, json.dumps(dict(sorted(found.items())), indent=1) + "\n")
        print(f"measured {name}", file=sys.stderr, flush=True)
    print(f"jax {jax.__version__}, compiled for an H200, not run")
    print("\n".join(lines([row_of(name, found[name]) for name in here if name in found])))
    return 0


if __name__ == "__main__":
    run(main, "estimate_peak_others")
