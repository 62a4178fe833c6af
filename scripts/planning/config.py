"""What a planner is told: the flags. Nothing here imports JAX."""

from dataclasses import dataclass, fields
from typing import Any, Literal

import policies
from jremat.estimate.hardware import CHIPS
from scripts.benchmark.config import Case
from scripts.flags import BATCH, MODEL, Attention, Dtype, Files, check_file, check_folder


@dataclass(frozen=True)
class Planning:
    """The fastest remat plan that fits a device's memory, shown to fit by compiling the whole training step for it.

    Beside it the frontier, and named policies under the same cost model. Times are modelled, unless --measure is given.
    """

    model: str = MODEL
    """A size of models/config.py."""
    target: str = "h200"
    """cpu, local, or a device that is only described: a100 h100 h200 b200 v5e v5p v6e."""
    devices: int = 1
    """That share the batch and, cut over all of them, weights, gradients and optimizer state (FSDP)."""
    hbm: str = ""
    """Memory of each device, as 80GiB or a chip's name; without it the target's own."""
    host: str = ""
    """Pinned host memory for each device that may be used too, as 8GiB."""
    batch: int = 0
    """Sequences in a step, on all devices together; 0: 8, or the next multiple of the devices."""
    seq: int = 0
    """Tokens in a sequence; 0: the model's context, 1024 at most."""
    layers: int = 0
    """In place of the model's own number of layers; 0 keeps it."""
    attention: Attention = "dot"
    """dot keeps an s×s array; blockwise and cudnn are fused and never have one; cudnn needs its package."""
    compute_dtype: Dtype = "bfloat16"
    """Of activations and matmuls; parameters and the optimizer's state are float32."""
    loss_chunk: int = 0
    """Positions whose logits are alive at a time; 0 keeps them all."""
    objective: Literal["auto", "seconds", "flops"] = "auto"
    """What is least: modelled seconds of recompute, or its matmul FLOPs; auto: seconds where the chip is known."""
    margin: float = 0.05
    """Share of the memory to leave free."""
    compiles: int = 2
    """To confirm the plan with, more while nothing fits or a fifth of the memory is left over; 0: the prediction is the
    answer."""
    names_only: bool = False
    """Keep tagged values only, so that the plan is a save: spec that plain nn.remat runs."""
    keep: tuple[str, ...] = ()
    """Tags of values that must not be made twice."""
    named: tuple[str, ...] = ("none", "full", "dots_with_no_batch_dims_saveable", "save_only_matmuls", "dots_saveable")
    """Policies to stand beside the plan."""
    largest_batch: bool = False
    """Choose the batch too: the one that trains the most tokens a second."""
    largest_seq: bool = False
    """Choose the sequence too: the longest that fits, up to the model's context."""
    measure: bool = False
    """Time the best few plans on the device that is here (--target local) and take the one with the most tokens/s."""
    out: Files = None
    """Write the plan there, for --policy plan:PATH."""
    json: Files = None
    """Write every figure there."""
    plot: Files = None
    """A folder for the frontier's picture."""

    def check(self) -> None:
        """Refuse what no plan can come of.

        Raises:
            ValueError: the first flag that is out of range, with its value.
        """
        for name in ("batch", "seq", "layers", "loss_chunk", "compiles"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected at least 0, got {getattr(self, name)}")
        if self.devices < 1:
            raise ValueError(f"devices: expected at least 1, got {self.devices}")
        if self.batch % self.devices:
            raise ValueError(f"batch: expected a multiple of the {self.devices} devices, got {self.batch}")
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin: expected a share from 0 to 1, got {self.margin}")
        if self.largest_batch and self.largest_seq:
            raise ValueError("largest_seq: one of --largest-batch and --largest-seq can be chosen at a time")
        if self.measure and self.target != "local":
            raise ValueError(f"measure: times the device that is here, so it takes --target local, got {self.target!r}")
        for name in ("out", "json"):
            check_file(name, getattr(self, name))
        check_folder("plot", self.plot)

    @property
    def hbm_bytes(self) -> int | None:
        """Memory of each device; None: the target's own."""
        return None if not self.hbm else CHIPS[self.hbm].hbm_bytes if self.hbm in CHIPS else read_bytes("hbm", self.hbm)

    @property
    def host_bytes(self) -> int:
        """Host memory, of all devices together."""
        return read_bytes("host", self.host) * self.devices if self.host else 0

    @property
    def case(self) -> Case:
        """The training step, as the benchmark builds it."""
        taken = {field.name for field in fields(Case)} - {"target", "batch", "margin"}
        same: dict[str, Any] = {k: v for k, v in vars(self).items() if k in taken}
        name = self.target if self.devices == 1 else f"{self.target}x{self.devices}"
        return Case(**same, policy="auto", target=name, batch=self.batch or -(-BATCH // self.devices) * self.devices)


def read_bytes(flag: str, text: str) -> int:
    """``80GiB`` as bytes.

    >>> read_bytes("hbm", "1GiB")
    1073741824
    """
    try:
        return policies.parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {str(error).removeprefix('size: ')}") from None
