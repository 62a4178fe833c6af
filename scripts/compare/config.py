"""What the comparison compares."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import tyro

from jremat.estimator.config import TransformerConfig
from jremat.policy.files import check_file
from scripts.flags import (
    Attention,
    Batch,
    Heads,
    Hidden,
    Json,
    Layers,
    Minutes,
    Seq,
    Specs,
    VocabSize,
)

FEW = ("none", "full", "dots_saveable", "save_only_matmuls", "every_k:2")
BY_NAME = (
    *("none", "full", "dots_saveable", "dots_with_no_batch_dims_saveable", "save_only_matmuls"),
    *("torchtitan_selective_op", "torchtitan_selective_op_gpt", "selective", "megatron:mlp", "megatron:layernorm"),
    *("maxtext:minimal", "maxtext:save_qkv_proj", "save:mlp_up", "alternate:2", "block:2", "every_k:2"),
    *("every_k:2,full", "offload_dots", "revolve:2"),
)


@dataclass(frozen=True)
class Compare:
    """Remat policies in JAX and in PyTorch: the same model, weights and batch, every number side by side.

    PyTorch's own ways are compared beside --policies. Rows are written to --json as they land. By default it takes
    a few minutes on two cores; --thorough takes several times as long.
    """

    policies: Specs = FEW
    thorough: bool = False
    """Every policy that PyTorch can express, all of PyTorch's own ways, five budgets and five timed steps."""
    family: Literal["gpt", "llama"] = "gpt"
    """gpt: LayerNorm, GELU, biases; llama: RMSNorm, SwiGLU, RoPE, grouped queries."""
    attention: Attention = "dot"
    layers: Layers = 4
    hidden: Hidden = 256
    heads: Heads = 4
    vocab_size: VocabSize = 256
    batch: Batch = 2
    seq: Seq = 128
    dropout: Annotated[float, tyro.conf.arg(name="check-dropout", metavar="RATE")] = 0.1
    """Rate of the dropout check, on a smaller model of as many layers; 0 leaves it out."""
    steps: int = 3
    """Timed steps of each side, each beside one without remat; 0 leaves time out."""
    budgets: tuple[float, ...] = (0.5,)
    """Of torch.compile's activation_memory_budget; the partitioner runs on the CPU."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda adds tokens/s and peaks on a GPU, at the size of Llama 3.2 1B."""
    minutes: Minutes = 8.0
    json: Json = None

    def chosen(self) -> "Compare":
        """With what --thorough adds where the flags say nothing else."""
        more: dict[str, Any] = {"policies": BY_NAME, "budgets": (0.0, 0.25, 0.5, 0.75, 1.0), "steps": 5}
        left = {name: value for name, value in more.items() if getattr(self, name) == getattr(Compare, name)}
        return replace(self, **left) if self.thorough else self

    def check(self) -> None:
        """Refuse what can't be compared, before anything runs.

        Raises:
            ValueError: a number out of range, or sizes that don't fit each other.
        """
        for name in ("batch", "seq", "layers", "hidden", "heads", "vocab_size"):
            if (getattr(self, name) or 0) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.attention == "cudnn":
            raise ValueError("attention: expected dot or blockwise, PyTorch's SDPA beside it, got 'cudnn'")
        if self.steps < 0:
            raise ValueError(f"steps: expected at least 0, got {self.steps}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"check_dropout: expected a rate of at least 0 and below 1, got {self.dropout}")
        for budget in self.budgets:
            if not 0 <= budget <= 1:
                raise ValueError(f"budgets: expected shares from 0 to 1, got {budget}")
        hidden, heads, _, _, _ = self.sizes
        if hidden % heads:
            raise ValueError(f"heads: expected a divisor of hidden={self.hidden}, got {self.heads}")
        if self.minutes != Compare.minutes and self.device == "cpu":
            raise ValueError("minutes: of no use without --device cuda")
        if self.minutes <= 0:
            raise ValueError(f"minutes: expected more than 0, got {self.minutes}")
        check_file("json", self.json)
        self.config()

    def config(self) -> TransformerConfig:
        """The model's."""
        llama = self.family == "llama"
        hidden, heads, layers, vocab_size, seq = self.sizes
        return TransformerConfig(
            vocab_size=vocab_size,
            num_layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=max(1, heads // 2) if llama else heads,
            head_dim=hidden // heads,
            mlp_hidden=hidden * 11 // 4 if llama else 4 * hidden,
            max_seq=seq,
            norm="rmsnorm" if llama else "layernorm",
            mlp="swiglu" if llama else "gelu",
            positions="rope" if llama else "learned",
            bias=not llama,
            attention=self.attention,
        )

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Width, heads, layers, vocabulary and tokens: in this script each has a default of its own."""
        found = self.hidden, self.heads, self.layers, self.vocab_size, self.seq
        return tuple(size or 0 for size in found)  # type: ignore[return-value]
