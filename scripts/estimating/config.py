"""The flags of an estimate, and the run that they describe."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

import policies
from jremat.estimator.config import TransformerConfig
from jremat.estimator.huggingface import read
from jremat.estimator.parallel import Parallel, read_mesh
from jremat.estimator.training_step import TrainingStep
from jremat.planner.request import Request
from jremat.policy import LayerPlan, Policy
from jremat.policy.files import check_file, check_folder
from models.config import get
from scripts.flags import (
    BATCH,
    MODEL,
    MOST_TOKENS,
    Accumulate,
    Attention,
    Batch,
    Dropout,
    Dtype,
    Files,
    Hbm,
    Json,
    Layers,
    LossChunk,
    Mesh,
    ModelName,
    Seq,
    Specs,
    Stack,
    dtype_on,
)


@dataclass(frozen=True)
class Model:
    """A named size or a config.json, and what is changed of it."""

    model: ModelName = MODEL
    config: Files = None
    """A Hugging Face config.json of the GPT-2, Llama, Mistral or Qwen family, in place of --model."""
    layers: Layers = None
    dropout: Dropout = None
    attention: Attention = "dot"
    compute_dtype: Dtype = "auto"
    param_dtype: Literal["bfloat16", "float32"] = "float32"
    """Of weights and gradients."""


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    batch: Batch = BATCH
    seq: Seq = None
    accumulate: Accumulate = 1
    loss_chunk: LossChunk = 0
    optimizer: Literal["adamw", "momentum", "sgd"] = "adamw"
    """Two moments a parameter, one, or none."""
    master_weights: bool = False
    """A float32 copy of weights that are bfloat16."""
    stack: Stack = "auto"


@dataclass(frozen=True)
class Estimate:
    """What a training step needs, line by line, each with its formula: read off its program, nothing compiled or run.

    One policy gives the ledger; several a line each, `all` the zoo. With --hbm it says what fits, and what would make
    it fit. What is kept is exact to the byte; the peak rests on the assumptions that --json lists, and is within 5% of
    77 steps compiled for an H200 (benchmarks/estimate_peak.py).
    """

    policies: Specs = ("full",)
    hbm: Hbm = None
    sweep: Literal["none", "seq"] = "none"
    """seq: draw memory against the sequence's length, a line a policy, into --plot."""
    textbook: bool = False
    """Beside it what the papers count for such a layer (a GELU MLP of 4h), and why the program keeps something else."""
    plot: Annotated[
        Path | None,
        tyro.conf.arg(
            metavar="DIR",
            help="Draw pictures into this folder.",
            help_behavior_hint="(default: estimates)",
            aliases=("--out",),
        ),
    ] = None
    json: Json = None
    model: Model = field(default_factory=Model)
    step: Step = field(default_factory=Step)
    mesh: Mesh = ""

    @property
    def parallel(self) -> Parallel:
        """How the step is spread."""
        return read_mesh(self.mesh) if self.mesh else Parallel()


@dataclass(frozen=True)
class Asked:
    """The flags, understood.

    Args:
        name: of the model.
        run: under the first policy.
        chosen: the policies, each once.
        whole_zoo: whether they are all that there are, so that one that doesn't fit the block is no mistake.
        remarks: on what of the input was left out.
    """

    name: str
    run: TrainingStep
    chosen: tuple[Policy | LayerPlan, ...]
    whole_zoo: bool
    remarks: tuple[str, ...]


def understood(flags: Estimate) -> Asked:
    """The run that the flags describe.

    Raises:
        ValueError: the first flag that is wrong.
    """
    m, s = flags.model, flags.step
    if m.config and m.model != MODEL:
        raise ValueError(f"model: of no use here, --config describes the model; got {m.model!r}")
    config, remarks = read(flags.model.config) if flags.model.config else (get(flags.model.model), ())
    for name, value in (("layers", m.layers), ("seq", s.seq), ("loss_chunk", s.loss_chunk)):
        if value is not None and value < 0:
            raise ValueError(f"{name}: expected 0 or more, got {value}")
    if flags.plot and flags.sweep == "none":
        raise ValueError("plot: memory against the sequence's length is drawn, so it takes --sweep seq")
    check_file("json", flags.json)
    check_folder("plot", flags.plot)
    config = replace(
        config,
        num_layers=m.layers or config.num_layers,
        dropout=config.dropout if m.dropout is None else m.dropout,
        attention=m.attention,
        compute_dtype=dtype_on(m.compute_dtype, ""),
        param_dtype=m.param_dtype,
    )
    seq = s.seq or min(config.max_seq, MOST_TOKENS)
    if seq > config.max_seq:
        raise ValueError(f"seq: expected at most the model's context, {config.max_seq}, got {seq}")
    chosen, whole_zoo = _chosen(flags, config)
    run = TrainingStep(
        config=config,
        policy=chosen[0],
        batch=s.batch,
        seq=seq,
        chunk=s.loss_chunk or None,
        optimizer=s.optimizer,
        master_weights=s.master_weights,
        accumulate=s.accumulate,
        parallel=flags.parallel,
        stack=s.stack,
    )
    name = str(flags.model.config) if flags.model.config else flags.model.model
    return Asked(name, run, chosen, whole_zoo, remarks)


def zoo() -> tuple[Policy | LayerPlan, ...]:
    """Every policy and plan that is one without more shapes, each once, under its first name."""
    found: dict[Policy | LayerPlan, None] = {}
    for spec in policies.names():
        policy = policies.get(spec)
        if not isinstance(policy, Request):
            found.setdefault(policy)
    return tuple(found)


def _chosen(flags: Estimate, config: TransformerConfig) -> tuple[tuple[Policy | LayerPlan, ...], bool]:
    specs = flags.policies
    if not specs:
        raise ValueError("policies: expected at least one")
    if specs == ("all",):
        return zoo(), True
    chosen = []
    for spec in specs:
        policy = policies.get(spec)
        if isinstance(policy, Request):
            raise ValueError(f"policy: {spec!r} needs the planner and its trace; use scripts/plan.py")
        if isinstance(policy, LayerPlan):
            policy.resolve(flags.parallel.layers_on(0, config.num_layers))
        chosen.append(policy)
    return tuple(dict.fromkeys(chosen)), False
