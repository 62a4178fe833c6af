"""``jremat.remat`` on NNX modules, classes and functions: state changes once, the class is left alone."""

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jremat
from jremat.policy import Policy, tag

X = jax.random.normal(jax.random.key(0), (8, 4))


class Count(nnx.Variable):
    """Calls made."""


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(4, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 4, rngs=rngs)
        self.calls = Count(jnp.array(0))

    def __call__(self, x, scale: float = 1.0):
        self.calls[...] += 1
        h = self.norm(tag(self.up(x), "up"))
        return self.down(self.dropout(jnp.sin(h))) * scale


def step(net, call):
    loss = lambda net: call(net, X).sum()
    value, grads = nnx.value_and_grad(loss)(net)
    return value, nnx.to_pure_dict(grads)


@pytest.mark.parametrize("policy", [jremat.FULL, Policy.save("up"), Policy.but("up")])
def test_gradients_statistics_and_counters_are_the_bare_modules(policy):
    bare, ours = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    chex.assert_trees_all_close(
        step(bare, Net.__call__), step(ours, jremat.remat(Net.__call__, policy)), rtol=1e-5, atol=1e-5
    )
    assert int(ours.calls[...]) == 1
    chex.assert_trees_all_close(ours.norm.mean[...], ours.up(X).mean(0) / 2, rtol=1e-4, atol=1e-6)  # momentum 0.5, once


def test_a_class_becomes_a_subclass_and_is_left_as_it_is():
    before = Net.__call__
    rematted = jremat.remat(Net, Policy.save("up"))
    assert issubclass(rematted, Net) and rematted is not Net and Net.__call__ is before
    assert rematted(nnx.Rngs(0))(X).shape == X.shape


def test_a_module_becomes_a_function():
    net = Net(nnx.Rngs(0))
    assert jremat.remat(net, jremat.FULL)(X, scale=2.0).shape == X.shape
    assert int(net.calls[...]) == 1


def test_only_the_tagged_value_is_kept():
    def kept(policy):
        graphdef, state = nnx.split(Net(nnx.Rngs(0)))
        call = jremat.remat(Net.__call__, policy)
        rows = jremat.residuals(lambda state: call(nnx.merge(graphdef, state), X), state).kept
        return [(row.name, row.bytes) for row in rows]

    assert kept(Policy.save("up")) == [("up", 8 * 16 * 4)]
    assert kept(jremat.FULL) == []
    assert sum(size for _, size in kept(jremat.NONE)) > 8 * 16 * 4


def test_a_misspelt_name_raises():
    with pytest.raises(ValueError, match="did you mean 'up'"):
        jremat.remat(Net.__call__, Policy.save("upp"))(Net(nnx.Rngs(0)), X)


def test_a_function_of_several_modules_by_keyword():
    def both(x, *, first, second):
        return second(first(x))

    nets = {"first": Net(nnx.Rngs(0)), "second": Net(nnx.Rngs(1))}
    expected = both(X, first=Net(nnx.Rngs(0)), second=Net(nnx.Rngs(1)))
    chex.assert_trees_all_close(jremat.remat(both, Policy.save("up"))(X, **nets), expected, rtol=1e-6)
    assert [int(net.calls[...]) for net in nets.values()] == [1, 1]


class TestStateWhereverItStands:
    def test_random_streams_move_on(self):
        def masks(call, rngs):
            return call(X, rngs), call(X, rngs), int(rngs.default.count[...])

        dropout = nnx.Dropout(0.5)
        f = lambda x, rngs, d=dropout: d(x, rngs=rngs)
        bare, ours = masks(f, nnx.Rngs(0)), masks(jremat.remat(f, jremat.FULL), nnx.Rngs(0))
        chex.assert_trees_all_close(bare, ours)
        assert ours[2] == 2 and not jnp.array_equal(ours[0], ours[1])

    def test_modules_inside_containers(self):
        norm = nnx.BatchNorm(4, momentum=0.5, rngs=nnx.Rngs(0))
        jremat.remat(lambda nets, x: nets["norm"](x), jremat.FULL)({"norm": norm}, X)
        chex.assert_trees_all_close(norm.mean[...], X.mean(0) / 2, rtol=1e-4, atol=1e-6)

    def test_bare_variables(self):
        count = nnx.Variable(jnp.zeros(()))

        def f(count, x):
            count[...] += 1
            return jnp.sin(x)

        jremat.remat(f, jremat.FULL)(count, X)
        assert float(count[...]) == 1

    def test_a_module_that_nothing_changes_works_under_an_outer_trace(self):
        net = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        rematted = jremat.remat(net, jremat.FULL)
        chex.assert_trees_all_close(jax.jit(rematted)(X), net(X), rtol=1e-6)
        chex.assert_trees_all_close(
            jax.grad(lambda x: rematted(x).sum())(X), jax.grad(lambda x: net(x).sum())(X), rtol=1e-6
        )

    def test_a_bound_method_sees_its_modules_new_weights(self):
        net = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        rematted = jremat.remat(net.__call__, jremat.FULL)
        rematted(X)
        net.kernel[...] = net.kernel[...] * 0 + 1
        chex.assert_trees_all_close(rematted(X), net(X), rtol=1e-6)

    def test_a_function_that_closes_over_a_module_is_refused(self):
        net = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match=r"closes over the NNX Linear 'net'.*pass it as an argument"):
            jremat.remat(lambda x: net(x), jremat.FULL)
