"""``jremat.remat`` on Linen classes: same parameters, collections written once, flags by name, the class left alone."""

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


def test_the_same_is_kept_under_remat3(variables):
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip(f"jax {jax.__version__} has no jax_remat3")
    net = jremat.remat(Net, Policy.save("up"), static_argnames="train")()
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    try:
        rows = jremat.residuals(
            lambda params: net.apply({**variables, "params": params}, X, False), variables["params"]
        )
    finally:
        jax.config.update("jax_remat3", before)
    assert [(row.name, row.bytes) for row in rows.kept] == [("up", 8 * 16 * 4)]


def test_submodules_are_named_as_under_nn_remat_so_that_parameters_interchange():
    def parameters(layer):
        class Parent(nn.Module):
            @nn.compact
            def __call__(self, x):
                return layer(4)(x)

        return Parent().init(jax.random.key(0), X)["params"].keys()

    assert parameters(jremat.remat(nn.Dense, jremat.FULL)) == parameters(nn.remat(nn.Dense)) == {"CheckpointDense_0"}
