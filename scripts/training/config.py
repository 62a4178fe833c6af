"""A training run's flags, and the checks that need nothing but the flags.

Nothing here imports JAX, so that help and a mistyped flag are answered at once.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from jremat.estimator.parallel import read_mesh
from scripts.flags import (
    BATCH,
    SMALL_MODEL,
    Accumulate,
    Attention,
    Dropout,
    Dtype,
    Heads,
    Hidden,
    Json,
    KvHeads,
    Layers,
    Mesh,
    MicroBatch,
    ModelName,
    Spec,
    Stack,
    VocabSize,
)


@dataclass(frozen=True)
class Model:
    """A named size, and what is changed of it."""

    model: ModelName = SMALL_MODEL
    layers: Layers = None
    hidden: Hidden = None
    heads: Heads = None
    kv_heads: KvHeads = None
    max_seq: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: the model's own)")] = None
    """Longest sequence, the rows of a learned position table; --seq may be as long."""
    dropout: Dropout = None
    attention: Attention = "dot"
    compute_dtype: Dtype = "auto"


@dataclass(frozen=True)
class Text:
    """What is trained on. A batch is a function of the seed and the step alone."""

    data: Annotated[
        Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="(default: Python's own library)")
    ] = None
    """A text file or a folder of text, read as bytes; or a .bin of uint16 tokens, or nanoGPT's folder of a train.bin
    and a val.bin."""
    vocab_size: VocabSize = None
    seq: Annotated[int, tyro.conf.arg(help="Tokens in a sequence.")] = 128
    micro_batch: MicroBatch = BATCH
    accumulate: Accumulate = 1
    eval_batches: int = 8
    """Micro-batches of held-out text in an evaluation, evenly spaced."""


@dataclass(frozen=True)
class Optimizer:
    """AdamW under a linear warm-up and a cosine."""

    learning_rate: float = 1e-3
    """At the warm-up's end."""
    final_rate: float = 0.1
    """Learning rate at the cosine's end, as a share of the one at its top."""
    warmup_steps: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: a tenth, at most 100)")
    ] = None
    """Steps over which the learning rate grows."""
    decay_steps: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: --steps)")] = None
    """Step at which the cosine ends. A run that is resumed with more --steps keeps its own."""
    weight_decay: float = 0.1
    """On matrices and tables; biases and norms have none."""
    beta1: float = 0.9
    """Decay of the gradient's mean."""
    beta2: float = 0.95
    """Decay of the gradient's square."""
    clip: float = 1.0
    """The gradient's largest global norm."""


@dataclass(frozen=True)
class Logging:
    """What is written and how often, in steps."""

    log_every: int = 10
    """Lines of progress where the output is no terminal; metrics.jsonl has every step."""
    eval_every: int = 100
    """Evaluations on held-out text; there is one at the end in any case."""
    snapshot_every: int = 50
    """Snapshots; there is one at the end in any case."""
    keep: Annotated[int, tyro.conf.arg(name="keep-snapshots", aliases=("--keep",))] = 3
    """Snapshots kept, newest first."""


@dataclass(frozen=True)
class Processes:
    """Several processes that train one model, on the same files; each reads its own rows of a batch."""

    coordinator: Annotated[
        str | None, tyro.conf.arg(metavar="HOST:PORT", help_behavior_hint="(default: one process alone)")
    ] = None
    """Where process 0 is found; `auto` asks SLURM, GKE or MPI, and knows the other two as well."""
    processes: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """How many there are."""
    process: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Which one this is, from 0; the first writes the log."""

    def check(self) -> None:
        """Refuse flags that don't go together.

        Raises:
            ValueError: the first such.
        """
        given = (self.processes is not None, self.process is not None)
        if self.coordinator in (None, "auto"):
            if any(given):
                raise ValueError("processes, process: they need --coordinator HOST:PORT")
        elif not all(given):
            raise ValueError("coordinator: needs --processes and --process too, or is `auto`")
        elif self.processes is not None and self.process is not None:
            _at_least("processes", self.processes, 1)
            if not 0 <= self.process < self.processes:
                raise ValueError(f"process: expected 0 to {self.processes - 1}, got {self.process}")


@dataclass(frozen=True)
class Run:
    """Train a Flax transformer on real text under a remat policy.

    The loss curve is the same under every policy; memory and time are not. Everything is written under --out. A run
    that was stopped or killed goes on by --resume --out DIR, with its own flags.
    """

    policy: Spec = "dots_saveable"
    steps: int = 200
    """Optimizer steps in all."""
    seed: int = 0
    """Of the parameters, the batches and the dropout."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/MODEL-POLICY)")] = None
    """Where the run's files go."""
    resume: bool = False
    """Go on from the newest whole snapshot under --out, with the run's own flags. Those that are given hold in their
    place: steps may be added and the policy may be another; model, text and optimizer may not."""
    json: Json = None
    stack: Stack = "auto"
    mesh: Mesh = ""
    processes: Processes = field(default_factory=Processes)
    model: Model = field(default_factory=Model)
    text: Text = field(default_factory=Text)
    optimizer: Optimizer = field(default_factory=Optimizer)
    logging: Logging = field(default_factory=Logging)

    @property
    def batch(self) -> int:
        """Sequences in a step."""
        return self.text.micro_batch * self.text.accumulate

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate's cosine ends."""
        return self.optimizer.decay_steps or self.steps

    @property
    def warmup_steps(self) -> int:
        """Steps over which the learning rate grows."""
        given = self.optimizer.warmup_steps
        return min(100, self.decay_steps // 10) if given is None else given

    def check(self) -> None:
        """Refuse flags that are wrong by themselves.

        Raises:
            ValueError: the first one, with what was expected of it.
        """
        if self.mesh:
            read_mesh(self.mesh)
        self.processes.check()
        for name, least in _LEAST.items():
            part = next(
                part for part in (self.model, self.text, self.optimizer, self.logging, self) if hasattr(part, name)
            )
            _at_least(name, getattr(part, name), least)
        for name in ("seed", "steps"):
            if getattr(self, name) > _INT32:
                raise ValueError(f"{name}: expected at most {_INT32}, got {getattr(self, name)}")
        if self.model.dropout is not None:
            _within("dropout", self.model.dropout, 0, 1, "a rate of at least 0 and below 1")
        optimizer = self.optimizer
        _within("learning_rate", optimizer.learning_rate, 0, math.inf, "a positive number", low_open=True)
        _within("clip", optimizer.clip, 0, math.inf, "a positive number", low_open=True)
        _within("weight_decay", optimizer.weight_decay, 0, math.inf, "a number of at least 0")
        _within("final_rate", optimizer.final_rate, 0, 1, "a share from 0 to 1", high_open=False)
        for name in ("beta1", "beta2"):
            _within(name, getattr(optimizer, name), 0, 1, "a number of at least 0 and below 1")
        if self.warmup_steps >= self.decay_steps:
            expected = f"fewer than the {self.decay_steps} steps of the schedule"
            raise ValueError(f"warmup_steps: expected {expected}, got {self.warmup_steps}")
        if self.resume and self.out is None:
            raise ValueError("resume: needs --out DIR, the run to go on with")


_INT32 = 2**31 - 1  # JAX's integers, unless x64 is on

# Every count among the flags, with the least that makes sense; None stands for "the default".
_LEAST = {
    "steps": 1,
    "layers": 1,
    "hidden": 1,
    "heads": 1,
    "kv_heads": 1,
    "max_seq": 1,
    "seed": 0,
    "vocab_size": 2,
    "seq": 1,
    "micro_batch": 1,
    "accumulate": 1,
    "eval_batches": 1,
    "warmup_steps": 0,
    "decay_steps": 1,
    "log_every": 1,
    "eval_every": 1,
    "snapshot_every": 1,
    "keep": 1,
}


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def _within(
    name: str, value: Any, low: float, high: float, expected: str, low_open: bool = False, high_open: bool = True
) -> None:
    above = value > low if low_open else value >= low
    below = value < high if high_open else value <= high
    if not (above and below):
        raise ValueError(f"{name}: expected {expected}, got {value}")
