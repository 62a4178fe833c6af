"""What each axis of a mesh buys: bytes of one device, and collectives in a step, of one model on eight H200s.

    python benchmarks/meshes.py             # the table of what was measured
    python benchmarks/meshes.py --measure   # first compile what is missing

Llama 3.2 1B with 4 layers, 16 sequences of 2,048 tokens, bfloat16, AdamW. Compiled, not run; needs no GPU, but the
compiler for one (the ``deviceless`` extra).
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jremat.policy.files import write_whole
from jremat.policy.shown import human
from jremat.terminal.command_line import run

FILE = Path(__file__).with_suffix(".json")
MESHES = ("data=8", "data=8,zero=1", "fsdp=8", "tensor=8,sequence", "fsdp=4,tensor=2,sequence", "fsdp=4,context=2")
POLICIES = ("none", "full", "save_only_matmuls")
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all")


def measure(mesh: str, policy: str) -> dict[str, Any]:
    """Compile one step: its bytes on one device and its collectives."""
    import jax

    from jremat.measure import collectives_of, program
    from scripts.benchmark.build import build
    from scripts.benchmark.config import Case

    shape = {"batch": 16, "seq": 2048, "layers": 4, "attention": "blockwise", "compute_dtype": "bfloat16"}
    case = Case("llama-1b", policy, "h200x8", **shape, mesh=mesh)  # type: ignore[arg-type]
    built = build(case)
    memory, compiled = program(built.step, built.state, built.tokens, target=case.target, num_buffers=0)
    return {
        "jax": jax.__version__,
        "argument_bytes": memory.argument_bytes,
        "peak_bytes": memory.peak_bytes,
        "collectives": {row.kind: [row.executions, row.nbytes] for row in collectives_of(compiled)},
    }


def main() -> int:
    """Measure what is asked for, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="compile what is not yet measured")
    flags = parser.parse_args()
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    if flags.measure:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        for mesh in MESHES:
            for policy in POLICIES:
                if f"{mesh} {policy}" not in found:
                    found[f"{mesh} {policy}"] = measure(mesh, policy)
                    write_whole(FILE, json.dumps(found, indent=1) + "\n")
                    print(f"measured {mesh} {policy}", file=sys.stderr, flush=True)
    print(f"jax {', '.join(sorted({row['jax'] for row in found.values()}))}; compiled for h200x8, not run")
    print(f"{'mesh':<26}{'policy':<19}{'state':>9}{'peak':>10}" + "".join(f"{kind:>18}" for kind in KINDS))
    for mesh in MESHES:
        for policy in POLICIES:
            if row := found.get(f"{mesh} {policy}"):
                print(line(mesh, policy, row))
    return 0


def line(mesh: str, policy: str, row: dict[str, Any]) -> str:
    """One step as a line of the table; of collectives how many and their bytes in all."""
    cells = [
        f"{n} of {human(size)}" if size >= 2**20 else ""
        for n, size in (row["collectives"].get(k, (0, 0)) for k in KINDS)
    ]
    sizes = f"{human(row['argument_bytes']):>9}{human(row['peak_bytes']):>10}"
    return f"{mesh:<26}{policy:<19}{sizes}" + "".join(f"{cell:>18}" for cell in cells)


if __name__ == "__main__":
    run(main, "meshes")
