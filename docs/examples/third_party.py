"""A Llama as a library would ship it: Linen, no tags, its layers in a Python loop; nothing in it knows of jremat."""

import flax.linen as nn
import jax
import jax.numpy as jnp

WIDTH, HEADS, LAYERS = 256, 4, 4


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        q, k, v = (nn.DenseGeneral((HEADS, WIDTH // HEADS), use_bias=False, name=f"{n}_proj")(x) for n in "qkv")
        mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5
        probs = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        out = jnp.einsum("bhqk,bkhd->bqhd", probs, v)
        return nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, name="o_proj")(out)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate, up = (nn.Dense(4 * WIDTH, use_bias=False, name=f"{n}_proj")(x) for n in ("gate", "up"))
        return nn.Dense(WIDTH, use_bias=False, name="down_proj")(nn.silu(gate) * up)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + Attention(name="attn")(nn.RMSNorm(name="norm1")(x))
        return x + MLP(name="mlp")(nn.RMSNorm(name="norm2")(x))


class Llama(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(512, WIDTH, name="embed")(tokens)
        for k in range(LAYERS):
            x = Block(name=f"layers_{k}")(x)
        return nn.Dense(512, use_bias=False, name="head")(nn.RMSNorm(name="norm")(x))


def loss(params, tokens):
    """Next-token cross-entropy."""
    logits = jax.nn.log_softmax(Llama().apply(params, tokens[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))


def subject():
    """The loss, and what to call it with."""
    tokens = jax.ShapeDtypeStruct((4, 257), jnp.int32)
    return loss, (jax.eval_shape(Llama().init, jax.random.key(0), tokens), tokens)
