"""Leaves of pytrees that are no arrays (rates, flags, functions, strings) are held fixed wherever a function goes."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import monitoring

import jremat
import policies
from jremat.policy import FULL
from jremat.transform.scan import scan_stack


@jax.tree_util.register_pytree_node_class
class Layer:
    """As an Equinox module: what it has are its leaves."""

    def __init__(self, w, rate=0.5, training=True, mode="pre", act=jnp.tanh):
        self.w, self.rate, self.training, self.mode, self.act = w, rate, training, mode, act
        self.nothing, self.dtype = None, np.float32

    def __call__(self, x):
        h = x @ self.w
        if self.training and self.rate > 0 and self.mode == "pre":
            h = h * (1 - self.rate)
        return self.act(h)

    def tree_flatten(self):
        return (self.w, self.rate, self.training, self.mode, self.act, self.nothing, self.dtype), "aux"

    @classmethod
    def tree_unflatten(cls, aux, leaves):
        new = object.__new__(cls)
        new.w, new.rate, new.training, new.mode, new.act, new.nothing, new.dtype = leaves
        return new


D, L = 8, 3
X, W = jax.random.normal(jax.random.key(0), (4, D)), jnp.eye(D) / 2
DOTS = policies.get("dots_saveable")


def loss(layer, x):
    return layer(x).sum()


def by_hand(w, x=X):
    return jnp.tanh(x @ w * 0.5).sum()


@pytest.mark.parametrize("policy", [FULL, DOTS], ids=lambda p: p.spec)
class TestCheckpoint:
    def test_gradient_bytes_and_recompute_are_those_of_the_arrays_alone(self, policy):
        of_layer = lambda w: jremat.checkpoint(loss, policy)(Layer(w), X)
        of_array = jremat.checkpoint(by_hand, policy)
        assert jnp.allclose(jax.grad(of_layer)(W), jax.grad(by_hand)(W))
        assert jremat.residuals(of_layer, W).total_bytes == jremat.residuals(of_array, W).total_bytes
        counts = [jremat.flops(jax.value_and_grad(f), W).recompute for f in (of_layer, of_array)]
        assert counts[0] == counts[1] == (2 * 4 * D * D if policy is FULL else 0)

    def test_the_class_is_rematted_in_its_place(self, policy):
        made = jremat.remat(Layer, policy)
        assert issubclass(made, Layer) and made.__name__ == "Layer" and made is jremat.remat(Layer, policy)
        layer, plain = made(W), Layer(W)
        paths = lambda tree: [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        assert paths(layer) == paths(plain)
        rebuilt = jax.tree.map(lambda leaf: leaf, layer)
        assert type(rebuilt) is made and rebuilt.mode == "pre"
        assert jnp.allclose(jax.grad(lambda w: loss(made(w), X))(W), jax.grad(by_hand)(W))
        rows = [jremat.residuals(loss, one, X).total_bytes for one in (layer, plain)]
        matmul = 4 * D * 4
        assert rows[0] == jremat.residuals(loss, plain, X, policy=policy).total_bytes
        assert rows[0] == (0 if policy is FULL else matmul) and rows[1] >= matmul
        assert type(copy.deepcopy(layer)) is made
        assert type(pickle.loads(pickle.dumps(made(W, act=abs)))) is made

    def test_an_instance_is_rematted_and_stays_a_pytree(self, policy):
        called = jremat.remat(Layer(W), policy)
        assert called(X).shape == (4, D)
        assert [leaf.shape for leaf in jax.tree.leaves(called) if isinstance(leaf, jax.Array)] == [(D, D)]
        gradient = jax.grad(lambda w: jremat.remat(Layer(w), policy)(X).sum())(W)
        assert jnp.allclose(gradient, jax.grad(by_hand)(W))

    def test_a_stack_of_them_reads_the_same_fixed_leaves_in_every_layer(self, policy):
        stacked = Layer(jnp.stack([W, 2 * W, -W]))

        def expected(ws):
            x = X
            for k in range(L):
                x = jnp.tanh(x @ ws[k] * 0.5)
            return x.sum()

        for plan in (policy, policies.get("every_k:2")):
            for build in (jremat.stack, scan_stack):
                run = build(lambda layer, x: layer(x), plan, num_layers=L)
                gradient = jax.grad(lambda ws, run=run: run(Layer(ws), X).sum())(stacked.w)
                assert jnp.allclose(gradient, jax.grad(expected)(stacked.w), atol=1e-5)
        with pytest.raises(ValueError, match=r"parameters.*: expected \[4, \.\.\.\]"):
            jremat.stack(lambda layer, x: layer(x), policy, num_layers=4)(stacked, X)

    def test_everything_that_reads_a_function_takes_them(self, policy):
        layer, block, step = Layer(W), lambda layer, x: layer(x), lambda w: loss(Layer(w), X)
        assert jremat.explain(loss, layer, X, policy=policy).kept_bytes == (128 if policy is DOTS else 0)
        assert jremat.replay(loss, layer, X, policy=policy).equal
        assert jremat.replay(block, Layer(jnp.stack([W] * L)), X, policy=policy, num_layers=L).equal
        rules = lambda *args, **more: [f.rule for f in jremat.lint(*args, policy=policy, **more)]
        assert rules(loss, layer, X) == rules(lambda w, x: loss(Layer(w), x), W, X)
        assert rules(block, layer, X, num_layers=L) == rules(lambda w, x: Layer(w)(x), W, X, num_layers=L)
        assert jremat.predicted_memory(loss, layer, X) == jremat.predicted_memory(loss, layer, X)
        figures = [
            jremat.compiled_memory(f, *args, target="cpu").peak_bytes
            for f, args in ((loss, (layer, X)), (lambda w, x: loss(Layer(w), x), (W, X)))
        ]
        assert figures[0] == figures[1]
        assert jremat.flops(jax.grad(step), W).model == jremat.flops(jax.grad(by_hand), W).model


def test_plans_are_made_of_the_arrays_alone():
    block, bare = lambda layer, x: layer(x), lambda w, x: Layer(w)(x)
    for more in ({}, {"num_layers": L}):
        plans = [
            jremat.plan(f, given, X, hbm_bytes=2**20, target="cpu", compiles=0, **more)
            for f, given in ((block, Layer(W)), (bare, W))
        ]
        assert plans[0].predicted_peak_bytes == plans[1].predicted_peak_bytes
        assert plans[0].policy.spec == plans[1].policy.spec
    for spec in ("sqrt", "budget:0.5"):
        found = [
            policies.get(spec).resolve(f, given, X, num_layers=4, target="cpu").spec
            for f, given in ((block, Layer(W)), (bare, W))
        ]
        assert found[0] == found[1]


def test_numbers_are_arrays_where_they_are_given_and_fixed_where_a_module_has_them():
    scaled = lambda x, scale: jnp.sin(jnp.sin(x) * scale["by"])
    assert jremat.residuals(scaled, 1.0, {"by": 2.0}).total_bytes > 0
    assert jnp.allclose(jax.grad(jremat.checkpoint(scaled, FULL))(1.0, {"by": 2.0}), jax.grad(scaled)(1.0, {"by": 2.0}))
    flag = lambda x, on: jnp.sin(x) if on else jnp.cos(x)
    assert jnp.allclose(jremat.checkpoint(flag, FULL)(X, True), jnp.sin(X))
    assert jnp.allclose(jremat.checkpoint(flag, FULL)(X, np.bool_(False)), jnp.cos(X))


def test_a_class_that_is_no_pytree_is_refused():
    class Plain:
        def __call__(self, x):
            return x

    with pytest.raises(ValueError, match=r"target: expected a Linen or NNX module class.*Equinox"):
        jremat.remat(Plain, FULL)


class TestResults:
    """A module that a function returns is the module that it would return: a training step returns one."""

    def test_checkpoint_returns_it_with_its_own_leaves(self):
        out = jremat.checkpoint(lambda layer, x: (layer, layer(x)), FULL)(Layer(W), X)
        assert (out[0].rate, out[0].training, out[0].act) == (0.5, True, jnp.tanh) and out[1].shape == (4, D)
        assert jremat.replay(lambda layer, x: (layer, layer(x)), Layer(W), X, policy=FULL).equal

    @pytest.mark.parametrize("spec", ["full", "none", "every_k:2", "revolve:2"])
    def test_a_carry_may_hold_one(self, spec):
        run = jremat.stack(
            lambda scale, carry: (carry[0], carry[0](carry[1]) * scale), policies.get(spec), num_layers=L
        )
        loss = lambda w: run(jnp.ones(L), (Layer(w), X))[1].sum()
        by_loop = lambda w: Layer(w)(Layer(w)(Layer(w)(X))).sum()
        assert jnp.allclose(jax.grad(loss)(W), jax.grad(by_loop)(W), atol=1e-5)
        assert run(jnp.ones(L), (Layer(W), X))[0].act is jnp.tanh

    def test_booleans_of_a_carry_are_arrays_as_in_a_scan(self):
        run = jremat.stack(lambda w, c: (jnp.tanh(c[0] @ w), c[1] | (c[0].sum() > 0)), FULL, num_layers=L)
        seen, x = [], X
        for _ in range(L):
            seen, x = [*seen, bool(x.sum() > 0)], jnp.tanh(x @ W)
        assert bool(run(jnp.stack([W] * L), (X, False))[1]) == any(seen)

    def test_a_step_that_returns_its_layers_is_planned_and_measured(self):
        layers, x = Layer(jnp.stack([W] * L)), X

        def step(policy):
            def update(layers, x):
                run = jremat.stack(lambda layer, x: layer(x), policy, num_layers=L)
                loss = lambda w: run(Layer(w), x).sum()
                return Layer(layers.w - 0.1 * jax.grad(loss)(layers.w), layers.rate)

            return update, (layers, x)

        found = jremat.plan(
            lambda layer, x: layer(x), Layer(W), x, num_layers=L, hbm_bytes=2**20, target="cpu", step=step
        )
        update, args = step(found.policy)
        assert found.peak_bytes == jremat.compiled_memory(update, *args, target="cpu").peak_bytes
        assert jremat.predicted_memory(update, *args).peak_bytes > 0


def test_an_eager_stack_of_modules_compiles_once():
    compiles = []
    run, layers = jremat.stack(lambda layer, x: layer(x), FULL, num_layers=L), Layer(jnp.stack([W] * L))
    run(layers, X)
    seen = lambda event, *args, **more: compiles.append(event) if "backend_compile" in event else None
    monitoring.register_event_duration_secs_listener(seen)
    try:
        run(layers, X)
    finally:
        monitoring.unregister_event_duration_listener(seen)
    assert not compiles
