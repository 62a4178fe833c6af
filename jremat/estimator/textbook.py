"""The papers' own counting: what a layer keeps in 16-bit PyTorch as of 2022, to reproduce their numbers under its name.

A JAX program keeps something else: dropout masks are recomputed from a key, the softmax keeps its output alone, masks
are no arrays. ``beside`` puts the program's count for the same shapes next to the paper's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from jremat.estimator.config import TransformerConfig
from jremat.policy.policy import NONE
from jremat.policy.whole_number import whole_number

Technique = Literal[
    "no_parallelism", "tensor", "tensor_sequence", "tensor_selective", "tensor_sequence_selective", "full"
]
SOURCE = "Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198"
STATIC_BYTES: Mapping[str, int] = MappingProxyType({"weights": 2, "gradients": 2, "adam": 12})
"""A parameter's bytes in mixed precision with Adam: bf16 weight and gradient; float32 master, mean and variance."""

SLIPS: Mapping[str, str] = MappingProxyType(
    {
        "selective recomputes only the expensive ones": "inverted: it keeps what costs much and is small, "
        "and recomputes attention's core, which is large to hold and cheap to make (section 5)",
        "full recompute saves roughly 2×": "34 sbh a layer to 2 sbh is 17×, before a layer's own working memory",
        "a SwiGLU layer keeps 34 bsh": "its lines sum to 36 bsh, with f = 8h/3; see SWIGLU_LINES",
        "selective keeps 10 bsh": "34 bsh: table 2's 10 + 24/t is of tensor parallelism, 10 its limit for many ways",
        "selective costs 2.7% and 1.6% more FLOPs": "of a layer's forward pass; of the whole step 0.90% and 0.55%",
    }
)
"""Where the texts slip, and what holds."""

SWIGLU_LINES: Mapping[str, float] = MappingProxyType(
    {
        "query, key, value": 6,
        "context": 2,
        "attention's projection": 2,
        "attention's norm and residual": 4,
        "gate and up (f = 8h/3)": 32 / 3,
        "SiLU's output": 16 / 3,
        "down projection": 2,
        "MLP's norm and residual": 4,
    }
)
"""A gated layer's tensors in bytes over b·s·h, scores left out; they sum to 36."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and its partition, by the paper's symbols.

    Args:
        s: sequence.
        b: micro-batch.
        h: hidden.
        a: heads.
        L: layers.
        v: vocabulary.
        t: tensor-parallel ways.
        p: pipeline stages.
        m: interleaved chunks a stage.
    """

    s: int
    b: int
    h: int
    a: int
    L: int = 1
    v: int = 0
    t: int = 1
    p: int = 1
    m: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            whole_number(name, value, least=int(name != "v"))

    @property
    def sbh(self) -> int:
        """One activation of the residual stream, in values."""
        return self.s * self.b * self.h


def layer_bytes(shape: Shape, technique: Technique = "no_parallelism") -> float:
    """Activation bytes of one layer on one device, in 16-bit (table 2).

    Args:
        shape: sizes; ``t`` is read by the techniques that have it.
        technique: a row of table 2.

    Raises:
        ValueError: no such row.

    >>> gpt3 = Shape(s=2048, b=1, h=12288, a=96, t=8)
    >>> layer_bytes(gpt3) / gpt3.sbh  # 34 + 80
    114.0
    >>> round(100 * layer_bytes(gpt3, "tensor_sequence_selective") / layer_bytes(gpt3, "tensor"), 1)
    18.5

    Source: Korthikanti et al. 2022, arXiv 2205.05198, table 2, equations 1 to 6.
    """
    t, scores = shape.t, 5 * shape.a * shape.s / shape.h
    rows: Mapping[str, float] = {
        "no_parallelism": 34 + scores,
        "tensor": 10 + 24 / t + scores / t,
        "tensor_sequence": 34 / t + scores / t,
        "tensor_selective": 10 + 24 / t,
        "tensor_sequence_selective": 34 / t,
        "full": 2,
    }
    if technique not in rows:
        raise ValueError(f"technique: expected {', '.join(rows)}, got {technique!r}")
    return shape.sbh * rows[technique]


def layer_parts(shape: Shape) -> Mapping[str, int]:
    """The parts of one layer's bytes without parallelism: attention, MLP, the two norms.

    Attention: the input of query, key and value 2, query and key 4, value 2, the projection's input 2, a dropout mask
    1, and of scores softmax output 2, mask 1, dropped output 2. MLP: its input 2, GELU and its input 8 each, a mask 1.

    >>> shape = Shape(s=4, b=1, h=8, a=2)
    >>> sum(layer_parts(shape).values()) == layer_bytes(shape)
    True

    Source: Korthikanti et al. 2022, section 4.1.
    """
    sbh, scores = shape.sbh, shape.a * shape.s**2 * shape.b
    return {"attention": 11 * sbh + 5 * scores, "mlp": 19 * sbh, "two_layernorms": 4 * sbh}


def extra_bytes(shape: Shape) -> Mapping[str, float]:
    """What the first stage holds beside the layers.

    Embedding dropout of p micro-batches; on a single stage the last norm, the projection's input and the float32
    logits too.

    Source: Korthikanti et al. 2022, section 4.3.
    """
    output = 4 * shape.sbh / shape.t * (1 + shape.v / shape.h) if shape.p == 1 else 0
    return {"embedding_dropout": shape.sbh * shape.p / shape.t, "output": output}


def first_stage_bytes(shape: Shape, technique: Technique) -> float:
    """Activations of the first pipeline stage: p micro-batches of L / p layers, more under interleaving.

    Source: Korthikanti et al. 2022, section 4.2.3.

    >>> shape = Shape(s=2048, b=1, h=12288, a=96, L=96, t=8, p=8, m=3)
    >>> round(first_stage_bytes(shape, "tensor") / (96 * layer_bytes(shape, "tensor")), 4)
    1.2917
    """
    factor = 1 + (shape.p - 1) / (shape.p * shape.m) if shape.m > 1 else 1
    return shape.L * layer_bytes(shape, technique) * factor


def model_flops(shape: Shape, batch: int) -> float:
    """FLOPs of one step over ``batch`` sequences, nothing recomputed: 72 B L s h² (1 + s/6h + v/12hL).

    Source: Korthikanti et al. 2022, appendix A, equation 7.
    """
    h, s = shape.h, shape.s
    return 72 * batch * shape.L * s * h**2 * (1 + s / (6 * h) + shape.v / (12 * h * shape.L))


def hardware_flops(shape: Shape, batch: int) -> float:
    """The same with selective recompute, which runs attention's core again: s/3h in s/6h's place.

    Source: Korthikanti et al. 2022, appendix A, equation 8. Its attention term counts the core's forward twice more
    than selective recompute runs it; the paper's table 5 follows it, so it is reproduced here.
    """
    h, s = shape.h, shape.s
    return 72 * batch * shape.L * s * h**2 * (1 + s / (3 * h) + shape.v / (12 * h * shape.L))


def utilization(flops: float, step_seconds: float, devices: int, flops_per_second: float = 312e12) -> float:
    """A share of the devices' peak; by default the A100's dense bf16 peak.

    >>> utilization(312e12, 2.0, 1)
    0.5
    """
    return flops / (step_seconds * devices * flops_per_second)


def best_segments(num_layers: int) -> tuple[float, float]:
    """Of N layers in k segments, k + N/k activations: the best k, √N, and the peak, 2√N; one forward more, a third.

    >>> best_segments(64)
    (8.0, 16.0)

    Source: Chen et al. 2016, arXiv 1604.06174, section 4.1.
    """
    root = math.sqrt(num_layers)
    return root, 2 * root


def revolve_reach(slots: int, repeats: int) -> int:
    """Steps that ``slots`` states reverse with no step run more than ``repeats`` times.

    >>> revolve_reach(3, 2)
    10

    Source: Griewank and Walther 2000, theorem 6.1.
    """
    return math.comb(slots + repeats, slots)


def every_k_lab(num_layers: int, every: int, layer_mb: float) -> tuple[float, float, int]:
    """A teaching model of every ``every``-th layer kept and one layer replayed at a time.

    Returns:
        MB without remat, MB with it, and layers replayed.

    >>> every_k_lab(32, 4, 180)
    (5760, 1620, 24)
    """
    held = num_layers // every
    return num_layers * layer_mb, (held + 1) * layer_mb, num_layers - held


@dataclass(frozen=True)
class Beside:
    """One tensor of a layer under the paper's count and under the program's.

    Args:
        tensor: what it is.
        textbook, program: bytes in letters: 16-bit values and 1-byte masks as the paper; what the traced program keeps
            in the config's dtypes. Heads times their width are written h, and the MLP's width 4h, as in the paper.
        textbook_units, program_units: the same at the sizes, over b·s·h.
        why: they differ, where they do.
    """

    tensor: str
    textbook: str
    program: str
    textbook_units: float
    program_units: float
    why: str = ""


_MASK = "recomputed from its key"
# The paper's terms (section 4.1), by what the program calls the tensor; and what explains a difference.
_TERMS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("attention's norm: input", "2*b*h*s", ("block_in", "input"), ""),
    ("attention's norm: output", "2*b*h*s", ("attn_norm",), ""),
    ("query", "2*b*h*s", ("query",), ""),
    ("key", "2*b*h*s", ("key",), ""),
    ("value", "2*b*h*s", ("value",), ""),
    ("softmax's output", "2*b*n*s^2", ("attn_probs",), "a fused attention has none"),
    ("softmax's dropout mask", "b*n*s^2", (), _MASK),
    ("dropped probabilities", "2*b*n*s^2", ("attn_dropped",), "none where dropout is off or attention is fused"),
    ("context", "2*b*h*s", ("attn_out", "attn_fused"), ""),
    ("attention's dropout mask", "b*h*s", (), _MASK),
    ("MLP's norm: input", "2*b*h*s", ("add",), ""),
    ("MLP's norm: output", "2*b*h*s", ("mlp_norm",), ""),
    ("GELU's input", "8*b*h*s", ("mlp_up",), ""),
    ("GELU's output", "8*b*h*s", ("mlp_act",), ""),
    ("MLP's dropout mask", "b*h*s", (), _MASK),
    ("norms' statistics", "0", ("norm_stats",), "left out by the paper as small"),
    ("log-sum-exp", "0", ("attn_lse",), "a fused attention's"),
    ("dropout keys and positions", "0", ("random_fold_in", "iota"), "8 bytes a key"),
)


def beside(config: TransformerConfig, batch: int, seq: int) -> tuple[Beside, ...]:
    """A GELU layer's kept tensors under both counts, term by term.

    Args:
        config: with ``mlp="gelu"`` and ``mlp_hidden`` four times ``hidden``, as the paper's.
        batch, seq: of the activations.

    Raises:
        ValueError: another MLP, which the paper doesn't count.

    >>> config = TransformerConfig(vocab_size=8, num_layers=1, hidden=8, heads=2, kv_heads=2, head_dim=4, mlp_hidden=32,
    ...                            max_seq=4, dropout=0.1, compute_dtype="bfloat16", param_dtype="bfloat16")
    >>> rows = beside(config, 1, 4)
    >>> sum(row.textbook_units for row in rows)  # 34 + 5 a s / h
    39.0
    >>> [(row.textbook, row.program) for row in rows if row.tensor in ("softmax's output", "GELU's input")]
    [('2·b·n·s²', '2·b·n·s²'), ('8·b·h·s', '8·b·h·s')]
    """
    c = config
    if c.mlp != "gelu" or c.mlp_hidden != 4 * c.hidden:
        raise ValueError(f"config: the paper counts a GELU MLP of 4h, got mlp={c.mlp!r}, mlp_hidden={c.mlp_hidden}")
    from jremat.estimator.block_cost import block_cost, named  # loads JAX, which the papers don't need
    from jremat.graph.letters import Polynomial

    kept: dict[str, Polynomial] = {}
    for row in block_cost(c, NONE).rows:
        letters = Polynomial.of(row.bytes)
        if letters.letters & {"b", "s"} or row.primitive == "random_fold_in":  # casts of weights are no activations
            name = row.name or row.primitive
            kept[name] = kept.get(name, Polynomial()) + named(letters, c.group > 1).replaced(("f",), "h", 4)
    numbers = {"b": batch, "s": seq, "h": c.hidden, "n": c.heads, "k": c.kv_heads * c.head_dim}
    unit = batch * seq * c.hidden
    found = []
    for tensor, text, names, why in _TERMS:
        paper, program = Polynomial.of_text(text), sum((kept.pop(n, Polynomial()) for n in names), Polynomial())
        if paper == program:
            why = ""
        elif paper * 2 == program and c.compute_dtype == "float32":
            why = "float32"
        units = paper.at(numbers) / unit, program.at(numbers) / unit
        if units != (0, 0):
            found.append(Beside(tensor, str(paper), str(program), *units, why))
    assert not kept, kept
    return tuple(found)
