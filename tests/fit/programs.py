"""Programs of many shapes to fit, small enough to run."""

import jax
import jax.numpy as jnp
import numpy as np

from jremat.fitting.choose import Choices, SegmentRow
from jremat.fitting.fitted import Fitted
from jremat.fitting.inside import choices_inside
from jremat.fitting.planner import active_places, loss_places, planned_row
from jremat.fitting.program import entered_program
from jremat.fitting.read import Reading, read
from jremat.graph.arguments import take_apart
from jremat.measure import target
from jremat.planner.roofline import Roofline

COST = Roofline(target("h200").chip)


def choices_of(f, *args) -> tuple[Reading, Choices]:
    """A function as the planner reads it, and its choices."""
    arguments = take_apart(f, args, {})
    program = entered_program(arguments)
    active = active_places(arguments, 0)
    reading = read(program, active, loss_places(program), COST, ())
    return reading, Choices(reading, inside=choices_inside(reading, active, COST, ()))


def fitted(f, args, reading: Reading, choices: Choices, row: SegmentRow) -> Fitted:
    """The function under one row of segments."""
    return Fitted(f, reading.program, take_apart(f, args, {}), planned_row(reading, row))


def layers(ws, x):
    """Layers unrolled by Python, with a skip from the first to the last."""
    first = x
    for w in ws:
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    return jnp.mean((x + first) ** 2)


def layers_arguments(num_layers=8, width=32, rows=64):
    keys = jax.random.split(jax.random.key(0), 2 * num_layers + 1)
    ws = [
        {"up": jax.random.normal(a, (width, 4 * width)) / 6, "down": jax.random.normal(b, (4 * width, width)) / 11}
        for a, b in zip(keys[::2], keys[1::2])
    ]
    return ws, jax.random.normal(keys[-1], (rows, width))


def random_program(seed):
    """A function of (weights, x) drawn at random: matmuls, pointwise work, norms, skips, choices, calls."""
    rng = np.random.default_rng(seed)
    steps = [
        (int(rng.integers(0, 9)), int(rng.integers(0, 6)), int(rng.integers(0, 6))) for _ in range(rng.integers(6, 14))
    ]

    def f(ws, x):
        values = [x]
        for k, (kind, back, other) in enumerate(steps):
            a, b, w = values[-1 - back % len(values)], values[-1 - other % len(values)], ws[k % len(ws)]
            values.append(_STEPS[kind](a, b, w))
        return sum(jnp.mean(v * v) for v in values[-3:])

    key = jax.random.key(seed)
    return f, ([jax.random.normal(k, (8, 8)) / 3 for k in jax.random.split(key, 4)], jax.random.normal(key, (4, 8)))


_STEPS = (
    lambda a, b, w: a @ w,
    lambda a, b, w: jnp.sin(a) * b,
    lambda a, b, w: jax.nn.gelu(a @ w),
    lambda a, b, w: a / jnp.sqrt(jnp.mean(a * a, -1, keepdims=True) + 1e-3),
    lambda a, b, w: jax.nn.softmax(a, -1) + b,
    lambda a, b, w: jax.nn.relu(a) @ w + b,
    lambda a, b, w: jnp.where(a > 0, jnp.exp(-a), b),
    lambda a, b, w: a + jax.lax.top_k(b, 2)[0].sum(-1, keepdims=True),
    lambda a, b, w: jnp.concatenate([a, b], -1) @ jnp.concatenate([w, w.T], 0),
)
