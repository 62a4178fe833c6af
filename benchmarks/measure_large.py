"""Two programs too large for any laptop, compiled on one: an 8B model over eight GPUs, and 131,072 tokens on one.

    python benchmarks/measure_large.py [RESULTS.json]

Holds what is promised of them: Llama 3 8B at 8,192 tokens, its training step sharded over eight H200s, compiles in
under 60 s and 4 GiB of this machine's memory; a 1B Llama at 131,072 tokens with cuDNN's attention has no array of two
axes of that length. Each case is a process of its own, so that its memory is its own.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jremat.policy.files import write_whole
from jremat.terminal.command_line import run
from scripts.benchmark.config import Case
from scripts.benchmark.pool import commit

LONG = 131_072
EIGHT_B = [Case("llama3-8b", "full", "h200x8", 8, seq=8192, attention="cudnn", loss_chunk=1024)]
LONG_CONTEXT = [
    Case("llama-1b", policy, "h200", 1, seq=LONG, attention="cudnn", loss_chunk=2048)
    for policy in ("full", "save:attn_fused,attn_lse", "torchtitan_selective_op", "save_only_matmuls")
]


def measured(case: Case) -> dict:
    """The row of one case, with this process's peak memory; run by the parent in a process of its own."""
    from scripts.startup import start_jax

    start_jax()
    from scripts.benchmark.measure import row

    found = row(case)
    return found | {"host_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def main() -> None:
    rows = []
    for case in EIGHT_B + LONG_CONTEXT:
        code = f"import benchmarks.measure_large as m, json; print(json.dumps(m.measured(m.Case(**{vars(case)!r}))))"
        root = Path(__file__).resolve().parents[1]
        said = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
        if said.returncode:
            sys.exit(f"{case.title}: {said.stderr.strip().splitlines()[-1]}")
        row = vars(case) | json.loads(said.stdout.splitlines()[-1]) | commit()
        rows.append(row)
        print(
            f"{case.title}: {row['peak_bytes'] / 2**30:.1f} GiB a device, recompute "
            f"{row['recompute_flops'] / row['model_flops']:.1%} of the model, compiled in "
            f"{row['compile_seconds']:.0f} s and {row['host_rss_bytes'] / 2**30:.1f} GiB here",
            flush=True,
        )
    for row in rows[: len(EIGHT_B)]:
        assert row["compile_seconds"] < 60, row["compile_seconds"]
        assert row["host_rss_bytes"] < 4 * 2**30, row["host_rss_bytes"]
    for row in rows[len(EIGHT_B) :]:
        square = [b for b in row["buffers"] if sum(axis >= LONG for axis in b["shape"]) > 1]
        assert not square, square
    if len(sys.argv) > 1:
        write_whole(sys.argv[1], json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    run(lambda: main() or 0, "measure_large")
