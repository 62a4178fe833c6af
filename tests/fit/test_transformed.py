"""Planned loops under JAX's transformations, and under Flax's."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jremat
from jremat.fitting.planner import DoesNotFit
from tests.fit.loops import gpt, gpt_arguments

PARAMS, TOKENS = gpt_arguments(layers=5, width=8, seq=8, batch=2, vocab=16)


def leanest(f, *args, **options):
    """The function under the plan that needs least."""
    with pytest.raises(DoesNotFit) as error:
        jremat.fit(f, *args, hbm_bytes=1, target="cpu", compiles=0, **options)
    return error.value.leanest


@pytest.fixture(scope="module")
def planned():
    found = leanest(gpt, PARAMS, TOKENS)
    assert any(segment.inside for segment in found.plan.segments)
    return found


def close(plain, ours):
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(ours), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def remats(f, *args):
    text = str(jax.make_jaxpr(f)(*args))
    return text.count("remat2[") + text.count("checkpoint[")


def accumulated(f):
    add = lambda total, tokens: (jax.tree.map(jnp.add, total, jax.grad(f)(PARAMS, tokens)), None)
    return lax.scan(add, jax.tree.map(jnp.zeros_like, PARAMS), jnp.stack([TOKENS, TOKENS + 1]))[0]


def mesh_of_two():
    return Mesh(np.array(jax.devices()[:2]), ("d",))


def sharded(f, check):
    def grad(p, tokens):
        gradients = jax.grad(f)(p, tokens)
        return gradients if check else jax.tree.map(lambda g: lax.pmean(g, "d"), gradients)  # checked ones are summed

    specs = {"in_specs": (P(), P("d")), "out_specs": P(), "check_vma": check}
    both = jnp.concatenate([TOKENS, TOKENS + 1])
    return jax.jit(jax.shard_map(grad, mesh=mesh_of_two(), **specs))(PARAMS, both)


def named(f):
    places = NamedSharding(mesh_of_two(), P()), NamedSharding(mesh_of_two(), P("d"))
    return jax.jit(jax.grad(f), in_shardings=places)(PARAMS, TOKENS)


UNDER = {
    "vmap": lambda f: jax.vmap(jax.grad(f), (None, 0))(PARAMS, jnp.stack([TOKENS, TOKENS + 1])),
    "accumulated": accumulated,
    "jvp": lambda f: jax.jvp(lambda p: f(p, TOKENS), (PARAMS,), (PARAMS,)),
    "shard_map": lambda f: sharded(f, True),
    "shard_map unchecked": lambda f: sharded(f, False),
    "named shardings": named,
}


@pytest.mark.parametrize("name", UNDER)
def test_planned_loops_under(name, planned):
    close(UNDER[name](gpt), UNDER[name](planned))
    if name != "jvp":
        assert remats(lambda: UNDER[name](planned)) > remats(lambda: UNDER[name](gpt))


def test_a_second_call_traces_nothing(planned):
    step = jax.jit(jax.grad(planned))
    step(PARAMS, TOKENS)
    step(PARAMS, TOKENS + 1)
    assert step._cache_size() == 1


def test_the_users_own_remat_is_kept_or_overridden():
    def loss(p, x):
        layer = jax.checkpoint(lambda x, w: x + jnp.tanh(jnp.sin(x @ w) @ w.T), prevent_cse=False)
        return jnp.mean(lax.scan(lambda x, w: (layer(x, w), None), x, p)[0] ** 2)

    args = jnp.ones((6, 16, 16)) / 16, jnp.ones((32, 16))
    again = lambda f: jremat.flops(jax.grad(f), *args).recompute
    fitted = lambda **options: jremat.fit(loss, *args, hbm_bytes="1GiB", target="cpu", compiles=0, **options)
    assert again(fitted()) == again(loss) > 0
    assert again(fitted(override=True)) == 0
    lean = leanest(loss, *args, override=True)
    assert again(lean) == lean.plan.recompute_flops > 0
    close(jax.jit(jax.value_and_grad(loss))(*args), jax.jit(jax.value_and_grad(lean))(*args))


class Block(nn.Module):
    """With everything that a Linen scan lifts: parameters, statistics, a counter, dropout."""

    @nn.compact
    def __call__(self, x, _):
        h = nn.Dropout(0.1, deterministic=False)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
        h = nn.BatchNorm(use_running_average=False)(h)
        count = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        count.value = count.value + 1
        return x + nn.Dense(8)(h), jnp.mean(h)


class Model(nn.Module):
    block: type

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "batch_stats": 0, "counters": 0}
        layers = nn.scan(self.block, variable_axes=axes, split_rngs={"params": True, "dropout": True}, length=5)
        x, means = layers()(nn.Dense(8)(x), None)
        return x, means


@pytest.mark.parametrize("block", [Block, nn.jit(nn.remat(Block, prevent_cse=False))])
def test_linen_scans_are_planned_in_place(block):
    model, x = Model(block), jax.random.normal(jax.random.key(1), (64, 8))
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(2)}, x)
    params = variables.pop("params")

    def loss(params, rest, x, key):
        given = {"params": params, **rest}
        (y, means), new = model.apply(given, x, rngs={"dropout": key}, mutable=["batch_stats", "counters"])
        return jnp.mean(y**2) + means.sum(), new

    args = params, variables, x, jax.random.key(3)
    ours = leanest(loss, *args, override=True)
    assert [own.length for segment in ours.plan.segments for own in segment.inside] == [5]
    of = lambda f: jax.jit(jax.value_and_grad(f, has_aux=True))(*args)
    (value, new), gradients = of(ours)
    close(of(loss), ((value, new), gradients))
    assert {int(leaf) for leaf in jax.tree.leaves(new["counters"])[0]} == {2}


class Layer(nnx.Module):
    """A block with statistics and dropout of its own."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


def test_nnx_scans_are_planned_in_place():
    make = nnx.split_rngs(splits=5)(nnx.vmap(Layer, in_axes=(0,), out_axes=0))
    graphdef, params, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, rest, x):
        layers = nnx.merge(graphdef, params, rest, copy=True)
        x = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(layers, x)
        changed = jax.tree.leaves(nnx.state(layers, nnx.BatchStat))
        return jnp.mean(x**2), changed

    args = params, rest, jax.random.normal(jax.random.key(1), (64, 8))
    ours = leanest(loss, *args)
    assert [own.length for segment in ours.plan.segments for own in segment.inside] == [5]
    close(*(jax.jit(jax.value_and_grad(f, has_aux=True))(*args) for f in (loss, ours)))
