"""Whether a step will launch on a device: what the allocator reserves, and whether XLA starts to recompute."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jremat.measure.compile import CompileError
from jremat.measure.memory import compiled_memory
from jremat.measure.memory_analysis import Memory, local_bytes
from jremat.measure.targets import Target
from jremat.measure.targets import target as find_target
from jremat.oom.xla_remat import SLOP_PERCENT, Recomputed, recomputed, xla_limit_bytes
from jremat.policy.shown import aligned, filled, human

MEMORY_FRACTION = 0.75
"""What JAX reserves of a GPU at the start, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
Source: https://docs.jax.dev/en/latest/gpu_memory_allocation.html"""
CONTEXT_BYTES = 640 << 20
"""CUDA's context, its libraries' kernels and cuBLAS' workspaces, outside of XLA's pool; an estimate for one process. On
an H200 the driver itself keeps 1.2 GiB of the 141 that it has, which the chip's memory here is without."""
NCCL_BYTES = 32 * 2 * (4 << 20)
"""One communicator's buffers: NCCL_BUFFSIZE, 4 MiB, for each direction of each of up to 32 channels.
Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"""
_COMMUNICATORS = 4
"""Each set of devices that talk has one: an axis of the mesh, and all of them."""


@dataclass(frozen=True)
class Launch:
    """Whether a step will launch on a device.

    Attributes:
        memory: of the step as it is written, XLA's own rematerialization off; None where XLA refuses it for its size.
        reason: why XLA refuses it.
        device_bytes: that the device has.
        pool_bytes: that the allocator reserves.
        outside_bytes: that the driver, CUDA's libraries and NCCL take beside it; an estimate.
        xla_limit_bytes: temporaries and results above which XLA recomputes by itself; None where it does not say.
        rematted: memory of the step with that recompute, where it starts.
        recomputed: what it recomputes.

    >>> found = Launch(None, 80 * 2**30, 60 * 2**30, 2**30, reason="v5e: the program does not fit")
    >>> print(found)
    does not fit: v5e: the program does not fit
    >>> found.fits, found.reserves, found.fraction
    (False, True, 0.98)
    """

    memory: Memory | None
    device_bytes: int
    pool_bytes: int
    outside_bytes: int
    xla_limit_bytes: int | None = None
    rematted: Memory | None = None
    recomputed: Recomputed | None = None
    reason: str = ""

    @property
    def needed_bytes(self) -> int:
        """Peak of the program that would run; 0 where there is none."""
        found = self.rematted or self.memory
        return found.peak_bytes if found else 0

    @property
    def reserves(self) -> bool:
        """Whether what is reserved and what is taken beside it fit the device together."""
        return self.pool_bytes + self.outside_bytes <= self.device_bytes

    @property
    def fits(self) -> bool:
        """Whether the allocator can reserve its pool, and the step fits it."""
        return self.memory is not None and self.reserves and self.needed_bytes <= self.pool_bytes

    @property
    def xla_rematerializes(self) -> bool:
        """Whether XLA starts to recompute by itself."""
        return self.recomputed is not None and self.recomputed.count > 0

    @property
    def fraction(self) -> float:
        """The largest XLA_PYTHON_CLIENT_MEM_FRACTION that leaves room for what is outside of the pool."""
        return int(100 * (1 - self.outside_bytes / self.device_bytes)) / 100

    def __str__(self) -> str:
        if self.memory is None:
            return filled(f"does not fit: {self.reason}", "  ")
        left = self.pool_bytes - self.needed_bytes
        verdict = f"{human(abs(left))} {'left' if left >= 0 else 'too much'}"
        if not self.reserves:
            verdict = "the allocator's pool and what stands outside of it exceed the device"
        rows = [("the device has", human(self.device_bytes)), ("the allocator reserves", human(self.pool_bytes))]
        rows += [("outside of it", human(self.outside_bytes))] * (self.outside_bytes > 0)
        rows += [("the step needs", human(self.memory.peak_bytes))]
        if self.rematted:
            rows += [("after XLA's own remat", human(self.rematted.peak_bytes))]
        if self.xla_limit_bytes is not None:
            rows += [
                ("temporaries and results", human(self.memory.temp_bytes + self.memory.output_bytes)),
                ("XLA recomputes above", human(self.xla_limit_bytes)),
            ]
        lines = [f"{'fits' if self.fits else 'does not fit'}: {verdict} ({self.memory.label})"]
        lines.append(aligned(rows, right=[1]))
        if self.recomputed and self.xla_rematerializes:
            time = f", {self.recomputed.seconds * 1e3:.3g} ms modelled" if self.recomputed.seconds is not None else ""
            lines.append(
                filled(
                    f"XLA recomputes {self.recomputed.count} instructions, {human(self.recomputed.nbytes)}{time}: "
                    f"{', '.join(self.recomputed.what)}; a remat policy chooses better",
                    "  ",
                )
            )
        if not self.fits and self.needed_bytes <= self.fraction * self.device_bytes:
            lines.append(f"with XLA_PYTHON_CLIENT_MEM_FRACTION={self.fraction} it fits")
        return "\n".join(lines)

    __repr__ = __str__


def check_launch(
    step: Callable[..., Any],
    *args: Any,
    target: str | Target | Path = "local",
    memory_fraction: float = MEMORY_FRACTION,
    slop_percent: int = SLOP_PERCENT,
) -> Launch:
    """Whether ``step(*args)`` will launch: what the allocator reserves, and what XLA recomputes by itself to fit.

    The step is compiled as its remat policy says, and again with XLA's own rematerialization where that starts. On a
    GPU it starts once temporaries and results exceed ``slop_percent`` of 80% of the device less arguments and results,
    whatever the allocator reserves.

    Args:
        step: a whole training step, jitted or not; compiled, never run.
        args: arrays or ``jax.ShapeDtypeStruct``, in any pytrees.
        target: a device that is described or here, see ``jremat.measure.target``.
        memory_fraction: ``XLA_PYTHON_CLIENT_MEM_FRACTION``; of GPUs only, a TPU's memory is all the program's.
        slop_percent: ``xla_gpu_memory_limit_slop_factor``.

    Returns:
        Whether it ``fits``, by what, and what XLA would recompute.

    Raises:
        ValueError: a target whose memory is unknown, a fraction or percentage out of range.
        CompileError: XLA refuses the step for another reason than its size.

    >>> import jax, jax.numpy as jnp
    >>> check_launch(jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32), target="cpu")
    Traceback (most recent call last):
    ...
    ValueError: target: cpu has no memory size to launch in; name a chip or a description's file
    """
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction: expected a share from 0 to 1, got {memory_fraction}")
    if not 0 < slop_percent < 1000:
        raise ValueError(f"slop_percent: expected a percentage from 1 to 999, got {slop_percent}")
    kind = find_target(target)
    device_bytes = kind.hbm_bytes if kind.described else local_bytes(kind)
    if device_bytes is None:
        raise ValueError(f"target: {kind.name} has no memory size to launch in; name a chip or a description's file")
    gpu = kind.platform == "cuda"  # a device that is here: the allocator's own limit is all that is known
    outside = CONTEXT_BYTES + NCCL_BYTES * _COMMUNICATORS * (kind.num_devices > 1) if gpu else 0
    pool = int(device_bytes * memory_fraction) if gpu else device_bytes
    try:
        plain = compiled_memory(step, *args, target=kind, num_buffers=0)
    except CompileError as error:
        if error.reason != "out_of_memory":
            raise
        return Launch(None, device_bytes, pool, outside, reason=str(error))
    if not gpu:
        return Launch(plain, device_bytes, pool, outside)
    limit = xla_limit_bytes(kind, plain, slop_percent)
    if plain.temp_bytes + plain.output_bytes <= limit:
        return Launch(plain, device_bytes, pool, outside, limit)
    with tempfile.TemporaryDirectory(prefix="jremat-") as folder:
        options = {
            "xla_gpu_memory_limit_slop_factor": slop_percent,
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
        }
        rematted = compiled_memory(step, *args, target=kind, num_buffers=0, xla_remat=True, compiler_options=options)
        texts = sorted(Path(folder).glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
        found = recomputed(texts[-1].read_text(), kind) if texts else None
    return Launch(plain, device_bytes, pool, outside, limit, rematted if found and found.count else None, found)
