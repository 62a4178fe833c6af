"""The training ledger: what is alive at the peak and what is kept, line by line, with formulas."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from jremat.policy.shown import filled

Optimizer = Literal["adamw", "momentum", "sgd"]
Part = Literal["state", "kept", "layer", "head", "other"]
Phase = Literal["forward", "head", "recompute", "backward", "update"]
PHASES: tuple[Phase, ...] = ("forward", "head", "recompute", "backward", "update")
"""Of a training step: the loss; the backward pass of the loss and the head; what the layers' backward pass recomputes;
that backward pass itself; the optimizer."""


@dataclass(frozen=True)
class Line:
    """One line of the ledger.

    Args:
        part: ``state`` (weights, gradients, optimizer), ``kept`` (between forward and backward), ``layer`` (the work of
            the layer that runs), ``head`` (logits and loss), ``other`` (the batch, collectives).
        name: what it is.
        total_bytes: over all devices, nothing counted twice that is shared out, replicas of weights left out.
        device_bytes: on the device where the peak is highest.
        formula: of ``total_bytes``, in the letters of ``Ledger.symbols``.
        on_host: in the host's memory, not in the device's.
    """

    part: Part
    name: str
    total_bytes: int
    device_bytes: int
    formula: str
    on_host: bool = False


@dataclass(frozen=True)
class Ledger:
    """What a training step needs, read off its program.

    Args:
        lines: all that is alive at the peak; their ``device_bytes`` sum to ``peak_bytes``.
        kept: what the layers keep between forward and backward, to the byte: the rows of ``jremat.residuals``.
        symbols: the value of every letter in the formulas.
        assumptions: that the figures rest on.
        devices: over which ``total_bytes`` are spread.
        stage: of the pipeline, that the device with the highest peak is on.
        recompute_flops: matmul FLOPs that the backward pass of the layers repeats, over all devices.
        forward_flops: matmul FLOPs of the layers' forward pass.
        peak_phase: when the peak is.
        phase_bytes: the most in each phase.
        state_bytes: weights, gradients and optimizer state, of one device.
    """

    lines: tuple[Line, ...]
    kept: tuple[Line, ...]
    symbols: tuple[tuple[str, int], ...]
    assumptions: tuple[str, ...]
    devices: int
    stage: int
    recompute_flops: int
    forward_flops: int
    peak_phase: Phase
    phase_bytes: tuple[tuple[Phase, int], ...]
    state_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Device memory at the step where it is most, on the fullest device."""
        return sum(line.device_bytes for line in self.lines)

    @property
    def kept_bytes(self) -> int:
        """What the layers keep between forward and backward, on devices and hosts, over all devices."""
        return sum(line.total_bytes for line in self.kept)

    @property
    def host_bytes(self) -> int:
        """Offloaded, of one device."""
        return sum(line.device_bytes for line in self.kept if line.on_host)

    def to_dict(self) -> dict[str, Any]:
        """Every figure, ready for JSON."""
        figures = {"peak_bytes": self.peak_bytes, "kept_bytes": self.kept_bytes, "host_bytes": self.host_bytes}
        return asdict(self) | figures | {"symbols": dict(self.symbols), "phase_bytes": dict(self.phase_bytes)}

    def __str__(self) -> str:
        rows = [f"{line.device_bytes:>17,}  {line.part:<5}  {line.name:<32}  {line.formula}" for line in self.lines]
        peak = f"{self.peak_bytes:>17,}  bytes at the peak, in the {self.peak_phase}; predicted, not compiled"
        return "\n".join([*(filled(row, "    ") for row in rows), peak])

    __repr__ = __str__
