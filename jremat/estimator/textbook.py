"""The papers' own counting: what a layer keeps in 16-bit PyTorch as of 2022, to reproduce their numbers under its name.

A JAX program keeps something else: dropout masks are recomputed from a key, the softmax keeps its output alone, masks
are no arrays. ``beside`` puts the program's count for the same shapes next to the paper's.
"""

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
SLIPS: Mapping[str, str] = MappingProxyType(
    {
        "selective recomputes only the expensive ones": "inverted: it keeps what costs much and is small, "
        "and recomputes attention's core, which is large to hold and cheap to make (section 5)",
        "full recompute saves roughly 2×": "34 sbh a layer to 2 sbh is 17×, before a layer's own working memory",
        "a SwiGLU layer keeps 34 bsh": "its lines sum to 36 bsh, with f = 8h/3: query, key, value 6, context 2, "
        "attention's projection 2, norms and residuals 4 + 4, gate and up 32/3, SiLU's output 16/3, down 2",
        "selective keeps 10 bsh": "34 bsh: table 2's 10 + 24/t is of tensor parallelism, 10 its limit for many ways",
        "selective costs 2.7% and 1.6% more FLOPs": "of a layer's forward pass; of the whole step 0.90% and 0.55%",
    }
)
"""Where the texts slip, and what holds."""


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
