"""What the compiler says of a program's memory: one compile, its figures, its largest buffers."""

import dataclasses
import importlib.metadata
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jremat.measure.buffers import Buffer, Tags, largest_at_peak
from jremat.measure.compile import compiled
from jremat.measure.hlo_schedule import HloSchedule
from jremat.measure.targets import Target
from jremat.policy.shown import aligned, filled, human


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of one compiled program on one device of its target, in bytes.

    ``peak_bytes`` is what must be free for it: arguments, results and temporaries, less results that take over a
    donated argument's place. (XLA's own ``peak_memory_in_bytes`` leaves the temporaries out on CPU.)

    Attributes:
        target: what it was compiled for; ``label`` says whether that is here.
        num_devices: of the target; the figures are of one of them.
        argument_bytes, output_bytes, temp_bytes, alias_bytes: in device memory.
        host_bytes: arguments, results and temporaries in the host's memory (offload).
        code_bytes: of the program itself, not in the peak.
        compile_seconds: of XLA alone.
        hbm_bytes: the device's memory, or None where unknown.
        buffers: the largest alive at the peak, largest first.
        versions: of JAX and of what compiled.
        flags: that change what the compiler does.
        label: ``compiled for h200, not run``.
        notes: what to know of the figures, a sentence each.

    >>> import jax.numpy as jnp
    >>> from jremat.measure import compiled_memory
    >>> found = compiled_memory(jnp.sin, jax.ShapeDtypeStruct((1024,), jnp.float32), target="cpu")
    >>> found.argument_bytes, found.total_peak_bytes == found.peak_bytes
    (4096, True)
    """

    target: str
    num_devices: int
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    host_bytes: int
    code_bytes: int
    compile_seconds: float
    hbm_bytes: int | None
    buffers: tuple[Buffer, ...]
    versions: Mapping[str, str]
    flags: Mapping[str, str]
    label: str
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Of one device."""
        return self.temp_bytes + self.argument_bytes + self.output_bytes - self.alias_bytes

    @property
    def total_peak_bytes(self) -> int:
        """Of all devices together."""
        return self.peak_bytes * self.num_devices

    def __str__(self) -> str:
        figures = {"arguments": self.argument_bytes, "results": self.output_bytes, "temporaries": self.temp_bytes}
        figures |= {"donated": -self.alias_bytes, "host": self.host_bytes}
        compiled = self.label if "compiled" in self.label else f"compiled for {self.label}"
        each = f", each of {self.num_devices} devices" if self.num_devices > 1 else ""
        rows = [("peak", human(self.peak_bytes), compiled + each)]
        table = aligned([*rows, *((name, human(n)) for name, n in figures.items() if n)], right=[1])
        return "\n".join([table, *map(filled, self.notes)])

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Every figure by name, ready for JSON."""
        return dataclasses.asdict(self) | {"peak_bytes": self.peak_bytes, "total_peak_bytes": self.total_peak_bytes}


def measured(
    lowered: jax.stages.Lowered,
    kind: Target,
    *,
    xla_remat: bool,
    compiler_options: Mapping[str, Any],
    num_buffers: int,
    tags: Tags,
    notes: tuple[str, ...] = (),
) -> tuple[Memory, jax.stages.Compiled]:
    """Compile what was lowered for ``kind``, and read its memory; the program can be run where the device is here.

    Raises:
        RuntimeError: this compiler gives no memory figures.
    """
    with tempfile.TemporaryDirectory(prefix="jremat-") as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True} if num_buffers else {}
        start = time.perf_counter()
        program = compiled(lowered, kind, xla_remat=xla_remat, compiler_options=dump | dict(compiler_options))
        seconds = time.perf_counter() - start
        schedule = _dumped(Path(folder))
    buffers = largest_at_peak(schedule, tags, num_buffers) if schedule else ()
    m = program.memory_analysis()
    if m is None:
        raise RuntimeError(f"memory: {kind.name}'s compiler gives no memory figures")
    host_bytes = (
        m.host_temp_size_in_bytes
        + m.host_argument_size_in_bytes
        + m.host_output_size_in_bytes
        - m.host_alias_size_in_bytes
    )
    found = Memory(
        target=kind.name,
        num_devices=kind.num_devices,
        argument_bytes=m.argument_size_in_bytes,
        output_bytes=m.output_size_in_bytes,
        temp_bytes=m.temp_size_in_bytes,
        alias_bytes=m.alias_size_in_bytes,
        host_bytes=host_bytes,
        code_bytes=m.generated_code_size_in_bytes,
        compile_seconds=seconds,
        hbm_bytes=kind.hbm_bytes if kind.described else local_bytes(kind),
        buffers=buffers,
        versions=versions(kind),
        flags=_flags(xla_remat, compiler_options),
        label=kind.label,
        notes=notes,
    )
    return found, program


def versions(kind: Target) -> dict[str, str]:
    """Versions of JAX and of what compiles for ``kind``; jaxlib or the plugin holds XLA."""
    names = ["jax", "jaxlib"]
    if kind.platform in ("cuda", "local"):
        names += [f"jax-cuda{major}-pjrt" for major in (12, 13)] + [f"nvidia-cudnn-cu{major}" for major in (12, 13)]
    if kind.platform in ("tpu", "local"):
        names += ["libtpu"]
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _flags(xla_remat: bool, compiler_options: Mapping[str, Any]) -> dict[str, str]:
    found = {"jax_compiler_enable_remat_pass": str(xla_remat)}
    found |= {name: os.environ[name] for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") if os.environ.get(name)}
    if precision := getattr(jax.config, "jax_default_matmul_precision", None):
        found["jax_default_matmul_precision"] = str(precision)
    return found | {name: str(value) for name, value in compiler_options.items()}


def _dumped(folder: Path) -> HloSchedule | None:
    """The main program among what XLA dumped: helpers that it compiles on the side are smaller."""
    found = sorted(folder.glob("*after_optimizations.hlo.pb"), key=lambda path: path.stat().st_size)
    return HloSchedule(found[-1].read_bytes()) if found else None


def local_bytes(kind: Target) -> int | None:
    """What the allocator of the device that is here may use."""
    device = jax.local_devices(backend=None if kind.platform == "local" else kind.platform)[0]
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")
