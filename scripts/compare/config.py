"""What the comparison compares."""

from dataclasses import dataclass
from typing import Literal

from jremat.estimate.config import TransformerConfig
from scripts.flags import Files, check_file

BY_NAME = (
    *("none", "full", "dots_saveable", "dots_with_no_batch_dims_saveable", "save_only_matmuls"),
    *("torchtitan_selective_op", "torchtitan_selective_op_gpt", "selective", "megatron:mlp", "megatron:layernorm"),
    *("maxtext:minimal", "maxtext:save_qkv_proj", "save:mlp_up", "alternate:2", "block:2", "every_k:2"),
    *("every_k:2,full", "offload_dots", "revolve:2"),
)


@dataclass(frozen=True)
class Compare:
    """Remat policies in JAX and in PyTorch: the same model, weights and batch, every number side by side."""

    policies: tuple[str, ...] = BY_NAME
    """Policy specs; PyTorch's own ways are compared beside them."""
    family: Literal["gpt", "llama"] = "gpt"
    """gpt: LayerNorm, GELU, biases; llama: RMSNorm, SwiGLU, RoPE, grouped queries."""
    attention: Literal["dot", "fused"] = "dot"
    """dot materialises the scores; fused is blockwise attention in JAX and SDPA in PyTorch."""
    layers: int = 4
    """Blocks in the stack."""
    hidden: int = 256
    """Width."""
    heads: int = 4
    """Query heads; the llama family has half as many for keys and values."""
    vocab: int = 256
    """Tokens in the vocabulary."""
    batch: int = 2
    """Sequences."""
    seq: int = 128
    """Tokens in a sequence."""
    dropout: float = 0.1
    """Rate of the dropout check, on a smaller model of as many layers; 0 leaves it out."""
    steps: int = 5
    """Timed steps of each side, each beside one without remat; 0 leaves time out."""
    budgets: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Of torch.compile's activation_memory_budget; the partitioner runs on the CPU."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda adds tokens/s and peaks on a GPU, at the size of Llama 3.2 1B."""
    minutes: float = 8.0
    """After this, the GPU part starts no further case."""
    json: Files = None
    """The rows."""

    def check(self) -> None:
        """Refuse what can't be compared, before anything runs.

        Raises:
            ValueError: a number out of range, or sizes that don't fit each other.
        """
        for name in ("batch", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.steps < 0:
            raise ValueError(f"steps: expected at least 0, got {self.steps}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: expected a rate of at least 0 and below 1, got {self.dropout}")
        for budget in self.budgets:
            if not 0 <= budget <= 1:
                raise ValueError(f"budgets: expected shares from 0 to 1, got {budget}")
        if self.hidden % max(self.heads, 1):
            raise ValueError(f"heads: expected a divisor of hidden={self.hidden}, got {self.heads}")
        if self.minutes <= 0:
            raise ValueError(f"minutes: expected more than 0, got {self.minutes}")
        check_file("json", self.json)
        self.config()

    def config(self) -> TransformerConfig:
        """The model's."""
        llama = self.family == "llama"
        return TransformerConfig(
            vocab_size=self.vocab,
            num_layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=max(1, self.heads // 2) if llama else self.heads,
            head_dim=self.hidden // max(self.heads, 1),
            mlp_hidden=self.hidden * 11 // 4 if llama else 4 * self.hidden,
            max_seq=self.seq,
            norm="rmsnorm" if llama else "layernorm",
            mlp="swiglu" if llama else "gelu",
            positions="rope" if llama else "learned",
            bias=not llama,
            attention="dot" if self.attention == "dot" else "blockwise",
        )
