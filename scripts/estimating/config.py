"""What an estimate is told: the flags, and the run that they describe. Nothing here imports JAX."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import policies
from jremat.estimate.config import TransformerConfig
from jremat.estimate.fit import Run
from jremat.estimate.huggingface import read
from jremat.estimate.parallel import Parallel
from jremat.policy import LayerPlan, Policy, Request
from models.config import get
from scripts.flags import BATCH, MODEL, MOST_TOKENS, Attention, Dtype, Files, Stack


@dataclass(frozen=True)
class Model:
    """A named size or a config.json, and what is changed of it."""

    model: str = MODEL
    """A size of models/config.py: gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama-1b, llama3-8b, llama3-70b, …"""
    config: Files = None
    """A Hugging Face config.json of the GPT-2, Llama, Mistral or Qwen family, in place of --model."""
    layers: int = 0
    """In place of the model's own number of layers; 0 keeps it."""
    dropout: float = -1.0
    """Dropout rate; below 0 keeps the model's own."""
    attention: Attention = "dot"
    """dot keeps an s×s array; blockwise and cudnn are fused and never have one."""
    compute_dtype: Dtype = "bfloat16"
    """Of activations and matmuls."""
    param_dtype: Dtype = "float32"
    """Of weights and gradients."""


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    batch: int = BATCH
    """Sequences that go through the model at a time, over all data replicas."""
    seq: int = 0
    """Tokens in a sequence; 0 takes the model's context, 1024 at most."""
    accumulate: int = 1
    """Micro-batches of a step."""
    loss_chunk: int = 0
    """Positions whose logits are alive at a time; 0 keeps them all."""
    optimizer: Literal["adamw", "momentum", "sgd"] = "adamw"
    """Two moments a parameter, one, or none."""
    master_weights: bool = False
    """A float32 copy of weights that are bfloat16."""
    stack: Stack = "auto"
    """What runs the layers: a scan for one policy, the executor for a plan; or either by name."""


@dataclass(frozen=True)
class Devices:
    """How the step is spread."""

    data: int = 1
    """Data replicas; they divide the batch."""
    zero: Literal[0, 1, 2, 3] = 0
    """What the replicas share out: nothing, the optimizer's state, gradients too, weights too (FSDP)."""
    tensor: int = 1
    """Devices that split heads, MLP width and vocabulary."""
    sequence: bool = False
    """Whether these split the sequence elsewhere."""
    context: int = 1
    """Devices that split the sequence everywhere."""
    pipeline: int = 1
    """Stages of layers."""
    interleave: int = 1
    """Chunks of layers a stage."""


@dataclass(frozen=True)
class Estimate:
    """What a training step needs, line by line, from a closed form: nothing is traced, compiled or run.

    One --policy gives the ledger; several --policies a line each. What is kept is exact to the byte; the peak rests on
    the assumptions that --json lists, and is within 10% of 77 steps compiled for an H200 (benchmarks/estimate_peak.py).
    """

    policy: str = "full"
    """What each block keeps for its backward pass; `python -m policies` lists the specs."""
    policies: tuple[str, ...] = ()
    """Several, a line each; `all` takes the zoo."""
    hbm: str = ""
    """Device memory, as 80GiB or a chip's name such as h200: says what fits, and what would make it fit."""
    sweep: Literal["none", "seq"] = "none"
    """seq: draw memory against the sequence's length, a line a policy, into --out."""
    textbook: bool = False
    """Beside it what the papers count for such a layer (a GELU MLP of 4h), and why the program keeps something else."""
    out: Path = Path("estimates")
    """A folder for the pictures."""
    json: Files = None
    """Write every figure there."""
    model: Model = field(default_factory=Model)
    step: Step = field(default_factory=Step)
    devices: Devices = field(default_factory=Devices)


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
    run: Run
    chosen: tuple[Policy | LayerPlan, ...]
    whole_zoo: bool
    remarks: tuple[str, ...]


def understood(flags: Estimate) -> Asked:
    """The run that the flags describe.

    Raises:
        ValueError: the first flag that is wrong.
    """
    config, remarks = read(flags.model.config) if flags.model.config else (get(flags.model.model), ())
    m, s = flags.model, flags.step
    for name, value in (("layers", m.layers), ("seq", s.seq), ("loss_chunk", s.loss_chunk)):
        if value < 0:
            raise ValueError(f"{name}: expected 0 or more, got {value}")
    config = replace(
        config,
        num_layers=m.layers or config.num_layers,
        dropout=config.dropout if m.dropout < 0 else m.dropout,
        attention=m.attention,
        compute_dtype=m.compute_dtype,
        param_dtype=m.param_dtype,
    )
    seq = s.seq or min(config.max_seq, MOST_TOKENS)
    if seq > config.max_seq:
        raise ValueError(f"seq: expected at most the model's context, {config.max_seq}, got {seq}")
    chosen, whole_zoo = _chosen(flags, config)
    run = Run(
        config=config,
        policy=chosen[0],
        batch=s.batch,
        seq=seq,
        chunk=s.loss_chunk or None,
        optimizer=s.optimizer,
        master_weights=s.master_weights,
        accumulate=s.accumulate,
        parallel=Parallel(**vars(flags.devices)),
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
    specs = flags.policies or (flags.policy,)
    if specs == ("all",):
        return zoo(), True
    chosen = []
    for spec in specs:
        policy = policies.get(spec)
        if isinstance(policy, Request):
            raise ValueError(f"policy: {spec!r} needs the planner and its trace; use scripts/plan.py")
        if isinstance(policy, LayerPlan):
            policy.resolve(config.num_layers // (flags.devices.pipeline * flags.devices.interleave) or 1)
        chosen.append(policy)
    return tuple(dict.fromkeys(chosen)), False
