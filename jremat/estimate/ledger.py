"""The training ledger: every line of memory with its formula, what it scales with, and when it is alive."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Part = Literal["state", "kept", "layer", "head"]
Moment = Literal["loss", "turn", "mlp", "attention", "update"]
MOMENTS: tuple[Moment, ...] = ("loss", "turn", "mlp", "attention", "update")
"""When a step's memory can peak: at the ``loss``, where the logits and all that is kept are alive; at the ``turn`` from
forward to backward; in the backward pass of a layer's ``mlp`` or of its ``attention``, where the gradients, what is
kept and one layer's own work are; in the optimizer's ``update``."""


@dataclass(frozen=True)
class Line:
    """One line of the ledger.

    Args:
        part: ``state`` (weights, gradients, optimizer), ``kept`` (between forward and backward), ``layer`` (the layer
            that is under work), ``head`` (embedding, logits, loss).
        name: what it is.
        total_bytes: over all devices, nothing counted twice that is shared out, replicas of weights left out.
        device_bytes: on the device where the peak is highest.
        formula: of ``total_bytes``, as text, in the symbols of ``Ledger.symbols``.
        scales_with: the symbols that it grows with.
        alive: the moments at which it is held.
        on_host: in the host's memory, not in the device's.
        crosses: made by the forward pass and read by the backward pass; what ``jremat.residuals`` of the loss counts.
    """

    part: Part
    name: str
    total_bytes: int
    device_bytes: int
    formula: str
    scales_with: tuple[str, ...]
    alive: tuple[Moment, ...]
    on_host: bool = False
    crosses: bool = False


@dataclass(frozen=True)
class Ledger:
    """What training a transformer needs, line by line, without a trace.

    Args:
        lines: every line, state first.
        symbols: the value of every symbol in the formulas.
        assumptions: that the figures rest on.
        devices: over which ``total_bytes`` are spread.
        stage: of the pipeline, that the device with the highest peak is on.
        recompute_flops: matmul FLOPs that the backward pass of the layers repeats, over all devices.
        forward_flops: matmul FLOPs of the layers' forward pass.
    """

    lines: tuple[Line, ...]
    symbols: tuple[tuple[str, int], ...]
    assumptions: tuple[str, ...]
    devices: int
    stage: int
    recompute_flops: int
    forward_flops: int

    @property
    def peak_bytes(self) -> int:
        """Device memory at the moment where it is most, on the fullest device."""
        return self.bytes_at(self.peak_moment)

    @property
    def peak_moment(self) -> Moment:
        """When that is."""
        return max(MOMENTS, key=self.bytes_at)

    @property
    def kept_bytes(self) -> int:
        """What the layers keep between forward and backward, on devices and hosts, over all devices."""
        return sum(line.total_bytes for line in self.of("kept"))

    @property
    def residual_bytes(self) -> int:
        """What the whole loss keeps, embedding and head included: ``jremat.residuals(loss).total_bytes``."""
        return sum(line.total_bytes for line in self.lines if line.crosses)

    @property
    def host_bytes(self) -> int:
        """Offloaded, of one device."""
        return sum(line.device_bytes for line in self.lines if line.on_host)

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer state, of one device."""
        return sum(line.device_bytes for line in self.of("state"))

    def bytes_at(self, moment: Moment) -> int:
        """Device memory of one device at a moment."""
        return sum(line.device_bytes for line in self.lines if moment in line.alive and not line.on_host)

    def of(self, part: Part) -> tuple[Line, ...]:
        """The lines of one part."""
        return tuple(line for line in self.lines if line.part == part)

    def to_dict(self) -> dict[str, Any]:
        """Every figure, ready for JSON."""
        figures = {
            "peak_bytes": self.peak_bytes,
            "peak_moment": self.peak_moment,
            "bytes_at": {moment: self.bytes_at(moment) for moment in MOMENTS},
            "kept_bytes": self.kept_bytes,
            "residual_bytes": self.residual_bytes,
            "host_bytes": self.host_bytes,
            "state_bytes": self.state_bytes,
        }
        return figures | asdict(self) | {"symbols": dict(self.symbols)}

    def __str__(self) -> str:
        rows = [
            f"{line.device_bytes:>17,}  {line.part:<5}  {line.name:<32}  {line.formula}"
            + ("  (host)" if line.on_host else "")
            for line in self.lines
        ]
        peak = f"{self.peak_bytes:>17,}  bytes at the peak, which is at the {self.peak_moment}; predicted, not compiled"
        return "\n".join([*rows, peak])

    __repr__ = __str__


def summed(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Lines of one part, name, formula and place as one, their bytes added."""
    found: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        key = (line.part, line.name, line.formula, line.scales_with, line.alive, line.on_host, line.crosses)
        old = found.get(key)
        if old is not None:
            total, device = old.total_bytes + line.total_bytes, old.device_bytes + line.device_bytes
            line = replace(line, total_bytes=total, device_bytes=device)
        found[key] = line
    return tuple(found.values())
