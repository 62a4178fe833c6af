"""A Llama as a library ships it, in Linen and in NNX: no tags, layers in a Python loop."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

LAYERS, HEADS, WIDTH, INNER = 3, 4, 32, 128
X = jax.random.normal(jax.random.key(1), (2, 16, WIDTH))
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
ARRAY = X.nbytes  # of one activation


def attended(q, k, v):
    q, k, v = (x.reshape(*x.shape[:2], HEADS, -1) for x in (q, k, v))
    probs = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(*q.shape[:2], WIDTH)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        out = attended(*(nn.Dense(WIDTH, use_bias=False, name=name)(x) for name in PROJECTIONS))
        return nn.Dense(WIDTH, use_bias=False, name="o_proj")(out)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate, up = (nn.Dense(INNER, use_bias=False, name=name)(x) for name in ("gate_proj", "up_proj"))
        return nn.Dense(WIDTH, use_bias=False, name="down_proj")(nn.silu(gate) * up)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + Attention(name="attn")(nn.RMSNorm(name="norm1")(x))
        return x + MLP(name="mlp")(nn.RMSNorm(name="norm2")(x))


class Llama(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(LAYERS):
            x = Block(name=f"layers_{i}")(x)
        return x


class NnxAttention(nnx.Module):
    def __init__(self, rngs):
        for name in (*PROJECTIONS, "o_proj"):
            setattr(self, name, nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs))

    def __call__(self, x):
        return self.o_proj(attended(*(getattr(self, name)(x) for name in PROJECTIONS)))


class NnxMLP(nnx.Module):
    def __init__(self, rngs):
        for name in ("gate_proj", "up_proj"):
            setattr(self, name, nnx.Linear(WIDTH, INNER, use_bias=False, rngs=rngs))
        self.down_proj = nnx.Linear(INNER, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.attn = nnx.RMSNorm(WIDTH, rngs=rngs), NnxAttention(rngs)
        self.norm2, self.mlp = nnx.RMSNorm(WIDTH, rngs=rngs), NnxMLP(rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class NnxLlama(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
