"""Programs with loops and branches to fit: each a function and its arguments, small enough to run."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def _normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / 8


def gpt(p, tokens):
    """A scanned stack between an embedding and logits."""
    x = p["embed"][tokens]
    mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
    norm = lambda x: x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)

    def layer(x, w):
        q, k, v = jnp.split(norm(x) @ w["qkv"], 3, -1)
        x = x + jax.nn.softmax(jnp.where(mask, q @ k.swapaxes(-1, -2), -1e9)) @ v @ w["out"]
        return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], None

    x, _ = lax.scan(layer, x, p["layers"])
    logits = jax.nn.log_softmax(norm(x) @ p["embed"].T)
    return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))


def gpt_arguments(layers=6, width=32, seq=32, batch=4, vocab=64):
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    stacked = {name: _normal(k, layers, *shape) for k, (name, shape) in enumerate(shapes.items())}
    return {"embed": _normal(9, vocab, width), "layers": stacked}, jnp.arange(batch * seq).reshape(batch, seq) % vocab


def recurrence(p, xs):
    """A gated recurrence over time, backwards, two steps to an iteration."""

    def cell(state, x):
        state = jnp.tanh(x @ p["in"] + state @ p["state"])
        gated = jax.nn.sigmoid(state @ p["gate"]) * state
        return gated, gated.sum(-1)

    state, ys = lax.scan(cell, jnp.zeros((xs.shape[1], 32)), xs, reverse=True, unroll=2)
    return jnp.mean(state**2) + jnp.mean(ys)


def encoder_decoder(p, x, y):
    """Two stacks; every layer of the second reads the result of the first."""
    encoded, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), x, p["encoder"])

    def decoder(y, w):
        y = y + jax.nn.softmax(y @ w["q"] @ encoded.swapaxes(-1, -2)) @ encoded @ w["v"]
        return y + jnp.tanh(y @ w["up"]) @ w["down"], None

    return jnp.mean(lax.scan(decoder, y, p["decoder"])[0] ** 2)


def encoder_decoder_arguments(layers=6, width=32, batch=4, seq=16):
    mlp = lambda seed: {
        "up": _normal(seed, layers, width, 4 * width),
        "down": _normal(seed + 1, layers, 4 * width, width),
    }
    cross = {"q": _normal(4, layers, width, width), "v": _normal(5, layers, width, width)}
    return {"encoder": mlp(0), "decoder": mlp(2) | cross}, _normal(6, batch, seq, width), _normal(7, batch, seq, width)


def nested(p, x):
    """A loop in a loop."""

    def outer(x, ws):
        x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w) @ w.T, None), x, ws)
        return jnp.sin(x), x.mean()

    x, means = lax.scan(outer, x, p)
    return jnp.mean(x**2) + means.sum()


def branches(p, x, which):
    """One of three branches, layer by layer."""
    of = (
        lambda x, w: x + jnp.tanh(jax.nn.gelu(x @ w) @ w.T),
        lambda x, w: x,
        lambda x, w: x + jnp.tanh(jnp.sin(x @ w) @ w.T),
    )
    for w in p:
        x, which = lax.switch(which % 3, of, x, w), which + 1
    return jnp.mean(x**2)


def stochastic_depth(p, x, key):
    """A branch in a loop, with a key that is carried and dropout."""

    def layer(carry, w):
        x, key = carry
        key, own = jax.random.split(key)
        x = lax.cond(jax.random.bernoulli(own), lambda x: x + jnp.tanh(x @ w) @ w.T, lambda x: x, x)
        return (jnp.where(jax.random.bernoulli(own, 0.9, x.shape), x / 0.9, 0.0), key), None

    return jnp.mean(lax.scan(layer, (x, key), p)[0][0] ** 2)


def experts(p, x):
    """A choice by value in every iteration."""

    def layer(x, w):
        scores, which = lax.top_k(x @ w, 2)
        x = x + jnp.tanh(jax.nn.softmax(scores) @ w[:2]) * (1 + which.sum(-1, keepdims=True) / 64)
        return x + jnp.tanh(x @ w) @ w.T, None

    return jnp.mean(lax.scan(layer, x, p)[0] ** 2)


def shared(p, x):
    """Weights and a mask that every iteration reads."""
    mask, mixed = jnp.tril(jnp.ones((16, 16))), jnp.tanh(p["shared"] @ p["shared"])
    attend = lambda x, w: jax.nn.softmax((x @ w @ mixed) @ x.swapaxes(-1, -2) * mask) @ x
    return jnp.mean(lax.scan(lambda x, w: (x + attend(x, w), None), x, p["own"])[0] ** 2)


def whiles(p, x):
    """A loop without a derivative in a loop, and one by its count."""

    def layer(x, w):
        turns = lax.while_loop(lambda i: i < 3, lambda i: i + 1, 0)
        return x + jnp.tanh(x @ w) @ w.T * turns, None

    x, _ = lax.scan(layer, x, p)
    return jnp.mean(lax.fori_loop(0, 5, lambda i, x: x + jnp.tanh(x @ p[0]) @ p[0].T, x) ** 2)


PROGRAMS = {
    "gpt": (gpt, gpt_arguments()),
    "recurrence": (
        recurrence,
        ({"in": _normal(0, 16, 32), "state": _normal(1, 32, 32), "gate": _normal(2, 32, 32)}, _normal(3, 48, 4, 16)),
    ),
    "encoder_decoder": (encoder_decoder, encoder_decoder_arguments()),
    "nested": (nested, (_normal(0, 4, 5, 32, 32), _normal(1, 16, 32))),
    "branches": (branches, ([*_normal(0, 5, 32, 32)], _normal(1, 64, 32), 2)),
    "stochastic_depth": (stochastic_depth, (_normal(0, 8, 32, 32), _normal(1, 64, 32), jax.random.key(0))),
    "experts": (experts, (_normal(0, 8, 32, 32), _normal(1, 64, 32))),
    "shared": (shared, ({"shared": _normal(0, 32, 32), "own": _normal(1, 7, 32, 32)}, _normal(2, 4, 16, 32))),
    "whiles": (whiles, (_normal(0, 8, 32, 32), _normal(1, 64, 32))),
}


def random_program(seed):
    """A function of (weights, x, tokens, key) drawn at random: loops, branches, remats, skips, integers and keys."""
    rng = np.random.default_rng(seed)
    draw = lambda low, high: int(rng.integers(low, high))
    steps = [(draw(0, len(_STEPS)), draw(0, 3), draw(1, 7)) for _ in range(draw(2, 5))]

    def f(ws, x, tokens, key):
        values = [x + ws[0][tokens % 8]]
        for k, (kind, back, length) in enumerate(steps):
            skip, w = values[-1 - back % len(values)], ws[1 + k % 3]
            values.append(_STEPS[kind](values[-1], skip, w, length, jax.random.fold_in(key, k)))
        return sum(jnp.mean(v * v) for v in values[-2:])

    args = (
        [_normal(seed + k, 8, 8) for k in range(4)],
        _normal(seed + 5, 4, 8),
        jnp.arange(4) + seed,
        jax.random.key(seed),
    )
    return f, args


def _stacked(w, length):
    return w * jnp.linspace(0.5, 1.5, length)[:, None, None]


def _steps_in_loop(x, skip, w, length, key):
    keys = jax.random.split(key, length)

    def body(carry, given):
        x, count = carry
        own, key, k = given
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        x = jnp.tanh(x @ own) + jnp.where(kept, jax.nn.gelu(skip @ w), 0.0)
        return (x, count + k), (x.sum(), k * 2)

    (x, count), (sums, _) = lax.scan(body, (x, 0), (_stacked(w, length), keys, jnp.arange(length)))
    return x + sums.mean() + count


def _branch_in_loop(x, skip, w, length, key):
    of = (lambda x, w: jnp.sin(x @ w), lambda x, w: x, lambda x, w: jax.nn.softmax(x @ w) * skip)
    body = lambda x, given: (x + lax.switch(given[1] % 3, of, x, given[0]), x[:, 0])
    x, ys = lax.scan(body, x, (_stacked(w, length), jnp.arange(length)), reverse=bool(length % 2))
    return x + ys.sum()


def _loop_in_loop(x, skip, w, length, key):
    inner = lambda x, own: (jnp.tanh(x @ own) + skip, None)
    outer = lambda x, own: (lax.scan(inner, jnp.sin(x), own)[0], x @ w)
    x, ys = lax.scan(outer, x, jnp.stack([_stacked(w, length)] * 3), unroll=2)
    return x + ys.mean(0)


def _choice_in_loop(x, skip, w, length, key):
    def body(x, own):
        top, which = lax.top_k(x @ own, 2)
        return jnp.tanh(x @ own) + top.sum(-1, keepdims=True) + jnp.take_along_axis(skip, which, -1).mean(), None

    return lax.scan(body, x, _stacked(w, length))[0]


def _remat_in_loop(x, skip, w, length, key):
    body = jax.checkpoint(lambda x, own: (jax.nn.gelu(x @ own) @ w + skip, None), prevent_cse=False)
    return jnp.sin(lax.scan(body, x, _stacked(w, length))[0])


_STEPS = (
    _steps_in_loop,
    _branch_in_loop,
    _loop_in_loop,
    _choice_in_loop,
    _remat_in_loop,
    lambda x, skip, w, length, key: lax.cond(
        x.sum() > 0, lambda x: jnp.tanh(jnp.sin(x @ w) @ w.T), lambda x: x * skip, x
    ),
    lambda x, skip, w, length, key: jax.jit(lambda x: jax.nn.relu(x @ w) + skip)(x),
)
