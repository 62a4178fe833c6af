"""The stack that the published measurements of PyTorch 2.13.0 were made on: a GPT block with one matmul for q, k, v."""

import math

import torch
import torch.nn.functional as F
from torch import nn

LAYERS, B, S, H, HEADS = 4, 2, 128, 256, 4
U = 4 * B * S * H  # bytes of one float32 [b, s, h]


class FusedQkvBlock(nn.Module):
    def __init__(self, fused_attention: bool) -> None:
        super().__init__()
        self.fused_attention = fused_attention
        self.norms = nn.ModuleList([nn.LayerNorm(H), nn.LayerNorm(H)])
        self.qkv, self.proj = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.out = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)
        self.register_buffer("mask", torch.ones(S, S, dtype=torch.bool).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).view(B, S, 3, HEADS, H // HEADS).permute(2, 0, 3, 1, 4)
        if self.fused_attention:
            context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1) / math.sqrt(H // HEADS)).masked_fill(self.mask, -math.inf)
            context = scores.softmax(-1) @ v
        x = x + self.proj(context.transpose(1, 2).reshape(B, S, H))
        return x + self.out(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


def stack(fused_attention: bool) -> tuple[list[nn.Module], torch.Tensor]:
    """The layers and their input, which requires a gradient."""
    torch.manual_seed(0)
    return [FusedQkvBlock(fused_attention) for _ in range(LAYERS)], torch.randn(B, S, H, requires_grad=True)
