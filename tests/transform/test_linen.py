"""``jremat.remat`` on Linen classes: same parameters, collections written once, flags by name, the class left alone."""

import copy
import functools
import pickle
from collections.abc import Callable

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jremat
from jremat.policy import Policy, tag

X = jax.random.normal(jax.random.key(0), (8, 4))


class Net(nn.Module):
    """A block with all that makes remat hard: batch statistics, dropout, a sown value, a flag."""

    @nn.compact
    def __call__(self, x, train: bool):
        h = tag(nn.Dense(16)(x), "up")
        h = nn.BatchNorm(use_running_average=not train, momentum=0.5)(h)
        self.sow("intermediates", "hidden", h)
        h = nn.Dropout(0.5, deterministic=not train)(jnp.sin(h))
        return nn.Dense(4)(h)


def run(net, variables, train=True):
    def loss(params):
        out, state = net.apply(
            {**variables, "params": params},
            X,
            train,
            rngs={"dropout": jax.random.key(1)},
            mutable=["batch_stats", "intermediates"],
        )
        return out.sum(), state

    return jax.value_and_grad(loss, has_aux=True)(variables["params"])


@pytest.fixture(scope="module")
def variables():
    return Net().init({"params": jax.random.key(2), "dropout": jax.random.key(3)}, X, True)


@pytest.mark.parametrize("policy", [jremat.FULL, Policy.save("up"), Policy.but("up"), Policy.offload("up")])
def test_gradients_statistics_and_sown_values_are_the_bare_modules(policy, variables):
    variables = {name: tree for name, tree in variables.items() if name != "intermediates"}
    rematted = jremat.remat(Net, policy, static_argnames="train")()
    chex.assert_trees_all_close(run(Net(), variables), run(rematted, variables), rtol=1e-5, atol=1e-5)
    (_, state), _ = run(rematted, variables)
    # momentum 0.5, once: half of the old mean (0) and half of the batch's; twice would give three quarters
    mean = state["batch_stats"]["BatchNorm_0"]["mean"]
    up = X @ variables["params"]["Dense_0"]["kernel"] + variables["params"]["Dense_0"]["bias"]
    chex.assert_trees_all_close(mean, up.mean(0) / 2, rtol=1e-4, atol=1e-6)
    assert len(state["intermediates"]["hidden"]) == 1


def test_parameters_keep_their_names_and_values(variables):
    rematted = jremat.remat(Net, jremat.FULL, static_argnames="train")()
    again = rematted.init({"params": jax.random.key(2), "dropout": jax.random.key(3)}, X, True)
    chex.assert_trees_all_close(variables["params"], again["params"], rtol=1e-6, atol=1e-6)


def test_only_the_tagged_value_is_kept(variables):
    def forward(net):
        return lambda params: net.apply({**variables, "params": params}, X, False)

    rows = jremat.residuals(
        forward(jremat.remat(Net, Policy.save("up"), static_argnames="train")()), variables["params"]
    )
    assert [(row.name, row.bytes) for row in rows.kept] == [("up", 8 * 16 * 4)]
    assert (
        jremat.residuals(forward(jremat.remat(Net, jremat.FULL, static_argnames="train")()), variables["params"]).kept
        == ()
    )
    assert jremat.residuals(forward(Net()), variables["params"]).total_bytes > 8 * 16 * 4


def test_a_flag_that_is_not_named_static_fails_as_under_jax_and_a_wrong_name_says_so():
    with pytest.raises(
        ValueError, match=r"static_argnames: expected parameters of __call__ \(self, x, train\), got 'trian'.*'train'"
    ):
        jremat.remat(Net, jremat.FULL, static_argnames="trian")().init(jax.random.key(0), X, True)


def test_a_misspelt_name_raises_when_the_module_is_used():
    with pytest.raises(ValueError, match=r"names 'upp'.*did you mean 'up'"):
        jremat.remat(Net, Policy.save("upp"), static_argnames="train")().init(jax.random.key(0), X, False)


def test_the_class_is_left_as_it_is(variables):
    before = Net.__call__
    jremat.remat(Net, jremat.FULL, static_argnames="train")
    assert Net.__call__ is before
    assert jremat.remat(Net, jremat.NONE) is Net


def test_a_module_in_place_of_its_class_is_refused():
    with pytest.raises(ValueError, match=r"target: expected the Linen class Net, got a module of it"):
        jremat.remat(Net(), jremat.FULL)


@pytest.mark.parametrize("target", [3, "Net", int])
def test_what_can_not_be_rematted_is_refused(target):
    with pytest.raises(ValueError, match="target: expected a Linen or NNX module class"):
        jremat.remat(target, jremat.FULL)


def test_inside_nn_scan_each_layer_keeps_its_own():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(4)(jnp.sin(tag(nn.Dense(16)(x), "up"))), None

    def stack(layer):
        scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=5)
        return scanned()

    params = stack(Layer).init(jax.random.key(0), X, None)
    rematted = stack(jremat.remat(Layer, Policy.save("up"), prevent_cse=False))
    rows = jremat.residuals(lambda p, x: rematted.apply(p, x, None)[0], params, X)
    assert {(row.name, row.copies): row.bytes for row in rows.kept}[("up", 5)] == 5 * 8 * 16 * 4
    loss = lambda net: jax.grad(lambda p: net.apply(p, X, None)[0].sum())(params)
    chex.assert_trees_all_close(loss(stack(Layer)), loss(rematted), rtol=1e-5, atol=1e-5)


def test_the_same_is_kept_under_remat3(remat3, variables):
    net = jremat.remat(Net, Policy.save("up"), static_argnames="train")()
    rows = jremat.residuals(lambda params: net.apply({**variables, "params": params}, X, False), variables["params"])
    assert [(row.name, row.bytes) for row in rows.kept] == [("up", 8 * 16 * 4)]


SPECS = (jremat.NONE, jremat.FULL, Policy.save("up"))


def made(block, **fields):
    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x):
            return block(**fields)(block(**fields)(x))

    return Parent().init(jax.random.key(0), X)["params"]


class Mlp(nn.Module):
    """A block of two layers."""

    width: int = 16
    kind = "mlp"

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(jnp.sin(jremat.tag(nn.Dense(self.width)(x), "up")))


class InSetup(nn.Module):
    block: type

    def setup(self):
        self.first, self.others = self.block(), [self.block(), self.block()]

    def __call__(self, x):
        for block in (self.first, *self.others):
            x = block(x)
        return x


@pytest.mark.parametrize("policy", SPECS)
def test_parameters_have_the_names_and_values_that_they_have_without_remat(policy):
    block = jremat.remat(Mlp, policy)
    expected, found = made(Mlp), made(block)
    assert sorted(found) == ["Mlp_0", "Mlp_1"]
    chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-6)
    assert sorted(made(jremat.remat(functools.partial(Mlp, width=4), policy))) == ["Mlp_0", "Mlp_1"]
    assert sorted(made(jremat.remat(block, policy))) == sorted(made(Mlp)), "nested"
    assert sorted(made(nn.remat(block))) == sorted(made(nn.remat(Mlp)))

    def in_setup(cls):
        return jax.tree.structure(InSetup(cls).init(jax.random.key(0), X))

    assert in_setup(block) == in_setup(Mlp)

    def mapped(cls):
        return made(nn.vmap(cls, variable_axes={"params": 0}, split_rngs={"params": True}))

    assert sorted(mapped(block)) == sorted(mapped(Mlp))


def test_a_subclass_of_a_rematted_class_has_its_own_name():
    class Twice(jremat.remat(Mlp, jremat.FULL)):
        @nn.compact
        def __call__(self, x):
            return 2 * super().__call__(x)

    assert sorted(made(Twice)) == ["Twice_0", "Twice_1"]


def test_a_rematted_class_stands_in_the_place_of_its_own():
    block = jremat.remat(Mlp, jremat.FULL)
    assert block is not Mlp and issubclass(block, Mlp) and block is jremat.remat(Mlp, jremat.FULL)
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__", "kind"):
        assert getattr(block, attribute) == getattr(Mlp, attribute)
    module = block(width=4)
    revived = pickle.loads(pickle.dumps(module))
    assert type(revived) is block and revived.width == 4
    assert copy.deepcopy(module) == module == module.clone()


def test_positions_of_static_arguments_count_self_as_nn_remat_does():
    net = jremat.remat(Net, jremat.FULL, static_argnums=2)()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    assert net.init(keys, X, True)["params"].keys() == Net().init(keys, X, True)["params"].keys()
    with pytest.raises(ValueError, match=r"static_argnums: expected positions of the 3 parameters .*2: train.*got 3"):
        jremat.remat(Net, jremat.FULL, static_argnums=3)().init(keys, X, True)


class Calls(nn.Module):
    """Calls a block of its own as ``how`` says."""

    how: Callable

    @nn.compact
    def __call__(self, x):
        return self.how(Mlp(), x)


def test_a_function_of_a_module_is_lifted_over_it():
    plain = Calls(lambda module, x: module(x))
    lifted = Calls(lambda module, x: jremat.checkpoint(lambda module, x: module(x), jremat.FULL)(module, x))
    variables = lifted.init(jax.random.key(0), X)
    assert all(
        isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(variables)
    )
    chex.assert_trees_all_close(variables, plain.init(jax.random.key(0), X), rtol=1e-6, atol=1e-6)
    step = lambda net: jax.value_and_grad(lambda v: net.apply(v, X).sum())
    chex.assert_trees_all_close(step(lifted)(variables)[1], step(plain)(variables)[1], rtol=1e-5, atol=1e-5)
    first_layer = 2 * 8 * X.shape[-1] * 16
    assert [jremat.flops(step(net), variables).recompute for net in (plain, lifted)] == [0, first_layer]


def test_what_a_lifted_module_writes_comes_out():
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            norm = nn.BatchNorm(use_running_average=False, momentum=0.5)
            return jremat.remat(lambda module, x: jnp.sin(module(x)), jremat.FULL)(norm, x)

    variables = Norm().init(jax.random.key(0), X)
    _, written = Norm().apply(variables, X + 2, mutable=["batch_stats"])
    expected = 0.5 * (X + 2).mean(0)
    chex.assert_trees_all_close(written["batch_stats"]["BatchNorm_0"]["mean"], expected, rtol=1e-5, atol=1e-6)


HELD = {
    "closure": lambda module, x: jremat.remat(lambda x: module(x), jremat.FULL)(x),
    "closure's closure": lambda module, x: (lambda call: jremat.remat(lambda x: call(x), jremat.FULL)(x))(
        lambda x: module(x)
    ),
    "method": lambda module, x: jremat.remat(module.__call__, jremat.FULL)(x),
    "partial": lambda module, x: jremat.remat(functools.partial(lambda module, x: module(x), module), jremat.FULL)(x),
    "second": lambda module, x: jremat.remat(lambda x, module: module(x), jremat.FULL)(x, module),
    "checkpoint": lambda module, x: jremat.checkpoint(lambda x: module(x), jremat.FULL)(x),
}


@pytest.mark.parametrize("how", HELD.values(), ids=HELD)
def test_a_function_that_would_write_tracers_into_a_module_is_refused(how):
    with pytest.raises(ValueError, match=r"holds the Linen module Mlp \(.*make the module the first argument"):
        Calls(how).init(jax.random.key(0), X)
    variables = Calls(lambda module, x: module(x)).init(jax.random.key(0), X)
    gradient, expected = (
        jax.grad(lambda v, call=call: Calls(call).apply(v, X).sum())(variables)
        for call in (how, lambda module, x: module(x))
    )
    chex.assert_trees_all_close(gradient, expected, rtol=1e-5, atol=1e-5)  # it only reads
