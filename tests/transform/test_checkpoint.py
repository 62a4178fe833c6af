"""``jremat.checkpoint`` holds a policy to its word, and lives through everything that JAX does to a function."""

import functools
import warnings

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import jremat
import policies
from jremat.policy import Policy, tag
from jremat.policy.ops import MATMUL, WEIGHT_MATMUL, Family

B, H, F = 4, 8, 16  # batch, hidden, MLP
X, W1, W2 = jnp.ones((B, H)), jnp.full((H, F), 0.1), jnp.full((F, H), 0.1)
UP_BYTES = B * F * 4


def mlp(x, w1, w2):
    return jnp.sin(tag(x @ w1, "up")) @ w2


def kept(f, *args, **kwargs):
    return jremat.residuals(f, *args, **kwargs).total_bytes


def reruns(f, *args):
    loss = jax.value_and_grad(lambda *args: f(*args).sum(), tuple(range(len(args))))
    return jremat.flops(loss, *args).count.recompute


class TestStrictness:
    def test_a_name_that_nothing_bears_raises_and_lists_what_exists(self):
        with pytest.raises(ValueError, match=r"'save:upp' names 'upp' \(did you mean 'up'\?\).*this function: up"):
            jremat.checkpoint(mlp, Policy.save("upp"))(X, W1, W2)

    def test_without_strict_it_warns(self):
        with pytest.warns(UserWarning, match="names 'uq'"):
            jremat.checkpoint(mlp, Policy.save("uq"), strict=False)(X, W1, W2)

    def test_an_optional_name_may_be_missing_as_long_as_something_matches(self):
        both = Policy.save("up", "gate").with_optional("gate")
        assert kept(mlp, X, W1, W2, policy=both) == UP_BYTES
        with pytest.raises(ValueError, match="matches nothing in this function"):
            jremat.checkpoint(mlp, Policy.save("gate").with_optional())(X, W1, W2)

    def test_a_family_that_nothing_belongs_to_raises(self):
        alone = Policy.ops(Family("fft", "Fourier transforms", ("fft",)))
        with pytest.raises(ValueError, match=r"matches nothing.*op families: matmul, pointwise, weight_matmul"):
            jremat.checkpoint(mlp, alone)(X, W1, W2)

    def test_a_user_family_in_one_line(self):
        sines = Family("sine", "sines", ("sin",))
        assert kept(mlp, X, W1, W2, policy=Policy.ops(sines)) == UP_BYTES

    @pytest.mark.parametrize("policy", ["dots_saveable", None, jax.checkpoint_policies.dots_saveable])
    def test_what_is_no_policy_is_refused(self, policy):
        with pytest.raises(ValueError, match="policy: expected a Policy"):
            jremat.checkpoint(mlp, policy)

    def test_a_plan_over_layers_is_refused_and_says_where_it_goes(self):
        plan = jremat.LayerPlan((jremat.policy.Segment((jremat.FULL,)),), label="every_k:1,full")
        with pytest.raises(ValueError, match=r"is a plan for a stack of layers.*jremat\.stack"):
            jremat.checkpoint(mlp, plan)

    def test_a_planned_policy_holds_for_its_own_graph_alone(self):
        graph = jremat.trace(mlp, X, W1, W2)
        sine = next(op.outputs[0] for op in graph.ops if op.primitive == "sin")
        planned = Policy(values=((sine, jremat.Decision.SAVE),), fingerprint=graph.fingerprint)
        assert kept(mlp, X, W1, W2, policy=planned) == UP_BYTES
        assert reruns(jremat.checkpoint(mlp, planned), X, W1, W2) == 1  # cos needs what sin read
        with pytest.raises(ValueError, match="was planned for graph"):
            jremat.checkpoint(mlp, planned)(X[:2], W1, W2)

    def test_a_users_tag_can_not_pass_for_one_of_our_marks(self):
        with pytest.raises(ValueError, match="head of jremat's own marks"):
            tag(X, "jremat.0")


class TestStaticArguments:
    def test_named_static_arguments_and_strings_are_held_fixed(self):
        def f(x, w1, w2, mode, twice):
            y = mlp(x, w1, w2) if mode == "sine" else x
            return y * 2 if twice else y

        g = jremat.checkpoint(f, Policy.save("up"), static_argnames=["twice"])
        chex.assert_trees_all_close(g(X, W1, W2, "sine", True), 2 * mlp(X, W1, W2))
        chex.assert_trees_all_close(g(X, W1, W2, mode="sine", twice=False), mlp(X, W1, W2))

    def test_keyword_only_static_names_leave_star_args_alone(self):
        def f(x, *rest, mode):
            return jnp.sin(x) + sum(jnp.sin(jnp.sin(r)) for r in rest)

        named = kept(f, X, X + 1, X + 2, mode="s", static_argnames="mode")
        assert named == kept(f, X, X + 1, X + 2, mode="s") == 5 * X.nbytes

    def test_a_static_name_that_is_no_parameter_raises(self):
        with pytest.raises(ValueError, match=r"static_argnames: expected parameters of mlp \(x, w1, w2\), got 'w3'"):
            jremat.checkpoint(mlp, Policy.save("up"), static_argnames="w3")(X, W1, W2)

    def test_integers_none_and_keys_pass_through(self):
        def f(batch, w1, w2, key):
            x = batch["x"] + 0 * batch["ids"][:, None]
            noise = jax.random.bernoulli(key, 0.5, (B, F))
            assert batch["mask"] is None
            return jnp.where(noise, jnp.sin(tag(x @ w1, "up")), 0) @ w2

        batch = {"x": X, "ids": jnp.arange(B), "mask": None}
        key = jax.random.key(0)
        bare = jax.grad(lambda w: f(batch, w, W2, key).sum())(W1)
        g = jremat.checkpoint(f, Policy.save("up"))
        chex.assert_trees_all_close(bare, jax.grad(lambda w: g(batch, w, W2, key).sum())(W1), rtol=1e-6)


class TestSurvives:
    def test_jit_and_vmap_over_batched_weights(self):
        policy, many = Policy.ops(WEIGHT_MATMUL), 3
        w1, w2 = jnp.stack([W1] * many), jnp.stack([W2] * many)
        x = jnp.stack([X] * many)
        ours = jax.jit(jax.vmap(jremat.checkpoint(mlp, policy)))
        jaxs = jax.jit(jax.vmap(jax.checkpoint(mlp, policy=policy)))
        assert kept(ours, x, w1, w2) == many * UP_BYTES
        assert kept(jaxs, x, w1, w2) == 0  # under vmap every dot has a batch dimension

    def test_scan_keeps_one_copy_a_step_and_finds_its_name(self):
        w1 = jnp.stack([W1] * 5)
        layer = jremat.checkpoint(lambda x, w: mlp(x, w, W2), Policy.save("up"), prevent_cse=False)
        stacked = jremat.residuals(lambda x, w1: lax.scan(lambda x, w: (layer(x, w), None), x, w1)[0], X, w1)
        (up,) = [row for row in stacked.kept if row.name == "up"]
        assert (up.copies, up.shape, up.bytes) == (5, (B, F), 5 * UP_BYTES)
        assert "test_checkpoint.py" in up.source

    def test_values_inside_a_scan_in_the_function_are_decided_too(self):
        w1 = jnp.stack([W1] * 5)

        def f(x, w1):
            return lax.scan(lambda x, w: (mlp(x, w, W2), None), x, w1)[0]

        for policy in (Policy.save("up"), Policy.ops(WEIGHT_MATMUL)):
            rows = jremat.residuals(f, X, w1, policy=policy).kept
            assert {row.name for row in rows} >= {"up"}
            assert jax.tree.all(
                jax.tree.map(
                    jnp.allclose,
                    *[jax.grad(lambda w, g=g: g(X, w).sum())(w1) for g in (f, jremat.checkpoint(f, policy))],
                )
            )

    def test_cond(self):
        def f(go, x, w1, w2):
            return lax.cond(go, lambda x: mlp(x, w1, w2), lambda x: x, x)

        g = jremat.checkpoint(f, Policy.save("up"))
        for go in (True, False):
            chex.assert_trees_all_close(
                *[jax.grad(lambda w, h=h, go=go: h(go, X, w, W2).sum())(W1) for h in (f, g)], rtol=1e-6
            )
        assert kept(g, True, X, W1, W2) >= UP_BYTES

    def test_grad_of_grad(self):
        hessian = lambda f: jax.grad(lambda x: (jax.grad(lambda x: f(x, W1, W2).sum())(x) ** 2).sum())(X)
        chex.assert_trees_all_close(hessian(mlp), hessian(jremat.checkpoint(mlp, Policy.save("up"))), rtol=1e-5)

    def test_forward_mode(self):
        g = jremat.checkpoint(mlp, Policy.save("up"))
        bare, ours = (jax.jvp(lambda x, f=f: f(x, W1, W2), (X,), (X,)) for f in (mlp, g))
        chex.assert_trees_all_close(bare, ours, rtol=1e-6)

    def test_shard_map_over_two_devices_with_a_collective_inside(self):
        mesh = Mesh(jax.devices()[:2], ("data",))
        rows, whole = PartitionSpec("data"), PartitionSpec()

        def f(x, w1, w2):
            return lax.psum(mlp(x, w1, w2).sum(), "data")

        def sharded(f):
            return jax.shard_map(f, mesh=mesh, in_specs=(rows, whole, whole), out_specs=whole)

        g = jremat.checkpoint(f, Policy.save("up"))
        bare, ours = (jax.jit(jax.grad(sharded(h), 1))(X, W1, W2) for h in (f, g))
        chex.assert_trees_all_close(bare, ours, rtol=1e-6)
        assert kept(sharded(g), X, W1, W2) == UP_BYTES
        assert kept(sharded(jremat.checkpoint(f, jremat.FULL)), X, W1, W2) == 0

    def test_a_shard_map_and_a_collective_inside_the_function(self):
        mesh = Mesh(jax.devices()[:2], ("data",))
        rows, whole = PartitionSpec("data"), PartitionSpec()
        inner = jax.shard_map(
            lambda x, w: lax.psum(tag(x @ w, "part"), "data"), mesh=mesh, in_specs=(rows, whole), out_specs=whole
        )

        def f(x, w1, w2):
            return jnp.sin(inner(x, w1)) @ w2

        with pytest.raises(
            ValueError, match=r"can't reach what shard_map at .*hides \(matmul\); put jremat.checkpoint on"
        ):
            jremat.checkpoint(f, Policy.ops(MATMUL))(X, W1, W2)
        g = jremat.checkpoint(f, Policy.save("part"))
        bare, ours = (jax.jit(jax.grad(lambda w, h=h: h(X, w, W2).sum()))(W1) for h in (f, g))
        chex.assert_trees_all_close(bare, ours, rtol=1e-6)

    def test_debug_callbacks_speak_as_often_as_under_jaxs_own_remat(self):
        heard = {}

        def f(who, x, w1, w2):
            jax.debug.callback(lambda: heard.__setitem__(who, heard.get(who, 0) + 1))
            return mlp(x, w1, w2)

        for who, remat in (("ours", functools.partial(jremat.checkpoint, policy=jremat.FULL)), ("jax", jax.checkpoint)):
            g = remat(functools.partial(f, who))
            jax.block_until_ready(jax.grad(lambda w, g=g: g(X, w, W2).sum())(W1))
        jax.effects_barrier()
        assert heard["ours"] == heard["jax"] >= 1

    def test_frozen_parameters_get_no_gradient_and_adapters_all_of_theirs(self):
        down, up = jnp.full((H, 2), 0.3), jnp.full((2, F), 0.2)

        def f(adapters, frozen, x):
            w1, w2 = frozen
            return jnp.sin(tag(x @ w1 + x @ adapters["down"] @ adapters["up"], "up")) @ w2

        g = jremat.checkpoint(f, jremat.FULL)
        grads = jax.grad(lambda a: g(a, (W1, W2), X).sum())({"down": down, "up": up})
        assert all(jnp.abs(leaf).min() > 0 for leaf in jax.tree.leaves(grads))

    def test_bare_functions_are_left_alone_under_none(self):
        assert jremat.checkpoint(mlp, jremat.NONE) is mlp

    def test_names_inside_a_custom_vjp_are_kept_once(self):
        @jax.custom_vjp
        def kernel(x):
            return forward(x)[0]

        def forward(x):
            y = tag(jnp.exp(x), "kernel_out")
            return y, y

        kernel.defvjp(forward, lambda y, g: (g * y,))
        f = lambda x, w1, w2: kernel(x @ w1) @ w2
        assert kept(f, X, W1, W2, policy=Policy.save("kernel_out")) == UP_BYTES
        assert reruns(jremat.checkpoint(f, Policy.save("kernel_out")), X, W1, W2) == 0
        assert kept(f, X, W1, W2, policy=Policy.but("kernel_out")) == 0
        assert reruns(jremat.checkpoint(f, Policy.but("kernel_out")), X, W1, W2) == 1

    def test_a_remat_inside_a_remat_hears_its_own_marks_alone(self):
        inner = jremat.checkpoint(mlp, Policy.ops(WEIGHT_MATMUL))
        outer = jremat.checkpoint(lambda x, w1, w2: jnp.cos(inner(x, w1, w2)), Policy.ops(WEIGHT_MATMUL))
        with pytest.raises(ValueError, match="matches nothing"):  # the inner remat is whole, its matmuls its own
            outer(X, W1, W2)
        full = jremat.checkpoint(lambda x, w1, w2: jnp.cos(inner(x, w1, w2)), jremat.FULL)
        assert kept(full, X, W1, W2) == 0
        assert jremat.trace(inner, X, W1, W2).names == ("up",)

    def test_a_jit_that_places_its_arguments_stays_whole(self):
        mesh = Mesh(jax.devices()[:2], ("data",))
        rows = jax.NamedSharding(mesh, PartitionSpec("data"))
        inner = jax.jit(lambda x, w: tag(x @ w, "placed"), in_shardings=(rows, None), out_shardings=rows)
        f = lambda x, w: jnp.sin(inner(x, w))
        for policy in (Policy.save("placed"), Policy.ops(MATMUL)):
            g = jremat.checkpoint(f, policy)
            assert kept(g, X, W1) == UP_BYTES
        assert "sharding" in str(jax.make_jaxpr(g)(X, W1)).lower()

    def test_custom_jvp_functions(self):
        f = lambda x: jax.nn.relu(jax.nn.logsumexp(jax.nn.softmax(tag(x @ W1, "up")), axis=-1)).sum()
        for policy in (Policy.save("up"), Policy.but("up"), jremat.FULL):
            chex.assert_trees_all_close(jax.grad(f)(X), jax.grad(jremat.checkpoint(f, policy))(X), rtol=1e-5)

    def test_a_tag_inside_a_custom_jvp_is_heard_by_nobody_and_raises(self):
        @jax.custom_jvp
        def sine(x):
            return jnp.sin(tag(x, "inner"))

        sine.defjvp(lambda p, t: (jnp.sin(p[0]), jnp.cos(p[0]) * t[0]))
        with pytest.raises(ValueError, match="names 'inner', which no value bears"):
            jremat.checkpoint(lambda x: sine(x).sum(), Policy.save("inner"))(X)

    def test_a_value_read_past_its_tag_is_kept_for_those_who_read_it(self):
        def f(x, w1, w2):
            y = x @ w1
            return jnp.sin(y) @ w2 + jnp.sin(tag(y, "up")) @ w2

        def unused(x, w1, w2):
            y = x @ w1
            tag(y, "up")
            return jnp.sin(y) @ w2

        both = Policy.ops(MATMUL) | Policy.save("up")
        for g in (f, unused):
            assert reruns(jremat.checkpoint(g, both), X, W1, W2) == 0

    def test_nothing_to_differentiate_keeps_nothing(self):
        assert len(jremat.residuals(lambda i: i * 2, 3)) == 0


class TestRetracing:
    def test_a_second_call_with_an_equal_policy_does_not_trace_the_function_again(self):
        traced = chex.assert_max_traces(n=1)(mlp)
        for _ in range(2):
            jremat.checkpoint(traced, Policy.save("up"))(X, W1, W2)

    def test_a_jitted_step_with_the_policy_as_a_static_argument_compiles_once(self):
        @functools.partial(jax.jit, static_argnames="policy")
        @chex.assert_max_traces(n=1)
        def step(x, policy):
            return jax.grad(lambda x: jremat.checkpoint(mlp, policy)(x, W1, W2).sum())(x)

        step(X, policy=Policy.save("up"))
        step(X, policy=Policy.save("up").labelled("another name for it"))


def test_an_offload_that_remat3_would_lose_raises(remat3):
    if jax.__version_info__ >= (0, 12):
        assert jremat.residuals(mlp, X, W1, W2, policy=Policy.offload("up")).host_bytes == UP_BYTES
        return
    with pytest.raises(ValueError, match=r"offloads, which jax_remat3 of jax .* recomputes instead"):
        jremat.checkpoint(mlp, Policy.offload("up"))(X, W1, W2)


@pytest.mark.parametrize(
    "policy, units, matmuls",
    [(jremat.FULL, 0, 1), (Policy.save("up"), 1, 0), (Policy.ops(WEIGHT_MATMUL), 1, 0), (Policy.but("up"), 1, 1)],
)
def test_the_same_is_kept_under_remat3(remat3, policy, units, matmuls):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kept(mlp, X, W1, W2, policy=policy) == units * UP_BYTES
    assert reruns(jremat.checkpoint(mlp, policy), X, W1, W2) == matmuls


def test_functions_linen_and_nnx_have_one_checkpoint():
    """Full remat by ``jremat.checkpoint`` recomputes the first of two matmuls, whatever is rematted."""

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(jnp.tanh(nn.Dense(4)(x)))

    class Nnx(nnx.Module):
        def __init__(self):
            self.up, self.down = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    x, w, full = jnp.ones((2, 4)), jnp.ones((2, 4, 4)), policies.get("full")
    linen, module = jremat.checkpoint(Linen, policy=full)(), jremat.checkpoint(Nnx, full)()
    graph, state = nnx.split(module)
    losses = {
        "function": (jremat.checkpoint(lambda w, x: jnp.tanh(x @ w[0]) @ w[1], full), w),
        "linen": (linen.apply, linen.init(jax.random.key(0), x)),
        "nnx": (lambda state, x: nnx.merge(graph, state)(x), state),
    }
    matmul = 2 * 2 * 4 * 4
    for name, (f, params) in losses.items():
        gradient = jax.grad(lambda params, x, f=f: jnp.square(f(params, x)).sum(), (0, 1))
        assert jremat.flops(gradient, params, x).recompute == matmul, name
