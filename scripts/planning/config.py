"""The flags of a plan. Nothing here imports JAX."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import tyro

from jremat.estimator.hardware import CHIPS
from jremat.estimator.parallel import Parallel, read_mesh
from jremat.policy.files import check_file, check_folder
from scripts.benchmark.config import Case
from scripts.flags import (
    BATCH,
    MODEL,
    Attention,
    Dtype,
    Files,
    Hbm,
    Json,
    Layers,
    LossChunk,
    Margin,
    Mesh,
    ModelName,
    PlannedBatch,
    Plot,
    Seq,
    TargetName,
    read_bytes,
)

_GPUS_OF_A_HOST = 8  # of an HGX or DGX system of NVIDIA's, A100 to B200


@dataclass(frozen=True)
class Planning:
    """The fastest remat plan that fits a device's memory, shown to fit by compiling the whole training step for it.

    Beside it the frontier, and named policies under the same cost model. Times are modelled, unless --measure is given.
    """

    model: ModelName = MODEL
    target: TargetName = "h200"
    devices: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: those of --mesh, or 1)")
    ] = None
    """How many, as --mesh says or by FSDP."""
    mesh: Mesh = ""
    hbm: Hbm = None
    host: Annotated[str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="(default: none)")] = None
    """Pinned host memory for each device that may be used too, as 8GiB."""
    batch: PlannedBatch = None
    seq: Seq = None
    layers: Layers = None
    attention: Attention = "dot"
    compute_dtype: Dtype = "auto"
    loss_chunk: LossChunk = 0
    objective: Literal["auto", "seconds", "flops"] = "auto"
    """What is least: modelled seconds of recompute, or its matmul FLOPs; auto: seconds where the chip is known."""
    margin: Margin = 0.05
    compiles: int = 2
    """To confirm the plan with, more while nothing fits or a fifth of the memory is left over; 0: the prediction is the
    answer."""
    names_only: bool = False
    """Keep tagged values only, so that the plan is a save: spec that plain nn.remat runs."""
    keep: Annotated[
        tuple[str, ...],
        tyro.conf.arg(name="keep-tags", aliases=("--keep",), metavar="TAG …", help_behavior_hint="(default: none)"),
    ] = ()
    """Tags of values that must not be recomputed."""
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
    json: Json = None
    plot: Plot = None

    def check(self) -> None:
        """Refuse what no plan can come of.

        Raises:
            ValueError: the first flag that is out of range, with its value.
        """
        for name in ("batch", "seq", "layers", "loss_chunk", "compiles"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name}: expected at least 0, got {getattr(self, name)}")
        if self.devices is not None and self.devices < 1:
            raise ValueError(f"devices: expected at least 1, got {self.devices}")
        parallel = self.parallel
        if self.devices not in (None, parallel.devices):
            raise ValueError(f"mesh: {parallel} takes {parallel.devices} devices, --devices says {self.devices}")
        if self.batch is not None and self.batch % parallel.batch_shards:
            raise ValueError(
                f"batch: expected a multiple of the {parallel.batch_shards} devices that share it, got {self.batch}"
            )
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
    def parallel(self) -> Parallel:
        """How the step is spread over devices."""
        return read_mesh(self.mesh) if self.mesh else Parallel(fsdp=self.devices or 1)

    @property
    def hbm_bytes(self) -> int | None:
        """Memory of each device; None: the target's own."""
        return read_bytes("hbm", self.hbm)

    @property
    def host_bytes(self) -> int:
        """Host memory, of all devices together."""
        return (read_bytes("host", self.host) or 0) * self.parallel.devices

    @property
    def case(self) -> Case:
        """The training step, as the benchmark builds it."""
        taken = {field.name for field in fields(Case)} - {"target", "batch", "margin", "seq", "layers"}
        same: dict[str, Any] = {k: v for k, v in vars(self).items() if k in taken}
        parallel = self.parallel
        hosts, more = divmod(parallel.devices, _GPUS_OF_A_HOST)
        gpu = self.target in CHIPS and CHIPS[self.target].tf32_flops_per_second is not None
        name = self.target if parallel.devices == 1 else f"{self.target}x{parallel.devices}"
        name = f"{self.target}x{_GPUS_OF_A_HOST}x{hosts}" if gpu and hosts > 1 and not more else name
        batch = self.batch or -(-BATCH // parallel.batch_shards) * parallel.batch_shards
        size = {"batch": batch, "seq": self.seq or 0, "layers": self.layers or 0}
        return Case(**same | size, policy="auto", target=name)
