"""An estimate of a function of one's own: letters in its shapes, numbers and layouts in their place."""

import jax
import jax.numpy as jnp
import pytest

import jremat
import policies
from jremat.estimator.parallel import Parallel
from jremat.estimator.transformer import estimate
from jremat.graph.letters import Polynomial

SIZES = {"b": 4, "s": 64, "h": 32, "f": 128}
LAYERS = 6


def block(p, x):
    """A gated MLP behind a norm, as anybody writes one."""
    y = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def shapes(b, s, h, f):
    made = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return {"gate": made(h, f), "up": made(h, f), "down": made(f, h)}, made(b, s, h)


def lettered():
    return shapes(*jax.export.symbolic_shape("b, s, h, f"))


def stack(policy):
    body = jremat.checkpoint(block, policy) if not policy.keeps_everything else block
    return lambda p, x: jax.lax.scan(lambda x, own: (body(own, x), None), x, p)[0]


def stacked(params):
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct((LAYERS, *p.shape), p.dtype), params)


@pytest.mark.parametrize("spec", ["full", "none", "dots_saveable", "save_only_matmuls", "ops:pointwise"])
def test_formulas_at_numbers_are_the_counts_at_these_numbers(spec):
    policy, (params, x) = policies.get(spec), shapes(**SIZES)
    found = estimate(block, policy, *lettered(), num_layers=LAYERS, sizes=SIZES)
    assert found.kept_bytes == jremat.residuals(stack(policy), stacked(params), x).total_bytes
    gradient = jax.value_and_grad(lambda p, x: stack(policy)(p, x).sum())
    assert found.recompute_flops == jremat.flops(gradient, stacked(params), x).recompute
    assert found.peak_bytes == estimate(block, policy, params, x, num_layers=LAYERS).peak_bytes


def test_flops_with_letters_are_polynomials():
    policy = policies.get("full")
    gradient = jax.value_and_grad(lambda p, x: jremat.checkpoint(block, policy)(p, x).sum())
    letters, numbers = (jremat.flops(gradient, *args) for args in (lettered(), shapes(**SIZES)))
    for name in ("model", "recompute", "total"):
        assert getattr(letters, name).at(SIZES) == getattr(numbers, name) > 0
    assert str(letters.recompute) == "4·b·f·h·s"  # gate and up; nobody reads down's result


def test_a_plan_over_layers_runs_in_the_executor():
    found = estimate(block, policies.get("every_k:3"), *lettered(), num_layers=LAYERS, sizes=SIZES)
    assert [line.formula for line in found.kept if line.name == "block input"] or found.kept_bytes
    assert found.kept_bytes == 2 * 4 * 4 * 64 * 32  # two groups' inputs in float32


def test_devices_split_letters():
    none = policies.get("none")
    one = estimate(block, none, *lettered(), num_layers=LAYERS, sizes=SIZES)
    for parallel, ways, ways_narrow in (
        (Parallel(data=2), 2, 2),
        (Parallel(tensor=4), 4, 1),
        (Parallel(tensor=4, sequence=True), 4, 4),
        (Parallel(context=2), 2, 2),
    ):
        found = estimate(block, none, *lettered(), num_layers=LAYERS, sizes=SIZES, parallel=parallel)
        for before, after in zip(one.kept, found.kept):
            assert before.name == after.name and before.total_bytes == after.total_bytes
            terms = [Polynomial.of_text(x) for x in before.formula.replace("·", "*").split(" + ")]
            shares = [x.at(dict(found.symbols)) / (ways if "f" in x.letters else ways_narrow) for x in terms]
            assert after.device_bytes == sum(shares)


def test_a_whole_loss():
    loss = lambda p, x: jnp.square(block(p, x)).mean()
    found = estimate(loss, policies.get("full"), *lettered(), sizes=SIZES, optimizer="sgd")
    assert found.state_bytes == 2 * 4 * 3 * 32 * 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": {"b": 4}}, "got none for f, h, s"),
        ({"sizes": {**SIZES, "q": 3}}, "'q' is no letter in the arguments' shapes"),
        ({"sizes": {**SIZES, "b": 0}}, "sizes: b: expected a whole number"),
        ({"parallel": Parallel(data=3)}, "data: expected a divisor of batch=4, got 3"),
        ({"parallel": Parallel(pipeline=2)}, "pipeline: "),
        ({"num_layers": 0}, "num_layers: expected"),
    ],
)
def test_mistakes_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        how = {"num_layers": LAYERS, "sizes": SIZES} | change
        estimate(block, policies.get("full"), *lettered(), **how)
    with pytest.raises(ValueError, match="args: expected shapes, one layer's parameters"):
        estimate(block, policies.get("full"), lettered()[0], num_layers=2)
    with pytest.raises(ValueError, match="plan over layers"):
        estimate(block, policies.get("every_k:2"), *lettered(), sizes=SIZES)
