"""Time of a step on the device that is here, and how well it uses it."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jremat.estimator.hardware import chip_of
from jremat.policy.shown import aligned, human, human_flops, human_seconds


@dataclasses.dataclass(frozen=True)
class Timing:
    """Wall time of one step, again and again, each waited for.

    Attributes:
        first_seconds: of the first call, tracing and compiling included.
        seconds: of each timed call after the warm-up.
    """

    first_seconds: float
    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        """Of the timed calls."""
        return statistics.median(self.seconds)

    @property
    def spread_seconds(self) -> float:
        """Between the quartiles of the timed calls; the slowest and fastest quarters are left out.

        >>> Timing(1.0, (1.0, 2.0, 3.0, 4.0, 100.0)).spread_seconds
        2.0
        """
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return high - low

    def __str__(self) -> str:
        spread = f"{human_seconds(self.spread_seconds)} between quartiles"
        return (
            f"step {human_seconds(self.median_seconds)} measured, median of {len(self.seconds)}, {spread}; first call "
            f"{human_seconds(self.first_seconds)}"
        )

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class PeakFlops:
    """The FLOP/s that a utilization is a share of.

    Attributes:
        flops_per_second: of one device.
        source: the chip in the table, or ``measured matmul``.
    """

    flops_per_second: float
    source: str

    def __str__(self) -> str:
        return f"{human_flops(self.flops_per_second)}/s ({self.source})"

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class Throughput:
    """A step's speed, in tokens and as a share of what the devices could do.

    Compare policies by ``tokens_per_second`` or MFU. HFU counts recomputed matmuls as useful work: it goes up with
    more remat, and says only how busy the matrix units are.

    Attributes:
        step_seconds: median.
        spread_seconds: between quartiles.
        tokens_per_second: of all devices together.
        mfu_full: model FLOPs by PaLM's convention (causal attention counted as if full) over the peak.
        mfu_half: by Megatron's (half of that attention).
        hfu: all matmul FLOPs that the program does over the peak.
        peak: what they are a share of.
    """

    step_seconds: float
    spread_seconds: float
    tokens_per_second: float
    mfu_full: float
    mfu_half: float
    hfu: float
    peak: PeakFlops

    def __str__(self) -> str:
        spread = f"measured, {human_seconds(self.spread_seconds)} between quartiles"
        rows = [
            ("step", human_seconds(self.step_seconds), spread),
            ("tokens/s", f"{self.tokens_per_second:,.0f}", "of all devices"),
            ("MFU", f"{self.mfu_full:.1%}", f"of {self.peak}, causal attention counted full"),
            ("MFU", f"{self.mfu_half:.1%}", "causal attention counted half"),
            ("HFU", f"{self.hfu:.1%}", "recompute included"),
        ]
        return aligned(rows, right=[1])

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """What a device's allocator says of itself, in bytes; a figure that it does not report is None.

    Four figures that are easily taken for each other: what live arrays and running programs hold now, the most that
    they ever held in this process, what the allocator has taken from the driver, and the largest block that it could
    still give in one piece.

    Attributes:
        in_use_bytes: held now.
        peak_bytes: the most ever held since the process began; it cannot be reset.
        reserved_bytes: taken from the driver, whether used or not (JAX takes 75% of a GPU at the start).
        limit_bytes: the most that the allocator will take.
        largest_free_block_bytes: in one piece.
    """

    in_use_bytes: int
    peak_bytes: int | None
    reserved_bytes: int | None
    limit_bytes: int | None
    largest_free_block_bytes: int | None

    @property
    def fragmented_bytes(self) -> int | None:
        """Free, but not in the largest piece: a program may fail for this while its activations would fit.

        >>> DeviceMemory(60, 80, 100, 100, 30).fragmented_bytes
        10
        """
        if self.limit_bytes is None or self.largest_free_block_bytes is None:
            return None
        return max(0, self.limit_bytes - self.in_use_bytes - self.largest_free_block_bytes)

    def __str__(self) -> str:
        figures = {"in use": self.in_use_bytes, "peak": self.peak_bytes, "reserved": self.reserved_bytes}
        figures |= {"limit": self.limit_bytes, "largest free": self.largest_free_block_bytes}
        return aligned([(k, human(n), "by the device's allocator") for k, n in figures.items() if n is not None], [1])

    __repr__ = __str__


def time_step(
    step: Callable[..., Any],
    *args: Any,
    steps: int = 10,
    warmup: int = 2,
    advance: Callable[[Any, tuple[Any, ...]], tuple[Any, ...]] = lambda result, args: args,
    on_step: Callable[[int], None] = lambda done: None,
) -> Timing:
    """Run a step and time it: ``warmup`` calls untimed, then ``steps`` calls, each waited for on the device.

    Args:
        step: jitted; an unjitted one is timed as it is, op by op.
        args: of the first call.
        steps, warmup: how many, at least 1 each; the first call compiles.
        advance: the next call's arguments from a call's result and arguments. A step that donates its state needs
            it: ``advance=lambda result, args: (result[0], *args[1:])``.
        on_step: called with how many of the ``warmup + steps`` calls are done.

    Raises:
        ValueError: ``steps`` or ``warmup`` below 1, or arguments that an earlier call took over.

    >>> timing = time_step(jax.jit(lambda x: x @ x), jnp.ones((8, 8)), steps=3)
    >>> len(timing.seconds), timing.first_seconds > timing.median_seconds > 0
    (3, True)
    """
    if steps < 1 or warmup < 1:
        raise ValueError(f"steps, warmup: expected at least 1 of each, got {steps} and {warmup}")
    jax.block_until_ready(args)
    seconds = []
    for done in range(warmup + steps):
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(args)):
            raise ValueError(f"args: call {done} of the step took an argument over (donation); give `advance`")
        start = time.perf_counter()
        result = jax.block_until_ready(step(*args))
        seconds.append(time.perf_counter() - start)
        args = advance(result, args)
        del result  # or its memory is held while the next call runs
        on_step(done + 1)
    return Timing(seconds[0], tuple(seconds[warmup:]))


def throughput(
    timing: Timing,
    *,
    tokens: int,
    model_flops: int,
    model_flops_half: int,
    total_flops: int,
    peak: PeakFlops,
    num_devices: int = 1,
) -> Throughput:
    """Tokens and FLOPs of one step over its median time.

    Args:
        timing: of the step.
        tokens: in one step, all devices together.
        model_flops, model_flops_half: of one step without recompute, causal attention counted full and half:
            ``jremat.flops``'s ``model`` and ``model_half``, or closed forms.
        total_flops: that the program does: ``jremat.flops``'s ``total``. Counted, never assumed.
        peak: of one device: ``peak_of``.
        num_devices: that share the step.

    Returns:
        Tokens per second, MFU by both conventions, HFU.

    Raises:
        ValueError: more model FLOPs by half than in full.

    >>> found = throughput(Timing(9.0, (2.0,)), tokens=8, model_flops=60, model_flops_half=50, total_flops=80,
    ...                    peak=PeakFlops(100.0, "a chip"))
    >>> found.tokens_per_second, found.mfu_full, found.mfu_half, found.hfu
    (4.0, 0.3, 0.25, 0.4)
    """
    if not 0 <= model_flops_half <= model_flops:
        raise ValueError(f"flops: expected model_flops_half <= model_flops, got {model_flops_half} and {model_flops}")
    seconds = timing.median_seconds
    possible = seconds * peak.flops_per_second * num_devices
    return Throughput(
        step_seconds=seconds,
        spread_seconds=timing.spread_seconds,
        tokens_per_second=tokens / seconds,
        mfu_full=model_flops / possible,
        mfu_half=model_flops_half / possible,
        hfu=total_flops / possible,
        peak=peak,
    )


def peak_of(device: jax.Device, dtype: str) -> PeakFlops:
    """The matmul peak of a device: its chip's in the table, or measured where the table does not know it."""
    chip = chip_of(device.device_kind)
    if chip is None:
        return PeakFlops(measured_peak(dtype, device=device), "measured matmul")
    return PeakFlops(chip.matmul_flops_per_second(dtype), chip.name)


def measured_peak(dtype: str = "float32", *, size: int | None = None, device: jax.Device | None = None) -> float:
    """FLOP/s of the fastest of some square matmuls on a device: what a chip that no table knows can reach.

    Args:
        dtype: of both operands and the result.
        size: rows and columns; by default 1024 on a CPU and 8192 elsewhere, large enough to be bound by arithmetic.
        device: the default one where None.

    >>> measured_peak(size=128) > 0
    True
    """
    device = device or jax.local_devices()[0]
    size = size or (1024 if device.platform == "cpu" else 8192)
    repeats = 4
    x = jax.device_put(jnp.full((size, size), 1 / size, dtype), device)  # x @ x is x: the values stay in range
    chain = jax.jit(lambda x: jax.lax.fori_loop(0, repeats, lambda _, y: y @ x, x))
    return repeats * 2 * size**3 / min(time_step(chain, x, steps=8, warmup=2).seconds)


def device_memory(device: jax.Device | None = None) -> DeviceMemory | None:
    """What the device's allocator reports, or None where it reports nothing (a CPU)."""
    stats = (device or jax.local_devices()[0]).memory_stats()
    if not stats:
        return None
    return DeviceMemory(
        in_use_bytes=stats["bytes_in_use"],
        peak_bytes=stats.get("peak_bytes_in_use"),
        reserved_bytes=stats.get("pool_bytes", stats.get("bytes_reserved")),
        limit_bytes=stats.get("bytes_limit"),
        largest_free_block_bytes=stats.get("largest_free_block_bytes"),
    )
