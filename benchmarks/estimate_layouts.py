"""Layouts a second: the peak of one step, traced once, under every way of spreading it over up to 4,096 devices.

    python benchmarks/estimate_layouts.py

A layout is a substitution in the polynomials of the traced step's buffers; the stages of a pipeline are traced once for
each number of layers that a stage has.
"""

import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import policies
from jremat.estimate.parallel import Parallel
from jremat.estimate.transformer import estimate, runs
from jremat.terminal.command_line import run
from models.config import get

BATCH, SEQ = 4096, 4096


def layouts() -> Iterator[Parallel]:
    """Data parallelism with ZeRO, tensor, sequence and context parallelism, each a power of two."""
    powers = [2**k for k in range(13)]
    for data, zero, tensor, sequence, context in itertools.product(powers, range(4), powers[:4], (0, 1), powers[:4]):
        if data * tensor * context <= 4096 and not (zero and data == 1) and not (sequence and tensor == 1):
            yield Parallel(data=data, zero=zero, tensor=tensor, sequence=bool(sequence), context=context)


def main() -> None:
    """Trace, then count layouts."""
    config = replace(get("llama3-8b"), compute_dtype="bfloat16", attention="blockwise")
    policy, start = policies.get("save_only_matmuls"), time.perf_counter()
    (base,) = runs(config, policy, batch=BATCH, seq=SEQ, parallel=Parallel(data=64))
    base.ledger()
    print(f"traced in {time.perf_counter() - start:.2f} s")
    every, start = list(layouts()), time.perf_counter()
    peaks = {parallel: base.peak_bytes(parallel) for parallel in every}
    seconds = time.perf_counter() - start
    print(f"{len(every):,} layouts in {seconds:.2f} s: {len(every) / seconds:,.0f} a second")
    least = min(every, key=peaks.__getitem__)
    ledger = estimate(config, policy, batch=BATCH, seq=SEQ, parallel=least)
    print(
        f"least: {least}, {peaks[least] / 2**30:.2f} GiB; in its own order of kernels {ledger.peak_bytes / 2**30:.2f}"
    )


if __name__ == "__main__":
    run(lambda: main() or 0, "estimate_layouts")
