"""What the compiler and the device say."""

from jremat.measure.buffers import Buffer
from jremat.measure.collectives import Collective, collectives_of
from jremat.measure.compile import CompileError
from jremat.measure.memory import MemoryCheck, check_memory, compiled_memory, program
from jremat.measure.memory_analysis import Memory
from jremat.measure.step import (
    DeviceMemory,
    PeakFlops,
    Throughput,
    Timing,
    device_memory,
    measured_peak,
    peak_of,
    throughput,
    time_step,
)
from jremat.measure.targets import NAMES, Target, TargetError, devices, mesh, target

__all__ = [
    "NAMES",
    "Buffer",
    "Collective",
    "CompileError",
    "DeviceMemory",
    "Memory",
    "MemoryCheck",
    "PeakFlops",
    "Target",
    "TargetError",
    "Throughput",
    "Timing",
    "check_memory",
    "collectives_of",
    "compiled_memory",
    "device_memory",
    "devices",
    "measured_peak",
    "mesh",
    "peak_of",
    "program",
    "target",
    "throughput",
    "time_step",
]
