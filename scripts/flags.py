"""What several scripts take: each flag once, with its type, its help and its default, so that it means the same.

A script's config takes a flag by annotating a field with its type here: ``batch: Batch = BATCH``. Where nothing is
said, every script speaks of a step of eight sequences, of the model's context but 1024 tokens at most, with attention
that materialises its scores, computed in bfloat16 (float32 where it runs on a CPU): of GPT-2 in those that run nothing
(estimate, explain, plan), of a tiny model in those that run it here (train, bench). ``scripts/train.py`` alone takes
128 tokens, so that a run on any machine is over soon.

Exit codes are the same too: 0 done; 1 the answer is no (nothing fits, nothing came out, something that must hold
doesn't); 2 something that the user can put right, named in one line; 130 stopped by Ctrl-C.
"""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

import policies
from jremat.command.estimate import Mesh as Mesh
from jremat.estimator.hardware import CHIPS

MODEL, SMALL_MODEL = "gpt2", "tiny"
BATCH = 8
MOST_TOKENS = 1024
"""Of a sequence, where the model's context is longer and no length is asked for."""

_MODEL = "A size of models/config.py: tiny, tiny-llama, gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama-1b, llama3-8b, …"
_POLICY = "What each layer keeps for its backward pass, or a plan over layers; `python -m policies` lists the specs."
_TARGET = "cpu, local, or a device that is only described: a100 h100 h200 b200 v5e v5p v6e, also several as h200x8."
_BATCH = "Sequences that go through the model at a time, on all devices together."
_SEQ = "Tokens in a sequence."
_OWN = "(default: the model's own)"
_CONTEXT = "(default: the model's context, 1024 at most)"

ModelName = Annotated[str, arg(metavar="NAME", help=_MODEL)]
ModelNames = Annotated[tuple[str, ...], arg(metavar="NAME …", help=_MODEL)]
Spec = Annotated[str, arg(metavar="SPEC", help=_POLICY)]
Specs = Annotated[tuple[str, ...], arg(metavar="SPEC …", help=_POLICY, aliases=("--policy",))]
OtherSpec = Annotated[
    str | None,
    arg(metavar="SPEC", help="A second policy: what changes from the first to it.", help_behavior_hint="(optional)"),
]
TargetName = Annotated[str, arg(metavar="NAME", help=_TARGET)]
TargetNames = Annotated[tuple[str, ...], arg(metavar="NAME …", help=_TARGET)]
Batch = Annotated[int, arg(help=_BATCH)]
MicroBatch = Annotated[int, arg(help=_BATCH, name="batch", aliases=("--micro-batch",))]
"""Training's, whose batch is that times ``--accumulate``."""
Batches = Annotated[tuple[int, ...], arg(metavar="INT …", help=_BATCH)]
PlannedBatch = Annotated[
    int | None, arg(metavar="INT", help=_BATCH, help_behavior_hint="(default: 8, or the next multiple of the devices)")
]
Seq = Annotated[int | None, arg(metavar="INT", help=_SEQ, help_behavior_hint=_CONTEXT)]
Seqs = Annotated[tuple[int, ...], arg(metavar="INT …", help=_SEQ, help_behavior_hint=_CONTEXT)]
Accumulate = Annotated[int, arg(help="Micro-batches whose gradients are averaged into one step.")]
Layers = Annotated[int | None, arg(metavar="INT", help="Number of layers.", help_behavior_hint=_OWN)]
Hidden = Annotated[
    int | None,
    arg(metavar="INT", help="Width of the residual stream; the MLP keeps its ratio to it.", help_behavior_hint=_OWN),
]
Heads = Annotated[
    int | None, arg(metavar="INT", help="Attention heads; must divide the width.", help_behavior_hint=_OWN)
]
KvHeads = Annotated[
    int | None, arg(metavar="INT", help="Key and value heads; must divide the heads.", help_behavior_hint=_OWN)
]
VocabSize = Annotated[int | None, arg(metavar="INT", help="Tokens that the model knows.", help_behavior_hint=_OWN)]
Dropout = Annotated[
    float | None, arg(metavar="RATE", help="Dropout rate, at least 0 and below 1.", help_behavior_hint=_OWN)
]
Attention = Annotated[
    Literal["dot", "blockwise", "cudnn"],
    arg(help="dot keeps an s×s array; blockwise and cudnn never have one; cudnn needs an NVIDIA GPU and bfloat16."),
]
Dtype = Annotated[
    Literal["auto", "bfloat16", "float32"],
    arg(help="Of activations and matmuls; auto: bfloat16, but float32 where the step runs on a CPU."),
]
LossChunk = Annotated[int, arg(help="Positions whose logits are alive at a time; 0 keeps them all.")]
Stack = Annotated[
    Literal["auto", "scan", "chain"],
    arg(help="What runs the layers; auto: a scan where one policy holds for all of them, else the executor of plans."),
]
Hbm = Annotated[
    str | None,
    arg(
        metavar="SIZE",
        help="Memory of each device, as 80GiB or a chip's name such as h200.",
        help_behavior_hint="(default: the target's own, where it is known)",
    ),
]
Margin = Annotated[float, arg(help="Share of the device's memory to leave free.")]
Minutes = Annotated[float, arg(help="After this, no further case is started on a GPU.")]
Json = Annotated[
    Path | None, arg(metavar="FILE", help="Write every figure there, as JSON.", help_behavior_hint="(optional)")
]
Plot = Annotated[
    Path | None, arg(metavar="DIR", help="Draw pictures into this folder.", help_behavior_hint="(optional)")
]
Files = Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="(optional)")]


def dtype_on(asked: str, platform: str) -> Literal["bfloat16", "float32"]:
    """The compute dtype that a flag comes to on a platform; ``""`` where nothing runs.

    >>> dtype_on("auto", "cpu"), dtype_on("auto", "cuda"), dtype_on("bfloat16", "cpu")
    ('float32', 'bfloat16', 'bfloat16')
    """
    return "float32" if asked == "float32" or (asked == "auto" and platform == "cpu") else "bfloat16"


def asks_planner(spec: str) -> bool:
    """Whether a policy is a request that the planner answers, which takes its time; read off the spec, without JAX.

    >>> asks_planner("budget:0.4"), asks_planner("full")
    (True, False)
    """
    return spec.partition(":")[0] in ("auto", "budget", "overhead")


def read_bytes(flag: str, text: str | None) -> int | None:
    """``80GiB``, or a chip's memory by its name, as bytes; None for nothing.

    Raises:
        ValueError: neither.

    >>> read_bytes("hbm", "1GiB"), read_bytes("hbm", "h200") // 2**30
    (1073741824, 139)
    """
    if not text:
        return None
    if text in CHIPS:
        return CHIPS[text].hbm_bytes
    try:
        return policies.parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {str(error).removeprefix('size: ')}") from None
