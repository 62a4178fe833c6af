"""The flags of a benchmark, and the cases that they make.

Nothing here imports JAX: the cases run in processes of their own, and help is answered at once.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from jremat.estimator.parallel import read_mesh
from jremat.policy.files import check_file, check_folder
from scripts.flags import (
    BATCH,
    SMALL_MODEL,
    Attention,
    Batches,
    Dtype,
    Files,
    Hbm,
    Json,
    Layers,
    LossChunk,
    Margin,
    Mesh,
    Minutes,
    ModelNames,
    Plot,
    Seqs,
    Specs,
    Stack,
    TargetNames,
    read_bytes,
)


@dataclass(frozen=True)
class Bench:
    """Memory, FLOPs and, where the device is here, time of training steps under remat policies.

    Every combination of model, policy, batch, sequence and target is one case and one row. Rows are written to --json
    as they land, and a file that is there is continued.
    """

    model: ModelNames = (SMALL_MODEL,)
    policies: Specs = ("none", "full", "dots_saveable", "save_only_matmuls")
    target: TargetNames = ("local",)
    mesh: Mesh = ""
    target_config: Files = None
    """A GPU's description in XLA's text form, in place of --target."""
    batch: Batches = (BATCH,)
    seq: Seqs = ()
    layers: Layers = None
    attention: Attention = "dot"
    compute_dtype: Dtype = "auto"
    loss_chunk: LossChunk = 0
    step: Literal["train", "gradient"] = "train"
    """train: gradient and AdamW on a donated state; gradient: value and gradient alone."""
    stack: Stack = "auto"
    compile_only: bool = False
    """Don't run, also where the device is here."""
    steps: int = 10
    """Timed steps."""
    warmup: int = 2
    """Steps before them."""
    largest_batch: bool = False
    """Find for each policy the largest batch that fits the target's memory; --batch is where the search starts."""
    margin: Margin = 0.05
    hbm: Hbm = None
    xla_remat: bool = False
    """Leave XLA's own rematerialization on."""
    timeout_seconds: float = 900.0
    """A case that takes longer is stopped and noted."""
    json: Json = None
    plot: Plot = None
    profile: Files = None
    """A folder for a trace of one step of each case that runs, for XProf."""
    suite: Literal["none", "gpu"] = "none"
    """gpu: a prepared list of cases for one NVIDIA GPU, in place of the flags above that make cases."""
    suite_size: Literal["whole", "small"] = "whole"
    """small rehearses the suite on any machine."""
    minutes: Minutes = 8.0

    def check(self) -> None:
        """Refuse what no case can come of.

        Raises:
            ValueError: the first flag that is out of range, with its value.
        """
        for name in ("model", "policies", "target", "batch"):
            if not getattr(self, name):
                raise ValueError(f"{name}: expected at least one")
        for name, values in (
            ("batch", self.batch),
            ("seq", self.seq),
            ("steps", (self.steps,)),
            ("warmup", (self.warmup,)),
        ):
            if any(value < 1 for value in values):
                raise ValueError(f"{name}: expected at least 1, got {min(values)}")
        for name in ("layers", "loss_chunk"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name}: expected at least 0, got {getattr(self, name)}")
        if self.margin != Bench.margin and not self.largest_batch:
            raise ValueError("margin: only --largest-batch leaves a margin")
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin: expected a share from 0 to 1, got {self.margin}")
        if not (self.timeout_seconds > 0 and self.minutes > 0):
            raise ValueError("timeout_seconds, minutes: expected more than 0")
        if self.profile and self.compile_only:
            raise ValueError("profile: a step must run to be traced, and --compile-only runs none")
        self._check_of_use()
        if self.mesh:
            read_mesh(self.mesh)
        read_bytes("hbm", self.hbm)
        check_file("json", self.json)
        check_folder("plot", self.plot)

    def _check_of_use(self) -> None:
        """Refuse a flag that would do nothing."""
        given = {f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        if self.suite == "gpu":
            for name in sorted(given - {"suite", "suite_size", "minutes", "timeout_seconds", "json", "plot"}):
                raise ValueError(f"{name}: of no use here, --suite gpu has its own cases")
        for name in sorted(given & {"suite_size", "minutes"}) if self.suite == "none" else ():
            raise ValueError(f"{name}: of no use without --suite gpu")
        for name in sorted(given & {"steps", "warmup"}) if self.compile_only else ():
            raise ValueError(f"{name}: of no use here, --compile-only runs no step")
        if {"target", "target_config"} <= given:
            raise ValueError("target: of no use here, --target-config describes the device")


@dataclass(frozen=True)
class Case:
    """One row's worth: a step of one model under one policy on one target.

    Attributes:
        seq: 0 is the model's context, 1024 at most.
        largest_batch: search from ``batch`` on for the largest that fits.
        mesh: how the step is spread over the target's devices; nothing: by FSDP over all of them.
        described: a target to compile for too before the case runs, so that figures with and without the device stand
            side by side; nothing for none.
    """

    model: str
    policy: str
    target: str
    batch: int
    seq: int = 0
    layers: int = 0
    attention: str = "dot"
    compute_dtype: str = "auto"
    loss_chunk: int = 0
    step: str = "train"
    stack: str = "auto"
    compile_only: bool = False
    steps: int = 10
    warmup: int = 2
    largest_batch: bool = False
    margin: float = 0.05
    memory_bytes: int = 0
    xla_remat: bool = False
    profile: str = ""
    described: str = ""
    mesh: str = ""

    @property
    def key(self) -> str:
        """Sixteen hex digits that are equal for equal cases; where a trace of it goes is no part of a case."""
        fields = dataclasses.asdict(self) | {"profile": ""}
        if not self.mesh:  # as before there were meshes
            del fields["mesh"]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """For people: ``gpt2 full b=4 s=1024 on h200``."""
        seq = f" s={self.seq}" if self.seq else ""
        return f"{self.model} {self.policy} b={self.batch}{seq} on {self.target}" + (
            f", {self.mesh}" if self.mesh else ""
        )


def cases(bench: Bench) -> Iterator[Case]:
    """The cases that the flags make, policies of one model beside each other."""
    taken = {field.name for field in dataclasses.fields(Case)}
    same: dict[str, Any] = {k: v for k, v in vars(bench).items() if k in taken}
    targets = (str(bench.target_config),) if bench.target_config else bench.target
    for target, model, seq, batch, policy in itertools.product(
        targets, bench.model, bench.seq or (0,), bench.batch, bench.policies
    ):
        yield Case(**same | {"model": model, "policy": policy, "target": target, "batch": batch, "seq": seq,
                             "layers": bench.layers or 0, "memory_bytes": read_bytes("hbm", bench.hbm) or 0,
                             "profile": str(bench.profile or "")})  # fmt: skip
