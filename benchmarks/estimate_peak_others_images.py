"""What ``estimate_peak_others_cases.py``'s train steps have in common, and those of convolutions and adversaries."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

Built = tuple[Callable[..., Any], tuple[Any, ...]]
BF16 = jnp.bfloat16


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An array that is only described."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def tokens(*sizes: int) -> jax.ShapeDtypeStruct:
    """Of integers."""
    return shape(*sizes, dtype=jnp.int32)


def train(loss: Callable[..., Any], params: Any, optimizer: Any, *batch: Any) -> Built:
    """The usual step: gradient, update, donated parameters and state."""

    def step(params, state, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1)), (params, jax.eval_shape(optimizer.init, params), *batch)


def linen(model: nn.Module, optimizer: Any, loss: Callable[..., Any], *batch: Any) -> Built:
    """A step of a Linen module without mutable collections: it reads ``batch[0]``, ``loss(outputs, *batch)``."""
    params = jax.eval_shape(lambda x: model.init(jax.random.key(0), x), batch[0])["params"]
    return train(lambda p, *b: loss(model.apply({"params": p}, b[0]), *b), params, optimizer, *batch)


def labels_loss(logits: Any, _: Any, labels: Any) -> Any:
    """Mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def next_token_loss(logits: Any, ids: Any) -> Any:
    """Of each token but the first."""
    return labels_loss(logits[:, :-1], None, ids[:, 1:])


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm, as ResNet-18's."""

    features: int
    strides: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype)
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        y = nn.relu(norm()(conv(self.features, (3, 3), (self.strides, self.strides))(x)))
        y = norm(scale_init=nn.initializers.zeros)(conv(self.features, (3, 3))(y))
        if x.shape != y.shape:
            x = norm()(conv(self.features, (1, 1), (self.strides, self.strides))(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Four stages."""

    stages: tuple[int, ...] = (1, 1, 1, 1)
    dtype: Any = jnp.float32
    block: Any = ResidualBlock

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(64, (7, 7), (2, 2), use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for k, repeats in enumerate(self.stages):
            for r in range(repeats):
                x = self.block(64 * 2**k, 2 if k and not r else 1, self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(x.mean((1, 2)))


def resnet(model: ResNet, optimizer: Any, batch: int) -> Built:
    """Running statistics go round beside the parameters."""
    images, labels = shape(batch, 128, 128, 3), tokens(batch)
    variables = jax.eval_shape(lambda x: model.init(jax.random.key(0), x), images)

    def step(params, stats, state, images, labels):
        def loss(params):
            out, new = model.apply({"params": params, "batch_stats": stats}, images, mutable=["batch_stats"])
            return labels_loss(out, None, labels), new["batch_stats"]

        (value, stats_out), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), stats_out, state, value

    args = (variables["params"], variables["batch_stats"], jax.eval_shape(optimizer.init, variables["params"]))
    return jax.jit(step, donate_argnums=(0, 1, 2)), (*args, images, labels)


class UNet(nn.Module):
    """GroupNorm, SiLU and skips by concatenation, as denoising models have it."""

    widths: tuple[int, ...] = (64, 128, 256)
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        conv = lambda x, width: nn.Conv(width, (3, 3), dtype=self.dtype)(nn.silu(nn.GroupNorm(16, dtype=self.dtype)(x)))
        x, skips = nn.Conv(self.widths[0], (3, 3), dtype=self.dtype)(x), []
        for width in self.widths:
            x = conv(conv(x, width), width)
            skips.append(x)
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = conv(x, self.widths[-1])
        for width, skip in zip(reversed(self.widths), reversed(skips)):
            batch, rows, columns, channels = x.shape
            x = jax.image.resize(x, (batch, 2 * rows, 2 * columns, channels), "nearest")
            x = conv(conv(jnp.concatenate([x, skip], -1), width), width)
        return nn.Conv(3, (3, 3), dtype=self.dtype)(x)


def unet() -> Built:
    """Predicts the noise."""
    images = shape(16, 64, 64, 3)
    loss = lambda out, _, noise: ((out - noise) ** 2).mean()
    return linen(UNet(), optax.adamw(1e-4), loss, images, images)


class WaveNet(nn.Module):
    """Gated dilated convolutions over time, skips summed."""

    layers: int = 8
    width: int = 64

    @nn.compact
    def __call__(self, ids):
        x, total = nn.Embed(256, self.width)(ids), 0.0
        for k in range(self.layers):
            y = nn.Conv(2 * self.width, (2,), kernel_dilation=(2**k,), padding="CAUSAL")(x)
            gate, value = jnp.split(y, 2, -1)
            y = nn.sigmoid(gate) * nn.tanh(value)
            total = total + nn.Dense(self.width)(y)
            x = x + nn.Dense(self.width)(y)
        return nn.Dense(256)(nn.relu(total))


class Autoencoder(nn.Module):
    """A convolutional VAE."""

    @nn.compact
    def __call__(self, x):
        for width in (32, 64, 128):
            x = nn.relu(nn.Conv(width, (4, 4), (2, 2))(x))
        grid = x.shape
        mean, log_variance = jnp.split(nn.Dense(256)(x.reshape(grid[0], -1)), 2, -1)
        z = mean + jnp.exp(log_variance / 2) * jax.random.normal(jax.random.key(1), mean.shape)
        x = nn.relu(nn.Dense(grid[1] * grid[2] * grid[3])(z)).reshape(grid)
        for width in (64, 32):
            x = nn.relu(nn.ConvTranspose(width, (4, 4), (2, 2))(x))
        return nn.ConvTranspose(3, (4, 4), (2, 2))(x), mean, log_variance


def vae_loss(out: Any, images: Any) -> Any:
    """Reconstruction and divergence."""
    logits, mean, log_variance = out
    rebuilt = optax.sigmoid_binary_cross_entropy(logits, images).sum((1, 2, 3)).mean()
    return rebuilt - 0.5 * (1 + log_variance - mean**2 - jnp.exp(log_variance)).sum(-1).mean()


class Perceptron(nn.Module):
    """Dense layers."""

    widths: tuple[int, ...]
    act: Callable[..., Any] = nn.relu

    @nn.compact
    def __call__(self, x):
        for width in self.widths[:-1]:
            x = self.act(nn.Dense(width)(x))
        return nn.Dense(self.widths[-1])(x)


def gan() -> Built:
    """Both players in one step, each with its optimizer."""
    make, judge = Perceptron((1024, 1024, 1024, 3072)), Perceptron((1024, 1024, 1), nn.leaky_relu)
    optimizer = optax.adam(2e-4, b1=0.5)
    z, real = shape(4096, 128), shape(4096, 3072)
    init = lambda model, x: jax.eval_shape(lambda x: model.init(jax.random.key(0), x), x)["params"]
    g, d = init(make, z), init(judge, real)

    def step(g, d, g_state, d_state, z, real):
        run = lambda model, p, x: model.apply({"params": p}, x)

        def judged(d):
            fake = run(make, g, z)
            return jax.nn.softplus(-run(judge, d, real)).mean() + jax.nn.softplus(run(judge, d, fake)).mean()

        d_loss, grads = jax.value_and_grad(judged)(d)
        updates, d_state = optimizer.update(grads, d_state, d)
        d = optax.apply_updates(d, updates)
        g_loss, grads = jax.value_and_grad(lambda g: jax.nn.softplus(-run(judge, d, run(make, g, z))).mean())(g)
        updates, g_state = optimizer.update(grads, g_state, g)
        return optax.apply_updates(g, updates), d, g_state, d_state, d_loss + g_loss

    states = jax.eval_shape(optimizer.init, g), jax.eval_shape(optimizer.init, d)
    return jax.jit(step, donate_argnums=(0, 1, 2, 3)), (g, d, *states, z, real)
