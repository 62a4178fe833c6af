"""What the compiler and the device say."""

from jremat.measure.buffers import Buffer
from jremat.measure.compile import CompileError
from jremat.measure.memory import Fit, Memory, fits, memory
from jremat.measure.targets import NAMES, Target, TargetError, devices, mesh, target

__all__ = [
    "NAMES",
    "Buffer",
    "CompileError",
    "Fit",
    "Memory",
    "Target",
    "TargetError",
    "devices",
    "fits",
    "memory",
    "mesh",
    "target",
]
