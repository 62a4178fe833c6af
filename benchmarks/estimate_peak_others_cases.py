"""Train steps as others write them: thirty programs of Flax, Haiku, Equinox and plain JAX, none with a model of ours.

Convolutions, recurrence, mixtures of experts, two towers, graphs, adapters, several optimizers and precisions, remat by
JAX's and Flax's own transforms. Each is a function that takes nothing and returns a jitted step, its state donated, and
the shapes of its arguments. Sizes are such that each compiles in seconds.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

from benchmarks.estimate_peak_others_images import (
    BF16,
    Autoencoder,
    Built,
    Perceptron,
    ResidualBlock,
    ResNet,
    WaveNet,
    gan,
    labels_loss,
    linen,
    next_token_loss,
    resnet,
    shape,
    tokens,
    train,
    unet,
    vae_loss,
)

# --- recurrence


class Recurrent(nn.Module):
    """Layers of ``nn.RNN`` over embedded tokens."""

    cell: Any
    layers: int
    width: int
    vocabulary: int = 1024

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(self.vocabulary, self.width)(ids)
        for _ in range(self.layers):
            x = nn.RNN(self.cell(self.width))(x)
        return nn.Dense(self.vocabulary)(x)


def chunked_rnn() -> Built:
    """A cell by hand; chunks of its scan under ``jax.checkpoint``."""
    batch, length, chunk, width = 64, 1024, 32, 512
    params = {"w": shape(width, width), "u": shape(width, width), "b": shape(width)}

    def cell(p, h, x):
        h = jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"])
        return h, h

    def loss(p, x, y):
        part = jax.checkpoint(lambda h, x: jax.lax.scan(functools.partial(cell, p), h, x))
        start = jnp.zeros((batch, width))
        out = jax.lax.scan(part, start, x.reshape(length // chunk, chunk, batch, width))[1]
        return ((out.reshape(length, batch, width) - y) ** 2).mean()

    inputs = shape(length, batch, width)
    return train(loss, params, optax.rmsprop(1e-3), inputs, inputs)


def linear_recurrence() -> Built:
    """A gated linear recurrence by ``lax.associative_scan``, between dense layers."""
    batch, length, width = 16, 1024, 256
    layer = {"in": shape(width, 3 * width), "out": shape(width, width)}

    def mix(p, x):
        a, b, gate = jnp.split(x @ p["in"], 3, -1)
        decay = jax.nn.sigmoid(a)
        join = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])
        _, h = jax.lax.associative_scan(join, (decay, (1 - decay) * b), axis=1)
        return x + (h * jax.nn.silu(gate)) @ p["out"]

    def loss(params, x, y):
        for p in params:
            x = mix(p, x)
        return ((x - y) ** 2).mean()

    inputs = shape(batch, length, width)
    return train(loss, [layer] * 2, optax.adam(1e-3), inputs, inputs)


# --- attention


class Attention(nn.Module):
    """Causal, by ``jax.nn.dot_product_attention``."""

    heads: int
    dtype: Any
    causal: bool = True

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        qkv = nn.DenseGeneral((3, self.heads, width // self.heads), use_bias=False, dtype=self.dtype)(x)
        out = jax.nn.dot_product_attention(*(qkv[..., k, :, :] for k in range(3)), is_causal=self.causal)
        return nn.DenseGeneral(width, axis=(-2, -1), use_bias=False, dtype=self.dtype)(out)


class GptBlock(nn.Module):
    """Pre-norm; ``(x, None)`` where a scan wants it."""

    heads: int
    dtype: Any
    scanned: bool = False

    @nn.compact
    def __call__(self, x):
        x = x + Attention(self.heads, self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        y = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
        x = x + nn.Dense(x.shape[-1], dtype=self.dtype)(y)
        return (x, None) if self.scanned else x


class Gpt(nn.Module):
    """A Python loop over blocks, or ``nn.scan``; the output is the embedding's transpose."""

    layers: int = 4
    width: int = 512
    heads: int = 8
    vocabulary: int = 16384
    dtype: Any = BF16
    remat: bool = False
    scan: bool = False

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        places = self.param("places", nn.initializers.normal(0.02), (ids.shape[1], self.width))
        x = embed(ids) + places.astype(self.dtype)
        block = nn.remat(GptBlock, prevent_cse=not self.scan) if self.remat else GptBlock
        if self.scan:
            stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
            x, _ = stack(self.heads, self.dtype, scanned=True)(x)
        else:
            for _ in range(self.layers):
                x = block(self.heads, self.dtype)(x)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


def gpt(optimizer: Any, batch: int = 8, length: int = 1024, **changes: Any) -> Built:
    """Next tokens."""
    return linen(Gpt(**changes), optimizer, next_token_loss, tokens(batch, length))


def accumulated() -> Built:
    """Gradients summed over eight small batches by a scan."""
    model, optimizer, ids = Gpt(remat=True), optax.adamw(3e-4), tokens(8, 4, 1024)
    params = jax.eval_shape(lambda x: model.init(jax.random.key(0), x), tokens(4, 1024))["params"]

    def step(params, state, ids):
        def one(total, ids):
            loss = lambda p: next_token_loss(model.apply({"params": p}, ids), ids)
            value, grads = jax.value_and_grad(loss)(params)
            return jax.tree.map(jnp.add, total, grads), value

        grads, values = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), ids)
        updates, state = optimizer.update(jax.tree.map(lambda g: g / 8, grads), state, params)
        return optax.apply_updates(params, updates), state, values.mean()

    return jax.jit(step, donate_argnums=(0, 1)), (params, jax.eval_shape(optimizer.init, params), ids)


def adapters() -> Built:
    """A frozen model in bfloat16, low-rank corrections of its weights trained."""
    layers, width, rank = 4, 1024, 16
    base = [{"up": shape(width, 4 * width, dtype=BF16), "down": shape(4 * width, width, dtype=BF16)}] * layers
    low = {
        "up": (shape(width, rank), shape(rank, 4 * width)),
        "down": (shape(4 * width, rank), shape(rank, width)),
    }

    def dense(w, pair, x):
        return x @ w + (x @ pair[0].astype(BF16)) @ pair[1].astype(BF16)

    def loss(low, base, x, y):
        for p, own in zip(base, low):
            x = x + dense(p["down"], own["down"], jax.nn.gelu(dense(p["up"], own["up"], x)))
        return ((x - y).astype(jnp.float32) ** 2).mean()

    inputs = shape(8192, width, dtype=BF16)
    return train(loss, [low] * layers, optax.adam(1e-4), base, inputs, inputs)


class VitBlock(nn.Module):
    """Flax's own attention layer."""

    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y, y)
        y = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(y)


class Vit(nn.Module):
    """Patches of 16, blocks in a Python loop, pooled."""

    layers: int = 4
    width: int = 384
    heads: int = 6
    dtype: Any = jnp.float32
    remat: bool = False

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(self.width, (16, 16), (16, 16), dtype=self.dtype)(images)
        x = x.reshape(x.shape[0], -1, self.width)
        x = x + self.param("places", nn.initializers.normal(0.02), x.shape[1:]).astype(self.dtype)
        for _ in range(self.layers):
            x = (nn.remat(VitBlock) if self.remat else VitBlock)(self.heads, self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x).mean(1))


class MixerBlock(nn.Module):
    """Mixes tokens, then channels."""

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x).swapaxes(1, 2)
        y = nn.Dense(x.shape[1])(nn.gelu(nn.Dense(256)(y)))
        x = x + y.swapaxes(1, 2)
        return x + nn.Dense(x.shape[2])(nn.gelu(nn.Dense(2048)(nn.LayerNorm()(x))))


class Mixer(nn.Module):
    """An MLP-Mixer."""

    layers: int = 4

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(512, (16, 16), (16, 16))(images)
        x = x.reshape(x.shape[0], -1, 512)
        for _ in range(self.layers):
            x = MixerBlock()(x)
        return nn.Dense(1000)(nn.LayerNorm()(x).mean(1))


class T5Block(nn.Module):
    """RMSNorm, attention with a relative bias, cross-attention in the decoder, ReLU."""

    heads: int
    decodes: bool

    @nn.compact
    def __call__(self, x, bias, memory=None):
        width = x.shape[-1]

        def attend(x, other, bias, causal):
            q, k, v = (nn.DenseGeneral((self.heads, width // self.heads), use_bias=False)(y) for y in (x, other, other))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
            scores = scores if bias is None else scores + bias
            if causal:
                scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
            out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
            return nn.DenseGeneral(width, axis=(-2, -1), use_bias=False)(out)

        y = nn.RMSNorm()(x)
        x = x + attend(y, y, bias, self.decodes)
        if self.decodes:
            x = x + attend(nn.RMSNorm()(x), memory, None, False)
        y = nn.relu(nn.Dense(4 * width, use_bias=False)(nn.RMSNorm()(x)))
        return x + nn.Dense(width, use_bias=False)(y)


class T5(nn.Module):
    """Encoder and decoder of a few layers."""

    layers: int = 2
    width: int = 512
    heads: int = 8
    vocabulary: int = 8192

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(self.vocabulary, self.width)
        source, target = embed(ids[:, 0]), embed(ids[:, 1])
        distance = jnp.clip(jnp.arange(ids.shape[2])[:, None] - jnp.arange(ids.shape[2]), -64, 63) + 64
        bias = nn.Embed(128, self.heads)(distance).transpose(2, 0, 1)[None]
        for _ in range(self.layers):
            source = T5Block(self.heads, False)(source, bias)
        for _ in range(self.layers):
            target = T5Block(self.heads, True)(target, bias, source)
        return nn.Dense(self.vocabulary, use_bias=False)(nn.RMSNorm()(target))


def t5() -> Built:
    """Source and target in one array."""
    return linen(T5(), optax.adafactor(1e-3), lambda out, ids: next_token_loss(out, ids[:, 1]), tokens(8, 2, 512))


class NnxBlock(nnx.Module):
    """Attention and an MLP of NNX's own layers."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.first, self.second = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.first(x))
        return x + self.down(nnx.gelu(self.up(self.second(x))))


class NnxEncoder(nnx.Module):
    """Blocks in a list."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(width, heads, rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def nnx_encoder() -> Built:
    """Masked tokens, by the functional form of NNX."""
    model = nnx.eval_shape(lambda: NnxEncoder(2, 512, 8, 8192, nnx.Rngs(0)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, ids, labels):
        return labels_loss(nnx.merge(graph, params, rest)(ids), None, labels)

    return train(loss, nnx.to_pure_dict(params), optax.lion(1e-4), tokens(16, 256), tokens(16, 256))


# --- others


def mixture() -> Built:
    """Eight experts, two a token, dispatched by one-hot matmuls with a capacity; an auxiliary loss for balance."""
    count, width, experts, chosen = 4096, 512, 8, 2
    capacity = count * chosen // experts
    layer = {
        "route": shape(width, experts),
        "up": shape(experts, width, 4 * width),
        "down": shape(experts, 4 * width, width),
    }

    def experts_of(p, x):
        shares = jax.nn.softmax((x @ p["route"].astype(BF16)).astype(jnp.float32))
        gates, ids = jax.lax.top_k(shares, chosen)
        hot = jax.nn.one_hot(ids, experts, dtype=jnp.int32).reshape(-1, experts)
        place = ((jnp.cumsum(hot, 0) - 1) * hot).reshape(count, chosen, experts)
        hot = hot.reshape(place.shape)
        kept = jax.nn.one_hot(jnp.where(hot * (place < capacity) > 0, place, capacity), capacity, dtype=BF16)
        inputs = jnp.einsum("tkec,td->ecd", kept, x)
        hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", inputs, p["up"].astype(BF16)))
        out = jnp.einsum("ecf,efd->ecd", hidden, p["down"].astype(BF16))
        balance = (shares.mean(0) * hot.sum(1).mean(0)).sum() * experts
        return jnp.einsum("tkec,tk,ecd->td", kept, gates.astype(BF16), out), balance

    def loss(params, x, y):
        total, x = 0.0, x.astype(BF16)
        for p in params:
            out, balance = experts_of(p, x)
            x, total = x + out, total + balance
        return ((x.astype(jnp.float32) - y) ** 2).mean() + 0.01 * total

    inputs = shape(count, width)
    return train(loss, [layer] * 2, optax.adamw(1e-3, mu_dtype=BF16), inputs, inputs)


def two_towers() -> Built:
    """Texts and images in one space, each against all others of the batch."""
    texts, images = Perceptron((1024, 1024, 256), nn.gelu), Perceptron((2048, 1024, 256), nn.gelu)
    a, b = shape(8192, 512), shape(8192, 768)
    init = lambda model, x: jax.eval_shape(lambda x: model.init(jax.random.key(0), x), x)["params"]
    params = {"texts": init(texts, a), "images": init(images, b), "scale": shape()}

    def loss(p, a, b):
        unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        left, right = unit(texts.apply({"params": p["texts"]}, a)), unit(images.apply({"params": p["images"]}, b))
        scores, own = jnp.exp(p["scale"]) * left @ right.T, jnp.arange(len(a))
        return labels_loss(scores, None, own) + labels_loss(scores.T, None, own)

    return train(loss, params, optax.lion(1e-4), a, b)


class Denoiser(nn.Module):
    """Residual dense layers, each told the time."""

    layers: int = 6
    width: int = 1024

    @nn.compact
    def __call__(self, inputs):
        x, time = inputs
        waves = time[:, None] * jnp.exp(-jnp.arange(128) / 16)
        told = nn.Dense(self.width)(
            nn.silu(nn.Dense(self.width)(jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1)))
        )
        h = nn.Dense(self.width)(x)
        for _ in range(self.layers):
            h = h + nn.Dense(self.width)(nn.silu(nn.LayerNorm()(h) + told))
        return nn.Dense(x.shape[-1])(h)


def denoiser() -> Built:
    """Noise and time are drawn inside the step."""
    model, data = Denoiser(), shape(8192, 256)
    params = jax.eval_shape(lambda x: model.init(jax.random.key(0), x), (data, shape(8192)))["params"]

    def loss(p, data, key):
        first, second = jax.random.split(key)
        time, noise = jax.random.uniform(first, (len(data),)), jax.random.normal(second, data.shape)
        mixed = jnp.cos(time)[:, None] * data + jnp.sin(time)[:, None] * noise
        return ((model.apply({"params": p}, (mixed, time)) - noise) ** 2).mean()

    return train(loss, params, optax.adam(1e-3), data, jax.eval_shape(lambda: jax.random.key(0)))


def graph_network() -> Built:
    """Messages along edges, summed at nodes."""
    nodes, edges, width = 16384, 131072, 128
    layer = {"message": shape(2 * width, width), "update": shape(2 * width, width)}

    def loss(params, x, senders, receivers, y):
        for p in params:
            sent = jax.nn.relu(jnp.concatenate([x[senders], x[receivers]], -1) @ p["message"])
            got = jax.ops.segment_sum(sent, receivers, nodes)
            x = x + jax.nn.relu(jnp.concatenate([x, got], -1) @ p["update"])
        return ((x - y) ** 2).mean()

    x = shape(nodes, width)
    return train(loss, [layer] * 3, optax.sgd(1e-2, momentum=0.9), x, tokens(edges), tokens(edges), x)


def recommender() -> Built:
    """Large tables looked up, pairs multiplied, dense layers on top."""
    tables, rows, width, batch = 8, 100_000, 64, 16384
    top = Perceptron((1024, 512, 1))
    pairs = (tables + 1) * tables // 2
    params = {
        "tables": [shape(rows, width)] * tables,
        "bottom": shape(16, width),
        "top": jax.eval_shape(lambda x: top.init(jax.random.key(0), x), shape(batch, pairs + width))["params"],
    }

    def loss(p, ids, dense, clicked):
        x = jax.nn.relu(dense @ p["bottom"])
        all_of = jnp.stack([x, *(table[ids[:, k]] for k, table in enumerate(p["tables"]))], 1)
        products = jnp.einsum("bid,bjd->bij", all_of, all_of)
        upper = jnp.triu_indices(tables + 1, 1)
        out = top.apply({"params": p["top"]}, jnp.concatenate([x, products[:, upper[0], upper[1]]], -1))
        return optax.sigmoid_binary_cross_entropy(out[:, 0], clicked).mean()

    return train(loss, params, optax.adagrad(1e-2), tokens(batch, tables), shape(batch, 16), shape(batch))


# --- models of other packages


def haiku_net(make: Callable[[Any], Any], optimizer: Any, batch: int) -> Built:
    """A network of Haiku's, its statistics beside its parameters."""
    import haiku as hk

    def forward(images):
        return make(hk.nets)(images, is_training=True)

    net = hk.transform_with_state(forward)
    images, labels = shape(batch, 128, 128, 3), tokens(batch)
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, stats = jax.eval_shape(net.init, key, images)

    def step(params, stats, state, images, labels):
        def loss(params):
            out, new = net.apply(params, stats, None, images)
            return labels_loss(out, None, labels), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), new, state, value

    return jax.jit(step, donate_argnums=(0, 1, 2)), (
        params, stats, jax.eval_shape(optimizer.init, params), images, labels,
    )  # fmt: skip


def equinox_encoder() -> Built:
    """Equinox's attention and norms, written for one sequence and vmapped."""
    import equinox as eqx

    width, heads, layers, batch, length = 256, 4, 4, 16, 256

    class Block(eqx.Module):
        """Post-norm."""

        attention: eqx.nn.MultiheadAttention
        norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
        mlp: eqx.nn.MLP

        def __init__(self, key):
            keys = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
            self.norms = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
            self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])

        def __call__(self, x):
            x = jax.vmap(self.norms[0])(x + self.attention(x, x, x))
            return jax.vmap(self.norms[1])(x + jax.vmap(self.mlp)(x))

    model = eqx.filter_eval_shape(lambda: [Block(k) for k in jax.random.split(jax.random.key(0), layers)])
    is_array = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    params, static = eqx.partition(model, is_array)

    def one(params, x):
        for block in eqx.combine(params, static):
            x = block(x)
        return x

    def loss(params, x, y):
        return ((jax.vmap(functools.partial(one, params))(x) - y) ** 2).mean()

    inputs = shape(batch, length, width)
    return train(loss, params, optax.adamw(1e-3), inputs, inputs)


NEEDS = {"equinox encoder": "equinox", "haiku mobilenet": "dm-haiku", "haiku resnet": "dm-haiku"}
"""Which package's model a step is: it is skipped where ``pip install PACKAGE`` wasn't done."""

STEPS: dict[str, Callable[[], Built]] = {
    "adapters of a frozen bf16 mlp, adam": adapters,
    "denoiser, adam": denoiser,
    "equinox encoder": equinox_encoder,
    "gan, two adams": gan,
    "gpt by loop, adamw": lambda: gpt(optax.adamw(3e-4)),
    "gpt by loop, f32, sgd": lambda: gpt(optax.sgd(1e-2), dtype=jnp.float32),
    "gpt by loop, remat, adamw": lambda: gpt(optax.adamw(3e-4), remat=True),
    "gpt by scan, adamw with bf16 mu": lambda: gpt(optax.adamw(3e-4, mu_dtype=BF16), scan=True),
    "gpt by scan, remat, adafactor": lambda: gpt(optax.adafactor(1e-3), scan=True, remat=True),
    "gpt by scan, remat, adamw": lambda: gpt(optax.adamw(3e-4), scan=True, remat=True),
    "gpt, eight batches summed, adamw": accumulated,
    "graph network, momentum": graph_network,
    "gru, sgd": lambda: linen(Recurrent(nn.GRUCell, 1, 256), optax.sgd(0.1), next_token_loss, tokens(64, 256)),
    "haiku mobilenet": lambda: haiku_net(lambda n: n.MobileNetV1((1, 2, 2, 2), (64, 128, 128, 256), 1000),
                                         optax.rmsprop(1e-2), 32),
    "haiku resnet": lambda: haiku_net(lambda n: n.ResNet18(1000), optax.sgd(0.1, momentum=0.9), 32),
    "linear recurrence, adam": linear_recurrence,
    "lstm, two layers, adam": lambda: linen(Recurrent(nn.OptimizedLSTMCell, 2, 256), optax.adam(1e-3), next_token_loss,
                                            tokens(64, 256)),
    "mixer, adafactor": lambda: linen(Mixer(), optax.adafactor(1e-3), labels_loss, shape(32, 224, 224, 3), tokens(32)),
    "mixture of experts, adamw with bf16 mu": mixture,
    "nnx encoder, lion": nnx_encoder,
    "recommender, adagrad": recommender,
    "resnet, bf16, adam": lambda: resnet(ResNet(dtype=BF16), optax.adam(1e-3), 64),
    "resnet, momentum": lambda: resnet(ResNet(), optax.sgd(0.1, momentum=0.9), 32),
    "resnet, remat, momentum": lambda: resnet(ResNet(block=nn.remat(ResidualBlock)), optax.sgd(0.1, momentum=0.9), 32),
    "rnn in chunks, remat, rmsprop": chunked_rnn,
    "t5, adafactor": t5,
    "two towers, lion": two_towers,
    "unet, adamw": unet,
    "vae, adam": lambda: linen(Autoencoder(), optax.adam(1e-3), vae_loss, shape(256, 64, 64, 3)),
    "vit by loop, adamw": lambda: linen(Vit(), optax.adamw(1e-3), labels_loss, shape(64, 224, 224, 3), tokens(64)),
    "vit by loop, bf16, remat, lion": lambda: linen(Vit(dtype=BF16, remat=True), optax.lion(1e-4), labels_loss,
                                                    shape(64, 224, 224, 3), tokens(64)),
    "wavenet, adam": lambda: linen(WaveNet(), optax.adam(1e-3), next_token_loss, tokens(8, 4096)),
}  # fmt: skip
