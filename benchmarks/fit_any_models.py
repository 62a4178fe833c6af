"""Models of many kinds, as their users write them: what ``benchmarks/fit_any.py`` fits.

Every model takes ``remat``, which its author would put around each block by hand; ``lambda block: block`` leaves them.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

Remat = Callable[[Any], Any]
Program = tuple[Callable[..., Any], tuple[Any, ...]]
"""A loss and the shapes of its arguments, the parameters first."""

BF16 = jnp.bfloat16


def of(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), labels[..., None], -1)
    return -jnp.mean(chosen)


def of_tokens(model: nn.Module, batch: int, seq: int) -> Program:
    """Next-token loss of a language model."""
    tokens = of((batch, seq), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return lambda params, tokens, labels: cross_entropy(model.apply(params, tokens), labels), (params, tokens, tokens)


def of_images(model: nn.Module, batch: int, size: int) -> Program:
    """Classification loss of a model with batch statistics, which are updated."""
    images, labels = of((batch, size, size, 3)), of((batch,), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)

    def loss(params, stats, images, labels):
        logits, new = model.apply({"params": params, "batch_stats": stats}, images, mutable="batch_stats")
        return cross_entropy(logits, labels), new

    return loss, (variables["params"], variables["batch_stats"], images, labels)


# ---------------------------------------------------------------------------------------------------- convolutions


class Res(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        def conv(x):
            return nn.Conv(self.width, (3, 3), dtype=BF16)(nn.silu(nn.GroupNorm(8, dtype=BF16)(x)))

        return conv(conv(x)) + (x if x.shape[-1] == self.width else nn.Conv(self.width, (1, 1), dtype=BF16)(x))


class UNet(nn.Module):
    remat: Remat
    widths: tuple[int, ...] = (64, 128, 256, 512)
    per: int = 3

    @nn.compact
    def __call__(self, x):
        block = self.remat(Res)
        x, skips = nn.Conv(self.widths[0], (3, 3), dtype=BF16)(x), []
        for width in self.widths:
            for _ in range(self.per):
                x = block(width)(x)
                skips.append(x)
            x = nn.Conv(width, (3, 3), (2, 2), dtype=BF16)(x)
        for _ in range(self.per):
            x = block(self.widths[-1])(x)
        for width in reversed(self.widths):
            b, h, w, c = x.shape
            x = nn.Conv(width, (3, 3), dtype=BF16)(jax.image.resize(x, (b, 2 * h, 2 * w, c), "nearest"))
            for _ in range(self.per):
                x = block(width)(jnp.concatenate([x, skips.pop()], -1))
        return nn.Conv(3, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))


def unet(remat: Remat) -> Program:
    model, x = UNet(remat), of((16, 128, 128, 3))
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return lambda params, x, y: jnp.mean((model.apply(params, x) - y) ** 2), (params, x, x)


class Bottleneck(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x):
        def conv(x, width, size, stride=1):
            x = nn.Conv(width, (size, size), (stride, stride), use_bias=False, dtype=BF16)(x)
            return nn.BatchNorm(use_running_average=False, dtype=BF16)(x)

        y = nn.relu(conv(x, self.width, 1))
        y = nn.relu(conv(y, self.width, 3, self.stride))
        y = conv(y, 4 * self.width, 1)
        return nn.relu(y + (x if x.shape == y.shape else conv(x, 4 * self.width, 1, self.stride)))


class ResNet50(nn.Module):
    remat: Remat

    @nn.compact
    def __call__(self, x):
        block = self.remat(Bottleneck)
        x = nn.BatchNorm(use_running_average=False, dtype=BF16)(nn.Conv(64, (7, 7), (2, 2), dtype=BF16)(x))
        x = nn.max_pool(nn.relu(x), (3, 3), (2, 2), "SAME")
        for stage, repeats in enumerate((3, 4, 6, 3)):
            for k in range(repeats):
                x = block(64 * 2**stage, 2 if stage and not k else 1)(x)
        return nn.Dense(1000)(x.mean((1, 2)))


class Dense(nn.Module):
    """A dense layer of DenseNet: what it makes is put beside what it read."""

    growth: int = 32

    @nn.compact
    def __call__(self, x):
        def norm(x):
            return nn.relu(nn.BatchNorm(use_running_average=False, dtype=BF16)(x))

        y = nn.Conv(4 * self.growth, (1, 1), use_bias=False, dtype=BF16)(norm(x))
        y = nn.Conv(self.growth, (3, 3), use_bias=False, dtype=BF16)(norm(y))
        return jnp.concatenate([x, y], -1)


class DenseNet121(nn.Module):
    remat: Remat

    @nn.compact
    def __call__(self, x):
        block = self.remat(Dense)
        x = nn.BatchNorm(use_running_average=False, dtype=BF16)(nn.Conv(64, (7, 7), (2, 2), dtype=BF16)(x))
        x = nn.max_pool(nn.relu(x), (3, 3), (2, 2), "SAME")
        for stage, repeats in enumerate((6, 12, 24, 16)):
            for _ in range(repeats):
                x = block()(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=BF16)(x))
            if stage < 3:
                x = nn.avg_pool(nn.Conv(x.shape[-1] // 2, (1, 1), use_bias=False, dtype=BF16)(x), (2, 2), (2, 2))
        return nn.Dense(1000)(x.mean((1, 2)))


# ---------------------------------------------------------------------------------------------------- transformers


class Attention(nn.Module):
    heads: int
    causal: bool = False
    window: int = 0

    @nn.compact
    def __call__(self, x, memory=None):
        source, width = x if memory is None else memory, x.shape[-1]

        def project(x):
            return nn.DenseGeneral((self.heads, width // self.heads), use_bias=False, dtype=BF16)(x)

        q, k, v = project(x), project(source), project(source)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / (width // self.heads) ** 0.5
        if self.causal:
            ahead = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])[None, :]
            scores = jnp.where((ahead >= 0) & ((ahead < self.window) if self.window else True), scores, -1e9)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(BF16), v)
        return nn.DenseGeneral(width, (-2, -1), use_bias=False, dtype=BF16)(out)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(x.shape[-1], dtype=BF16)(nn.gelu(nn.Dense(4 * x.shape[-1], dtype=BF16)(x)))


class Layer(nn.Module):
    heads: int
    causal: bool = False
    window: int = 0

    @nn.compact
    def __call__(self, x):
        x = x + Attention(self.heads, self.causal, self.window)(nn.LayerNorm(dtype=BF16)(x))
        return x + MLP()(nn.LayerNorm(dtype=BF16)(x))


class ViT(nn.Module):
    """ViT-B/16, its layers unrolled."""

    remat: Remat

    @nn.compact
    def __call__(self, x):
        block = self.remat(Layer)
        x = nn.Conv(768, (16, 16), (16, 16), dtype=BF16)(x)
        x = x.reshape(x.shape[0], -1, 768)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], 768)).astype(BF16)
        for _ in range(12):
            x = block(12)(x)
        return nn.Dense(1000)(nn.LayerNorm()(x).mean(1))


def vit(remat: Remat) -> Program:
    model, images = ViT(remat), of((32, 224, 224, 3))
    params = jax.eval_shape(model.init, jax.random.key(0), images)
    return lambda params, x, y: cross_entropy(model.apply(params, x), y), (params, images, of((32,), jnp.int32))


class Decoder(nn.Module):
    """A decoder layer that reads the encoder's output."""

    heads: int

    @nn.compact
    def __call__(self, x, memory):
        x = x + Attention(self.heads, causal=True)(nn.LayerNorm(dtype=BF16)(x))
        x = x + Attention(self.heads)(nn.LayerNorm(dtype=BF16)(x), memory)
        return x + MLP()(nn.LayerNorm(dtype=BF16)(x))


class T5(nn.Module):
    remat: Remat

    @nn.compact
    def __call__(self, source, tokens):
        encoder, decoder, embed = self.remat(Layer), self.remat(Decoder), nn.Embed(8192, 512, dtype=BF16)
        memory = embed(source)
        for _ in range(6):
            memory = encoder(8)(memory)
        memory, x = nn.LayerNorm(dtype=BF16)(memory), embed(tokens)
        for _ in range(6):
            x = decoder(8)(x, memory)
        return embed.attend(nn.LayerNorm(dtype=BF16)(x))


def t5(remat: Remat) -> Program:
    model, source, tokens = T5(remat), of((8, 512), jnp.int32), of((8, 512), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), source, tokens)
    loss = lambda params, source, tokens, labels: cross_entropy(model.apply(params, source, tokens), labels)
    return loss, (params, source, tokens, tokens)


class Language(nn.Module):
    """A GPT as a Linen class, its layers unrolled; every second attention local where there is a window."""

    remat: Remat
    depth: int = 12
    window: int = 0

    @nn.compact
    def __call__(self, tokens):
        block, embed = self.remat(Layer), nn.Embed(16384, 768, dtype=BF16)
        x = embed(tokens)
        for k in range(self.depth):
            x = block(12, True, 0 if k % 2 else self.window)(x)
        return embed.attend(nn.LayerNorm(dtype=BF16)(x))


def gpt_loop(remat: Remat, depth: int = 12, width: int = 512, heads: int = 8) -> Program:
    """A GPT without any library: a Python loop over a list of dictionaries."""

    def norm(x, scale):
        x32 = x.astype(jnp.float32)
        return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-6) * scale).astype(BF16)

    def layer(x, w):
        b, s, _ = x.shape
        q, k, v = jnp.split(norm(x, w["norm"]) @ w["qkv"].astype(BF16), 3, -1)
        q, k, v = (t.reshape(b, s, heads, width // heads).swapaxes(1, 2) for t in (q, k, v))
        scores = (q @ k.swapaxes(2, 3)).astype(jnp.float32) / (width // heads) ** 0.5
        weights = jax.nn.softmax(jnp.where(jnp.tri(s, dtype=bool), scores, -1e9)).astype(BF16)
        x = x + (weights @ v).swapaxes(1, 2).reshape(x.shape) @ w["out"].astype(BF16)
        return x + jax.nn.gelu(norm(x, w["norm2"]) @ w["up"].astype(BF16)) @ w["down"].astype(BF16)

    def loss(params, tokens, labels):
        x = params["embed"].astype(BF16)[tokens]
        for w in params["layers"]:
            x = remat(layer)(x, w)
        return cross_entropy(x @ params["embed"].astype(BF16).T, labels)

    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    layers = [{k: of(v) for k, v in shapes.items()} | {"norm": of((width,)), "norm2": of((width,))}] * depth
    tokens = of((8, 1024), jnp.int32)
    return loss, ({"embed": of((8192, width)), "layers": layers}, tokens, tokens)


class Experts(nn.Module):
    """Two of eight experts for every token, all of them computed and the chosen ones summed."""

    count: int = 8

    @nn.compact
    def __call__(self, x):
        width, init = x.shape[-1], nn.initializers.lecun_normal()
        chance, which = jax.lax.top_k(jax.nn.softmax(nn.Dense(self.count)(x.astype(jnp.float32))), 2)
        gates = (jax.nn.one_hot(which, self.count) * chance[..., None]).sum(-2).astype(BF16)
        up, gate = (self.param(n, init, (self.count, width, 2 * width)).astype(BF16) for n in ("up", "gate"))
        down = self.param("down", init, (self.count, 2 * width, width)).astype(BF16)
        hidden = nn.silu(jnp.einsum("bsd,edf->bsef", x, gate)) * jnp.einsum("bsd,edf->bsef", x, up)
        return jnp.einsum("bsef,efd,bse->bsd", hidden, down, gates)


class ExpertLayer(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x):
        x = x + Attention(self.heads, causal=True)(nn.RMSNorm(dtype=BF16)(x))
        return x + Experts()(nn.RMSNorm(dtype=BF16)(x))


class Mixtral(nn.Module):
    remat: Remat

    @nn.compact
    def __call__(self, tokens):
        block, x = self.remat(ExpertLayer), nn.Embed(8192, 512, dtype=BF16)(tokens)
        for _ in range(8):
            x = block(8)(x)
        return nn.Dense(8192, dtype=BF16)(nn.RMSNorm(dtype=BF16)(x))


MODELS: dict[str, tuple[str, int, Callable[[Remat], Program]]] = {
    "unet": ("U-Net, 128x128, batch 16", 27, unet),
    "resnet50": ("ResNet-50 with BatchNorm, 224x224, batch 32", 16, lambda r: of_images(ResNet50(r), 32, 224)),
    "vit": ("ViT-B/16 unrolled, batch 32", 12, vit),
    "t5": ("T5-like, 6 + 6 layers of 512, 512 tokens, batch 8", 12, t5),
    "gpt_loop": ("GPT in a Python loop, 12 layers of 512, 1,024 tokens, batch 8", 12, gpt_loop),
    "gpt_linen": ("GPT as a Linen class, 12 of 768, 512 tokens, batch 8", 12, lambda r: of_tokens(Language(r), 8, 512)),
    "densenet121": ("DenseNet-121, 224x224, batch 16", 58, lambda r: of_images(DenseNet121(r), 16, 224)),
    "local_global": (
        "Local and global attention in turn, 12 layers of 768, 1,024 tokens, window 256, batch 4",
        12,
        lambda r: of_tokens(Language(r, window=256), 4, 1024),
    ),
    "mixtral": (
        "Mixtral-like, 8 layers of 512, 8 experts, 1,024 tokens, batch 4",
        8,
        lambda r: of_tokens(Mixtral(r), 4, 1024),
    ),
}
"""By name: what it is, how many blocks it has, and the program."""
