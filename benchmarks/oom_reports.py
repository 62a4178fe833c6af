"""``python benchmarks/oom_reports.py``: 10,000 garbled reports each end in one line; a program of 200 MB is read.

The second runs in a process of its own, whose time and peak memory are printed.
"""

import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from jremat.measure import compiled_memory
from jremat.measure.hlo_proto import hlo_proto
from jremat.oom import find_causes, read_dump
from jremat.oom.read import read_bytes

LARGE_BYTES = 200_000_000


def main() -> None:
    """Print how many were read and how many refused, and what the large one takes."""
    with tempfile.TemporaryDirectory() as folder:
        program = _program(Path(folder))
        log = Path("docs/examples/out-of-memory.log").read_bytes()
        rng, outcomes = random.Random(0), {"read": 0, "refused in a line": 0}
        for number in range(10_000):
            outcomes[_outcome(_garbled(log if number % 2 else program, rng))] += 1
        print(f"{outcomes} of 10,000, no traceback")
        large = Path(folder) / "large.hlo.pb"
        large.write_bytes(_larger(program))
        subprocess.run([sys.executable, __file__, str(large)], check=True)


def _program(folder: Path) -> bytes:
    """A small step that was compiled for an H200, as XLA dumps it."""

    def loss(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].mean()

    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_proto": True}
    shapes = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32)
    compiled_memory(jax.jit(jax.grad(loss)), *shapes, target="h200", num_buffers=0, compiler_options=options)
    found = sorted(folder.glob("*after_optimizations.hlo.pb"), key=lambda path: path.stat().st_size)
    return found[-1].read_bytes()


def _larger(program: bytes) -> bytes:
    """The program with copies of its largest computation, which nothing calls, up to the size wanted."""
    message = hlo_proto(program)
    module = message.hlo_module
    largest = max(module.computations, key=lambda computation: computation.ByteSize())
    copy = type(largest)()
    copy.CopyFrom(largest)
    for number in range(LARGE_BYTES // largest.ByteSize() + 1):
        for at, instruction in enumerate(copy.instructions):
            instruction.id = 1_000_000 + number * len(copy.instructions) + at
            del instruction.operand_ids[:], instruction.called_computation_ids[:]
        copy.id, copy.root_id = 10_000_000 + number, copy.instructions[-1].id
        module.computations.add().CopyFrom(copy)
    return message.SerializeToString()


def _garbled(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, a part cut out, the end cut off."""
    found = bytearray(data)
    for _ in range(rng.randrange(1, 8)):
        found[rng.randrange(len(found))] = rng.randrange(256)
    start = rng.randrange(len(found))
    del found[start : start + rng.randrange(40)]
    return bytes(found[: rng.randrange(1, len(found) + 1)] if rng.random() < 0.5 else found)


def _outcome(data: bytes) -> str:
    try:
        find_causes(read_bytes(data))
    except ValueError as error:
        assert "\n" not in str(error), error
        return "refused in a line"
    return "read"


def read_large(path: str) -> None:
    """Read a report; print seconds and peak memory of this process."""
    start = time.perf_counter()
    found = read_dump(path)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{Path(path).stat().st_size / 1e6:.0f} MB: {len(found.buffers)} buffers in {seconds:.1f} s and {peak:.2f} GiB"
    )


if __name__ == "__main__":
    read_large(sys.argv[1]) if len(sys.argv) > 1 else main()
