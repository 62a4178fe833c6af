"""Chips: peak rates, memory and links, from the makers' sheets.

One table that every time, every MFU and every "does it fit" reads. A chip that it doesn't know is an error, never
another chip's number: measure a peak instead (``jremat.measure.measured_peak``).
"""

import dataclasses
import difflib
from collections.abc import Mapping
from types import MappingProxyType

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """What one accelerator can do at best, dense (no sparsity), one direction of each link.

    Attributes:
        name: the key in ``CHIPS``.
        device_kind: what JAX calls it (``jax.Device.device_kind``).
        bf16_flops_per_second: matrix units in bf16.
        tf32_flops_per_second: matrix units in TF32, NVIDIA's path for float32 matmuls; None where there is none.
        f32_flops_per_second: float32 on the vector units; None where the maker gives none.
        hbm_bytes: device memory that a program may hope for: what the driver reports, less than the sheet's GB.
        hbm_bytes_per_second: device memory's bandwidth.
        host_link_bytes_per_second: to the host's memory.
        chip_link_bytes_per_second: to other chips, all of a chip's links together.
        source: where the numbers are from.
    """

    name: str
    device_kind: str
    bf16_flops_per_second: float
    tf32_flops_per_second: float | None
    f32_flops_per_second: float | None
    hbm_bytes: int
    hbm_bytes_per_second: float
    host_link_bytes_per_second: float
    chip_link_bytes_per_second: float
    source: str

    def matmul_flops_per_second(self, dtype: str = "bfloat16") -> float:
        """Peak FLOP/s of a matmul in ``dtype`` at JAX's default precision.

        A float32 matmul runs as TF32 on NVIDIA GPUs and as one bf16 pass on TPUs unless a higher precision is asked
        for, so those are its peaks here.

        Raises:
            ValueError: a dtype that trains on no matrix unit of the table.

        >>> chip("h200").matmul_flops_per_second("bfloat16") / 1e12
        989.4
        >>> chip("h200").matmul_flops_per_second("float32") / 1e12
        494.7
        """
        if dtype in ("bfloat16", "float16"):
            return self.bf16_flops_per_second
        if dtype == "float32":
            return self.tf32_flops_per_second or self.bf16_flops_per_second
        raise ValueError(f"dtype: expected bfloat16, float16 or float32, got {dtype!r}")


# GPU memory is cudaMemGetInfo's total, in GiB, on a machine of that kind; TPU memory is what libtpu 0.0.42 names when a
# program does not fit (v4: the sheet's). NVLink figures on the sheets count both
# directions, so they are halved; PCIe gen 4 and 5 by 16 lanes carry 32 and 64 GB/s a direction. TPU links likewise
# from the documentation's bidirectional figure; the host link of a TPU is a share of PCIe that the documentation
# leaves out: the figures are the measured ones of jax-ml.github.io/scaling-book/tpus.
_ROWS = (
    Chip("a100", "NVIDIA A100-SXM4-80GB", 312e12, 156e12, 19.5e12, int(79.2 * GIB), 2.039e12, 32e9, 300e9,
         "NVIDIA A100 80GB data sheet (2021), SXM"),
    Chip("h100", "NVIDIA H100 80GB HBM3", 989.4e12, 494.7e12, 66.9e12, int(79.1 * GIB), 3.352e12, 64e9, 450e9,
         "NVIDIA H100 Tensor Core GPU Architecture v1.04, table 2, SXM5"),
    Chip("h100-pcie", "NVIDIA H100 PCIe", 756e12, 378e12, 51.2e12, int(79.1 * GIB), 2.039e12, 64e9, 300e9,
         "NVIDIA H100 Tensor Core GPU Architecture v1.04, table 2, PCIe"),
    Chip("h200", "NVIDIA H200", 989.4e12, 494.7e12, 66.9e12, int(139.8 * GIB), 4.8e12, 64e9, 450e9,
         "NVIDIA H200 data sheet (2024), SXM"),
    Chip("b200", "NVIDIA B200", 2250e12, 1125e12, 75e12, int(178.3 * GIB), 7.7e12, 64e9, 900e9,
         "NVIDIA HGX B200 data sheet (2025), an eighth of the board"),
    Chip("v4", "TPU v4", 275e12, None, None, 32 * GIB, 1.228e12, 16e9, 270e9,
         "cloud.google.com/tpu/docs/v4; links: jax-ml.github.io/scaling-book/tpus"),
    Chip("v5e", "TPU v5 lite", 197e12, None, None, int(15.75 * GIB), 0.819e12, 16e9, 200e9,
         "cloud.google.com/tpu/docs/v5e"),
    Chip("v5p", "TPU v5", 459e12, None, None, int(95.74 * GIB), 2.765e12, 16e9, 600e9,
         "cloud.google.com/tpu/docs/v5p"),
    Chip("v6e", "TPU v6 lite", 918e12, None, None, int(31.25 * GIB), 1.638e12, 32e9, 400e9,
         "cloud.google.com/tpu/docs/v6e"),
)  # fmt: skip

CHIPS: Mapping[str, Chip] = MappingProxyType({row.name: row for row in _ROWS})
"""Every chip that the table knows, by name."""


def chip(name: str) -> Chip:
    """The chip of that name.

    Raises:
        ValueError: an unknown name; near ones are listed.

    >>> chip("h200").hbm_bytes // GIB
    139
    >>> chip("h2000")
    Traceback (most recent call last):
    ...
    ValueError: chip: 'h2000' is not in the table; near: h200, h100, b200; known: a100, h100, h100-pcie, h200, b200, \
v4, v5e, v5p, v6e
    """
    if name in CHIPS:
        return CHIPS[name]
    near = difflib.get_close_matches(name, CHIPS, cutoff=0.5)
    hint = f"near: {', '.join(near)}; " if near else ""
    raise ValueError(f"chip: {name!r} is not in the table; {hint}known: {', '.join(CHIPS)}")


def chip_of(device_kind: str) -> Chip | None:
    """The chip that JAX calls ``device_kind``, or None where the table has no such chip.

    The name must be the whole of it: a 40 GB A100 is not the 80 GB one, a "TPU v5" not a "TPU v5 lite".

    >>> chip_of("NVIDIA H200").name
    'h200'
    >>> chip_of("TPU v5 lite").name
    'v5e'
    >>> chip_of("TPU v5p").name
    'v5p'
    >>> chip_of("cpu") is None
    True
    """
    matches = [row for row in _ROWS if device_kind == row.device_kind or device_kind in _OTHER_KINDS.get(row.name, ())]
    return matches[0] if matches else None


# Other spellings of the same chip: JAX, libtpu and XLA's descriptions differ.
_OTHER_KINDS = {
    "a100": ("NVIDIA A100 80GB SXM",),
    "h100": ("NVIDIA H100 SXM5 80GB",),
    "h200": ("NVIDIA H200 141GB HBM3e",),
    "v5e": ("TPU v5e",),
    "v5p": ("TPU v5p",),
    "v6e": ("TPU v6e",),
}
