"""``jremat.scan_layers``: Flax's scans of layers under plans over layers."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jremat
import policies
from jremat.policy import tag

LAYERS, WIDTH = 6, 8


class Block(nn.Module):
    """A block of nothing but parameters and dropout."""

    rate: float = 0.1

    @nn.compact
    def __call__(self, x, scale):
        h = tag(nn.Dense(4 * WIDTH)(jnp.sin(x)), "up")
        h = nn.Dropout(self.rate, deterministic=not self.rate)(nn.gelu(h))
        return x + nn.Dense(WIDTH)(h) * scale, None


class Writing(nn.Module):
    """A block that writes statistics and a counter, and returns a value beside the carry."""

    @nn.compact
    def __call__(self, x, scale):
        h = nn.BatchNorm(use_running_average=False)(nn.Dense(WIDTH)(x))
        count = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        count.value = count.value + 1
        return x + jnp.tanh(h) * scale, jnp.mean(h)


OPTIONS = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "dropout": True}, "length": LAYERS}
WRITES = OPTIONS | {"variable_axes": {"params": 0, "batch_stats": 0, "counters": 0}}
BROADCAST = {"in_axes": nn.broadcast}
X, SCALE = jax.random.normal(jax.random.key(1), (16, WIDTH)), jnp.float32(0.5)
RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(2)}
PLANS = ("full", "every_k:4", "mix:2*full,4*none", "save:up", "alternate:2", "revolve:2")


def close(plain, ours):
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(ours), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def gradient(module, params, x, scale):
    loss = lambda params, x: jnp.mean(
        module.apply({"params": params}, x, scale, rngs={"dropout": RNGS["dropout"]})[0] ** 2
    )
    return jax.value_and_grad(loss, (0, 1))(params, x)


def test_a_linen_stack_under_every_plan():
    plain = nn.scan(Block, **OPTIONS, **BROADCAST)()
    params = plain.init(RNGS, X, SCALE)["params"]
    stacks = {spec: jremat.scan_layers(Block, policies.get(spec), **OPTIONS, **BROADCAST)() for spec in PLANS}
    for stack in stacks.values():
        close(params, stack.init(RNGS, X, SCALE)["params"])
    run = jax.jit(lambda p: [gradient(module, p, X, SCALE) for module in (plain, *stacks.values())])
    expected, *others = run(params)
    for ours in others:
        close(expected, ours)
    again = {
        spec: jremat.flops(lambda p, stack=stack: gradient(stack, p, X, SCALE), params).recompute
        for spec, stack in stacks.items()
    }
    assert again["save:up"] == 0  # the last matmul is not run again
    assert again["full"] == LAYERS * 2 * 16 * WIDTH * 4 * WIDTH
    assert again["mix:2*full,4*none"] * 3 == again["full"] == 2 * again["alternate:2"]
    assert again["every_k:4"] > again["full"]


def test_kept_bytes_are_the_plans():
    params = jremat.scan_layers(Block, policies.get("full"), **OPTIONS, **BROADCAST)(0.0).init(RNGS, X, SCALE)["params"]

    def kept(spec):
        module = jremat.scan_layers(Block, policies.get(spec), **OPTIONS, **BROADCAST)(0.0)
        return jremat.residuals(lambda p, x: module.apply({"params": p}, x, SCALE)[0], params, X).total_bytes

    carry, up = 4 * 16 * WIDTH, 4 * 16 * 4 * WIDTH
    assert kept("save:up") - kept("full") == LAYERS * up
    assert kept("full") == LAYERS * carry and kept("every_k:3") == 2 * carry


@pytest.mark.parametrize("spec", ["full", "every_k:4", "mix:2*full,4*none"])
def test_collections_are_written_once_and_values_come_out(spec):
    plain = nn.scan(Writing, **WRITES, **BROADCAST)()
    ours = jremat.scan_layers(Writing, policies.get(spec), **WRITES, **BROADCAST)()
    variables = plain.init(RNGS, X, SCALE)
    close(variables, ours.init(RNGS, X, SCALE))

    def loss(params, module):
        given = variables | {"params": params}
        (y, means), new = module.apply(given, X, SCALE, mutable=["batch_stats", "counters"])
        return jnp.mean(y**2) + means.sum(), (means, new)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "stack: a block that writes values beside its carry")
        of = lambda module: jax.jit(jax.value_and_grad(lambda p: loss(p, module), has_aux=True))(variables["params"])
        (_, (_, new)), _ = found = of(ours)
    close(of(plain), found)
    assert jax.tree.leaves(new["counters"])[0].tolist() == [2] * LAYERS


def test_within_a_model_and_reversed():
    class Model(nn.Module):
        planned: bool

        @nn.compact
        def __call__(self, x):
            options = OPTIONS | BROADCAST | {"reverse": True}
            full = policies.get("every_k:2")
            layers = jremat.scan_layers(Block, full, **options) if self.planned else nn.scan(Block, **options)
            return nn.Dense(2)(layers(name="layers")(nn.Dense(WIDTH)(x), SCALE)[0]), SCALE

    params = Model(False).init(RNGS, X)["params"]
    close(params, Model(True).init(RNGS, X)["params"])
    of = lambda planned: jax.jit(lambda p: gradient(_Called(Model(planned)), p, X, SCALE))(params)
    close(of(False), of(True))


class _Called:
    """A model that takes no scale."""

    def __init__(self, model):
        self.model = model

    def apply(self, variables, x, scale, rngs):
        return self.model.apply(variables, x, rngs=rngs)


class Layer(nnx.Module):
    """A block with dropout of its own."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(nnx.gelu(tag(self.up(x), "up"))))


@pytest.mark.parametrize("spec", ["full", "every_k:4", "save:up"])
def test_an_nnx_stack(spec):
    make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer, in_axes=(0,), out_axes=0))
    axes = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry}

    def run(scan):
        layers = make(nnx.Rngs(0))
        loss = lambda layers, x: jnp.mean(scan(lambda layer, x: layer(x))(layers, x) ** 2)
        found = nnx.jit(nnx.value_and_grad(loss))(layers, X)
        return found, nnx.state(layers, nnx.RngCount)

    close(run(lambda f: nnx.scan(f, **axes)), run(lambda f: jremat.scan_layers(f, policies.get(spec), **axes)))


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="target: expected a Linen module class or a function of NNX modules"):
        jremat.scan_layers(Block(), policies.get("full"), **OPTIONS)
    with pytest.raises(ValueError, match=r"plan: expected a LayerPlan or a Policy, .* got 'full'"):
        jremat.scan_layers(Block, "full", **OPTIONS)
    params = nn.scan(Block, **OPTIONS, **BROADCAST)().init(RNGS, X, SCALE)["params"]
    wrong = jremat.scan_layers(Block, policies.get("mix:2*full,3*none"), **OPTIONS, **BROADCAST)()
    with pytest.raises(ValueError, match=r"5.*6|6.*5"):
        gradient(wrong, params, X, SCALE)
    typo = jremat.scan_layers(Block, policies.get("save:upp"), **OPTIONS, **BROADCAST)()
    with pytest.raises(ValueError, match="'upp' \\(did you mean 'up'\\?\\)"):
        gradient(typo, params, X, SCALE)
