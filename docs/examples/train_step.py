"""A training step for `jremat check`: a deep MLP under SGD, with its state donated."""

import jax
import jax.numpy as jnp

LAYERS, WIDTH, TOKENS = 8, 1024, 1 << 20


def step():
    """The step, and the shapes of its arguments."""

    def loss(weights, x):
        for layer in range(LAYERS):
            x = jnp.sin(x @ weights[layer])
        return x.mean()

    def update(weights, x):
        return weights - 0.1 * jax.grad(loss)(weights, x)

    weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    return jax.jit(update, donate_argnums=0), (weights, jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32))
