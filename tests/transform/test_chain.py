"""The layer-stack executor gives the values and gradients of a scan, and names mistakes."""

import math
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax import lax

import jremat
import policies
from jremat.policy import FULL, NONE, LayerPlan, Policy, Segment, tag
from jremat.transform.chain import stack
from jremat.transform.groups import best_group, group_peaks, group_sizes
from jremat.transform.scan import scan_stack
from tests.transform.chain_case import (
    PLANS,
    ROUNDING,
    SCALE,
    F,
    H,
    L,
    X,
    block,
    largest_error,
    plain,
    reruns,
    value_and_gradients,
    weights,
)


@pytest.fixture(scope="module")
def expected():
    return value_and_gradients(plain)


class TestSameNumbers:
    @pytest.mark.parametrize("spec", PLANS)
    def test_as_a_scan_dropout_on(self, spec, expected):
        """Parameters, carry and what the layers share: all three have gradients."""
        found = value_and_gradients(stack(block, policies.get(spec), num_layers=L))
        assert largest_error(found, expected) <= ROUNDING

    @pytest.mark.parametrize("spec", ["full", "save:up", "every_k:3", "alternate:2", "mix:3*full,2*every_k:2,2*none"])
    def test_scan_stack_too(self, spec, expected):
        found = value_and_gradients(scan_stack(block, policies.get(spec), num_layers=L))
        assert largest_error(found, expected) <= ROUNDING

    @pytest.mark.parametrize("spec", ["full", "every_k:2,full", "revolve:2"])
    def test_as_flax_scan_dropout_on(self, spec):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, key):
                y = nn.gelu(nn.Dense(F)(nn.LayerNorm()(x)))
                y = nn.Dropout(0.2)(y, deterministic=False, rng=key)
                return x + nn.Dense(H)(y), None

        scanned = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=L)()
        keys = jax.random.split(jax.random.key(1), L)
        params = scanned.init(jax.random.key(0), X, keys)

        def layer(p, x):
            return Layer().apply(p["params"], x, p["key"])[0]

        def reference(params, x):
            return (scanned.apply(params, x, keys)[0] ** 2).sum()

        def chained(params, x):
            return (stack(layer, policies.get(spec), num_layers=L)({"params": params, "key": keys}, x) ** 2).sum()

        expected = jax.jit(jax.value_and_grad(reference, (0, 1)))(params, X)
        found = jax.jit(jax.value_and_grad(chained, (0, 1)))(params, X)
        assert largest_error(found, expected) <= ROUNDING

    def test_a_carry_of_several_leaves_integers_among_them(self):
        """The auxiliary sum starts undifferentiated and is differentiated from the first layer on."""

        def counting(p, carry):
            x, (aux, count) = carry
            x = jnp.tanh(x @ p["w"]) * (1.0 + 0.01 * count)
            return x, (aux + (x**2).mean(), count + p["step"])

        p = {"w": weights()["in"][:, :, :H], "step": jnp.arange(L)}

        def total(run):
            def f(w, x):
                x, (aux, count) = run({"w": w, "step": p["step"]}, (x, (jnp.float32(0), jnp.int32(0))))
                return x.sum() + aux, count

            return jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(p["w"], X)

        expected = total(lambda p, c: lax.scan(lambda c, p: (counting(p, c), None), c, p)[0])
        for spec in ("full", "every_k:3", "revolve:2", "none"):
            (value, count), gradients = total(stack(counting, policies.get(spec), num_layers=L))
            assert count == expected[0][1] == L * (L - 1) // 2
            assert largest_error((value, gradients), (expected[0][0], expected[1])) <= ROUNDING

    def test_integers_and_keys_have_no_gradient(self):
        run = stack(block, FULL, num_layers=L)
        _, pull = jax.vjp(lambda p: run(p, X, SCALE), weights())
        (gradient,) = pull(X)
        assert gradient["key"].dtype == jax.dtypes.float0
        assert jnp.abs(gradient["in"]).max() > 0

    @pytest.mark.parametrize("spec", ["full", "every_k:3", "revolve:2"])
    def test_what_the_block_closes_over_is_differentiated(self, spec):
        p = weights()

        def total(make):
            return jax.jit(jax.grad(lambda scale: make(lambda p, x: block(p, x, scale))(p, X).sum()))(SCALE)

        expected = total(lambda f: lambda p, x: lax.scan(lambda x, p: (f(p, x), None), x, p)[0])
        found = total(lambda f: stack(f, policies.get(spec), num_layers=L))
        assert largest_error(found, expected) <= ROUNDING

    @pytest.mark.parametrize("spec", ["full", "every_k:3"])
    def test_under_jit_inside_vmap_and_remat(self, spec):
        p, run = weights(), stack(block, policies.get(spec), num_layers=L)
        f = lambda run: lambda x: (run(p, x, SCALE) ** 2).sum()
        expected = jax.jit(jax.grad(f(plain)))(X)
        assert largest_error(jax.grad(jax.jit(f(run)))(X), expected) <= ROUNDING
        assert largest_error(jax.jit(jax.grad(jax.checkpoint(f(run))))(X), expected) <= ROUNDING
        pair, both = jnp.stack([X, 2 * X]), lambda run: jax.jit(jax.vmap(jax.grad(f(run))))
        assert largest_error(both(run)(pair), both(plain)(pair)) <= ROUNDING

    @pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
    def test_cut_over_eight_devices(self, kind):
        """Parameters cut along the MLP; where axes are explicit, a value's sharding is part of its type."""
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        spec = jax.sharding.PartitionSpec
        cut = {"in": spec(None, None, "data"), "out": spec(None, "data")}
        p = {n: weights()[n] for n in cut}

        def simple(p, x):
            y = jnp.tanh(x @ p["in"])
            return x + jnp.matmul(
                y, p["out"], **({} if kind == jax.sharding.AxisType.Auto else {"out_sharding": spec()})
            )

        def step(run):
            return jax.jit(jax.value_and_grad(lambda p, x: (run(p, x) ** 2).sum(), (0, 1)))

        with jax.set_mesh(mesh):
            cut_up = {n: jax.device_put(p[n], jax.sharding.NamedSharding(mesh, cut[n])) for n in cut}
            found = step(stack(simple, policies.get("mix:3*full,4*every_k:2"), num_layers=L))(cut_up, X)
            expected = step(lambda p, x: lax.scan(lambda x, p: (simple(p, x), None), x, p)[0])(cut_up, X)
        assert found[1][0]["in"].sharding.spec == cut["in"]
        assert largest_error(found, expected) <= ROUNDING

    def test_inside_shard_map(self):
        """Each device holds its own rows of the batch; the parameters' gradients are summed over devices."""
        mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec
        p = {n: weights()[n] for n in ("in", "out")}

        def simple(p, x):
            return x + jnp.tanh(x @ p["in"]) @ p["out"]

        def step(run):
            shares = lambda p, x: jax.lax.psum((run(p, x) ** 2).sum(), "data")
            mapped = jax.shard_map(shares, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec())
            return jax.jit(jax.value_and_grad(mapped, (0, 1)))(p, X)

        expected = step(lambda p, x: lax.scan(lambda x, p: (simple(p, x), None), x, p)[0])
        assert (
            largest_error(step(stack(simple, policies.get("mix:3*full,4*every_k:2"), num_layers=L)), expected)
            <= ROUNDING
        )


TYPO = Policy.save("upp")
MISTYPED = (
    *map(policies.get, ("save:upp", "offload:upp", "but:upp", "every_k:3,save:upp", "every_k:3,offload:upp")),
    *map(policies.get, ("block:2,save:upp", "mix:2*full,rest*save:upp", "mix:2*save:upp,rest*none")),
    LayerPlan((Segment((FULL, TYPO)),), label="every second layer"),
    LayerPlan((Segment((TYPO,), 3), Segment((FULL, TYPO), 2, group=2)), label="groups of two"),
    LayerPlan((Segment((TYPO,), slots=2),), label="a schedule of two slots"),
)


class TestMistakes:
    def test_each_is_named(self):
        p, run = weights(), stack(block, FULL, num_layers=L)
        short = p | {"out": p["out"][:-1]}
        with pytest.raises(
            ValueError, match=r"parameters\['out'\]: expected \[7, ...\], one entry per layer, got \[6,"
        ):
            run(short, X, SCALE)
        with pytest.raises(ValueError, match=r"block: expected .* float32\[4, 8\] at carry, got bfloat16\[4, 8\]"):
            stack(lambda p, x: x.astype(jnp.bfloat16), FULL, num_layers=L)(p, X)
        with pytest.raises(ValueError, match="block: expected it to return a carry like its own"):
            stack(lambda p, x: (x, x, x), FULL, num_layers=L)(p, X)
        with pytest.raises(ValueError, match="names 9 layers, the stack has 7"):
            stack(block, policies.get("mix:9*full"), num_layers=L)
        with pytest.raises(ValueError, match="plan: expected a LayerPlan or a Policy"):
            stack(block, "full", num_layers=L)
        for make in (stack, scan_stack):
            with pytest.raises(
                ValueError, match=r"'sqrt' needs shapes .*get\('sqrt'\)\.resolve\(block, \*args, num_layers=7"
            ):
                make(block, policies.get("sqrt"), num_layers=L)
        for make in (stack, scan_stack):
            with pytest.raises(ValueError, match="a group must hold whole patterns, got groups of 3 and 2 policies"):
                make(block, LayerPlan((Segment((FULL, NONE), 3, group=3),), label="odd"), num_layers=6)
            with pytest.raises(ValueError, match="a schedule takes one policy for its layers, got full, none"):
                make(block, LayerPlan((Segment((FULL, NONE), 3, slots=2),), label="odd"), num_layers=6)

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("plan", MISTYPED, ids=str)
    def test_a_name_that_no_value_bears_is_named_at_the_first_call(self, plan):
        """Nothing need be differentiated, nor run."""
        writing = lambda p, x, scale: (block(p, x, scale), x.mean())
        for make in (
            stack(block, plan, num_layers=L),
            scan_stack(block, plan, num_layers=L),
            stack(writing, plan, num_layers=L),
        ):
            with pytest.raises(ValueError, match=r"names 'upp' \(did you mean 'up'\?\), which no value bears"):
                jax.eval_shape(make, weights(), X, SCALE)

    @pytest.mark.parametrize("spec", ["save:up", "mix:2*full,rest*save:up"])
    def test_that_costs_no_trace_of_its_own(self, spec):
        traced = []

        def counted(*args):
            traced.append(1)
            return block(*args)

        jax.eval_shape(stack(counted, policies.get(spec), num_layers=L), weights(), X, SCALE)
        assert len(traced) == 1

    def test_an_offload_that_moves_nothing_warns(self):
        named = lambda p, x: block(p, tag(x, "block_in"), SCALE)
        for spec in ("offload_inputs", "every_k:3,offload_inputs"):
            with pytest.warns(UserWarning, match="offloads to pinned_host, which the cpu backend ignores"):
                stack(named, policies.get(spec), num_layers=L)(weights(), X)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            stack(block, FULL, num_layers=L)(weights(), X, SCALE)

    def test_a_scan_says_that_it_follows_no_schedule(self):
        with pytest.warns(
            UserWarning, match="a scan can't follow a schedule of 2 slots; its layers run in groups of 4"
        ):
            found = value_and_gradients(scan_stack(block, policies.get("revolve:2"), num_layers=L))
        assert largest_error(found, value_and_gradients(plain)) <= ROUNDING


class TestGroups:
    def test_sizes_are_the_least_for_their_number_of_groups(self):
        for n in range(1, 40):
            sizes = group_sizes(n)
            assert {math.ceil(n / k) for k in sizes} == {math.ceil(n / k) for k in range(1, n + 1)}
            assert len(sizes) <= 2 * math.sqrt(n) + 1

    def test_the_least_peak_wins_not_the_formula(self):
        p = jax.tree.map(lambda leaf: leaf[0], weights())
        asked = []

        def peak(step, *args):
            asked.append(jremat.flops(step, *args).recompute)
            return abs(len(asked) - 3)  # the third is least

        assert best_group(block, 16, p, X, SCALE, peak=peak) == group_sizes(16)[2] == 3
        assert asked[0] < asked[1]  # real steps were given: one layer's own remat reruns less than a group

    def test_each_size_is_asked_about_its_own_step(self):
        """``peak`` may be any measure: here the matmuls that a stack of 8 in such groups reruns."""
        p = jax.tree.map(lambda leaf: leaf[0], weights())
        rerun = lambda step, *args: jremat.flops(step, *args).count.recompute
        found = group_peaks(block, 8, p, X, SCALE, peak=rerun, policy=FULL, sizes=(1, 2, 8))
        by_hand = [reruns(stack(block, policies.get(spec), num_layers=8), 8) for spec in ("full", "every_k:2,full")]
        assert [(f.group, f.peak_bytes) for f in found[:2]] == [(1, by_hand[0]), (2, by_hand[1])]
        assert found[2].peak_bytes > by_hand[0]
