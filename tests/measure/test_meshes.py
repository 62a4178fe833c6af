"""Meshes inside a program that is compiled for devices that are not here."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jremat
import policies
from jremat.measure import compiled_memory, mesh

TARGET, ROWS = "h200x4", P("data")


def constrained(over, w, x):
    return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), NamedSharding(over, ROWS))


def mapped(over, w, x):
    f = jax.shard_map(lambda x, w: jnp.tanh(x @ w), mesh=over, in_specs=(ROWS, P()), out_specs=ROWS)
    return f(x, w)


def by_context(w, x):
    return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), ROWS)


def step(f):
    return jax.value_and_grad(lambda w, x: f(w, x).sum())


def shapes(over):
    placed = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(over, spec))
    return placed((64, 64), P()), placed((1024, 64), ROWS)


def here():
    return jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))


def described():
    return mesh(TARGET, data=4)


def abstract():
    return AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


GIVEN = 4 * (64 * 64 + 256 * 64)  # bytes of the arguments on one of four devices


@pytest.mark.parametrize(
    ("f", "of_program", "of_arguments"),
    [
        (constrained, described, here),
        (constrained, abstract, described),
        (mapped, described, abstract),
        (mapped, abstract, here),
    ],
)
def test_a_mesh_of_the_target_or_of_no_devices(f, of_program, of_arguments):
    over = of_program()
    found = compiled_memory(step(lambda w, x: f(over, w, x)), *shapes(of_arguments()), target=TARGET)
    assert found.argument_bytes == GIVEN


@pytest.mark.parametrize(
    "context", [lambda: jax.set_mesh(described()), lambda: jax.sharding.use_abstract_mesh(abstract())]
)
def test_a_context_mesh(context):
    with context():
        assert compiled_memory(step(by_context), *shapes(abstract()), target=TARGET).argument_bytes == GIVEN


@pytest.mark.parametrize(("f", "words"), [(constrained, "sharding_constraint"), (mapped, "shard_map")])
def test_a_mesh_of_what_is_here_is_refused_in_a_line(f, words):
    over = here()
    with pytest.raises(ValueError) as refused:
        compiled_memory(step(lambda w, x: f(over, w, x)), *shapes(abstract()), target=TARGET)
    [line] = str(refused.value).splitlines()
    assert line.startswith(f"fn: {words} at ") and "test_meshes.py:" in line
    assert "AbstractMesh" in line and "jremat.measure.mesh('h200x4', data=4)" in line


def test_a_context_mesh_of_what_is_here_is_refused_in_a_line():
    with jax.set_mesh(here()), pytest.raises(ValueError, match=r"^fn: .*set_mesh.*jremat.measure.mesh\('h200x4'"):
        compiled_memory(step(by_context), *shapes(abstract()), target=TARGET)


@pytest.mark.parametrize("of_program", [here, described, abstract])
def test_a_trace_and_a_plan(of_program):
    """What compiles nothing takes any mesh; a plan is compiled, so that it takes those of its target alone."""
    over = of_program()
    block = lambda w, x: constrained(over, w, x)
    w, x = shapes(abstract())
    assert jremat.predicted_memory(step(block), w, x).argument_bytes == 4 * (64 * 64 + 1024 * 64)
    assert not jremat.lint(block, w, x)
    whole = lambda plan: (
        step(jremat.stack(block, plan, num_layers=2)),
        (jax.ShapeDtypeStruct((2, 64, 64), w.dtype), x),
    )
    plan = lambda: jremat.plan(block, w, x, num_layers=2, hbm_bytes=2**30, target=TARGET, step=whole)
    if of_program is here:
        with pytest.raises(ValueError, match="sharding_constraint"):
            plan()
    else:
        assert plan().peak_bytes < 2**21


@pytest.mark.parametrize(
    "model", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto], ids=lambda kind: kind.name
)
def test_gradients_of_a_stack_keep_the_sharding_that_is_in_their_type(model):
    devices = jax.devices()[:4]
    over = jax.make_mesh((2, 2), ("data", "model"), devices=devices, axis_types=(jax.sharding.AxisType.Explicit, model))
    with jax.set_mesh(over):
        w = jax.device_put(jnp.stack([0.3 * jnp.eye(4)] * 4), P(None, "data", None))
        x = jax.device_put(jnp.ones((4, 4)), ROWS)

        def block(w, x):
            return jnp.tanh(jnp.einsum("ab,bc->ac", x, w, out_sharding=P("data", None)))

        expected = jax.grad(lambda w: jax.lax.scan(lambda x, w: (block(w, x), None), x, w)[0].sum())(w)
        for spec in ("full", "every_k:3", "revolve:2"):
            run = jremat.stack(block, policies.get(spec), num_layers=4)
            found = jax.jit(jax.grad(lambda w, run=run: run(w, x).sum()))(w)
            assert jax.typeof(found) == jax.typeof(expected)
            assert jnp.allclose(jax.device_get(found), jax.device_get(expected), atol=1e-6)
        with pytest.raises(ValueError, match="sharding over 4 devices, the target has 1"):
            jremat.plan(block, w[0], x, num_layers=4, hbm_bytes=2**20, target="cpu")
