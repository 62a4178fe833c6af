"""The layer-stack executor: the same values and gradients as a scan, and just the residuals and matmuls of its plan."""

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jremat
import policies
from jremat.policy import FULL, NONE, LayerPlan, Policy, Segment, tag
from jremat.transform.chain import stack
from jremat.transform.groups import best_group, group_peaks, group_sizes
from jremat.transform.revolve import binomial, binomial_steps
from jremat.transform.scan import scan_stack
from jremat.transform.schedule import tables

L, B, H, F = 7, 4, 8, 32  # layers, batch, hidden, MLP
STATE, UP = B * H * 4, B * F * 4  # bytes of a carry and of an MLP's inside
DOTS = "dots_with_no_batch_dims_saveable"
PLANS = (
    "none",
    "full",
    "save:up",
    DOTS,
    "every_k:3",
    "every_k:3,full",
    "every_k:7",
    "alternate:2",
    "block:2",
    "torchtitan:3",
    "revolve:1",
    "revolve:2",
    "revolve:7",
    "mix:3*full,2*every_k:2,2*save:up",
)


def block(p: Any, x: jax.Array, scale: jax.Array) -> jax.Array:
    """A residual MLP with dropout. x: [b, h]."""
    y = jnp.tanh(tag(x @ p["in"], "up")) * scale
    dropped = jnp.where(jax.random.bernoulli(p["key"], 0.8, y.shape), y / 0.8, 0.0)
    return x + dropped @ p["out"]


def weights(num_layers: int = L) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "in": jax.random.normal(keys[0], (num_layers, H, F)) * H**-0.5,
        "out": jax.random.normal(keys[1], (num_layers, F, H)) * F**-0.5,
        "key": jax.random.split(keys[2], num_layers),
    }


X, SCALE = jax.random.normal(jax.random.key(4), (B, H)), jnp.linspace(0.5, 1.5, F)


def plain(p: Any, x: jax.Array, scale: jax.Array) -> jax.Array:
    return lax.scan(lambda x, p: (block(p, x, scale), None), x, p)[0]


def loss(run: Any, key: Any) -> Any:
    return lambda real, x, scale: (run(real | {"key": key}, x, scale) ** 2).sum()


def value_and_gradients(run: Any, num_layers: int = L) -> Any:
    p = weights(num_layers)
    real = {n: p[n] for n in ("in", "out")}
    return jax.jit(jax.value_and_grad(loss(run, p["key"]), argnums=(0, 1, 2)))(real, X, SCALE)


def largest_error(found: Any, expected: Any) -> float:
    """Relative to each array's largest entry."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


@pytest.fixture(scope="module")
def expected():
    return value_and_gradients(plain)


class TestSameNumbers:
    @pytest.mark.parametrize("spec", PLANS)
    def test_as_a_scan_dropout_on(self, spec, expected):
        """Parameters, carry and what the layers share: all three have gradients."""
        found = value_and_gradients(stack(block, policies.get(spec), num_layers=L))
        assert largest_error(found, expected) <= 1e-6

    @pytest.mark.parametrize("spec", ["full", "save:up", "every_k:3", "alternate:2", "mix:3*full,2*every_k:2,2*none"])
    def test_scan_stack_too(self, spec, expected):
        found = value_and_gradients(scan_stack(block, policies.get(spec), num_layers=L))
        assert largest_error(found, expected) <= 1e-6

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
        assert largest_error(found, expected) <= 1e-6

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
            assert largest_error((value, gradients), (expected[0][0], expected[1])) <= 1e-6

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
        assert largest_error(found, expected) <= 1e-6

    @pytest.mark.parametrize("spec", ["full", "every_k:3"])
    def test_under_jit_inside_vmap_and_remat(self, spec):
        p, run = weights(), stack(block, policies.get(spec), num_layers=L)
        f = lambda run: lambda x: (run(p, x, SCALE) ** 2).sum()
        expected = jax.jit(jax.grad(f(plain)))(X)
        assert largest_error(jax.grad(jax.jit(f(run)))(X), expected) <= 1e-6
        assert largest_error(jax.jit(jax.grad(jax.checkpoint(f(run))))(X), expected) <= 1e-6
        pair, both = jnp.stack([X, 2 * X]), lambda run: jax.jit(jax.vmap(jax.grad(f(run))))
        assert largest_error(both(run)(pair), both(plain)(pair)) <= 1e-6

    def test_grad_of_grad(self):
        """Differentiating the loops themselves: right numbers; the plan holds for the first derivative alone."""
        p = weights()

        def twice(run):
            slope = jax.grad(lambda x: (run(p, x, SCALE) ** 2).sum())
            return jax.jit(jax.grad(lambda x: (slope(x) ** 2).sum()))(X)

        expected = twice(plain)
        for spec in ("full", "every_k:3"):
            assert largest_error(twice(stack(block, policies.get(spec), num_layers=L)), expected) <= 3e-6

    def test_forward_mode_is_the_scan_stacks(self):
        p = weights()
        chained, scanned = (make(block, FULL, num_layers=L) for make in (stack, scan_stack))
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(lambda x: chained(p, x, SCALE), (X,), (X,))
        _, expected = jax.jvp(lambda x: plain(p, x, SCALE), (X,), (X,))
        _, found = jax.jvp(lambda x: scanned(p, x, SCALE), (X,), (X,))
        assert largest_error(found, expected) <= 1e-6

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
        assert largest_error(found, expected) <= 1e-6

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
            largest_error(step(stack(simple, policies.get("mix:3*full,4*every_k:2"), num_layers=L)), expected) <= 1e-6
        )


def kept_bytes(spec: str, num_layers: int = L) -> int:
    run = stack(block, policies.get(spec), num_layers=num_layers)
    return jremat.residuals(lambda p, x: run(p, x, SCALE), weights(num_layers), X).total_bytes


def reruns(run: Any, num_layers: int = L) -> int:
    """Matmuls run again."""
    step = jax.value_and_grad(lambda p, x: (run(p | {"key": weights(num_layers)["key"]}, x, SCALE) ** 2).sum(), (0, 1))
    p = weights(num_layers)
    return jremat.flops(step, {n: p[n] for n in ("in", "out")}, X).count.recompute


class TestWhatItKeeps:
    @pytest.mark.parametrize("n", [1, 6, 7])
    def test_bytes_by_hand(self, n):
        assert kept_bytes("full", n) == n * STATE
        assert kept_bytes("save:up", n) == n * (STATE + UP)
        for k in (2, 3):
            assert kept_bytes(f"every_k:{k}", n) == kept_bytes(f"every_k:{k},full", n) == math.ceil(n / k) * STATE
        for slots in (1, 2, 3, 8):
            states = min(slots + 1, n)  # the schedule's, and the last layer's input
            assert kept_bytes(f"revolve:{slots}", n) == states * STATE

    def test_a_mix_is_the_sum_of_its_parts(self):
        whole = kept_bytes("mix:3*full,2*every_k:2,2*save:up")
        assert whole == 3 * STATE + STATE + 2 * (STATE + UP)

    @pytest.mark.parametrize("spec", ["none", DOTS, "save:up", "alternate:2"])
    def test_no_more_than_a_scan(self, spec):
        """What is kept of a parameter is a copy in a scan; everything else is the same."""
        run = scan_stack(block, policies.get(spec), num_layers=L)
        scanned = jremat.residuals(lambda p, x: run(p, x, SCALE), weights(), X).total_bytes
        assert kept_bytes(spec) <= scanned

    @pytest.mark.parametrize("jitted", [False, True])
    def test_casts_of_parameters_are_made_again(self, jitted):
        def cast(p, x):
            w = {n: p[n].astype(jnp.bfloat16) for n in ("in", "out")}
            inner = lambda x, w: jnp.tanh(x @ w["in"]) @ w["out"]
            return x + (jax.jit(inner) if jitted else inner)(x, w)

        x, p = X.astype(jnp.bfloat16), weights()
        kept = jremat.residuals(lambda p, x: stack(cast, NONE, num_layers=L)(p, x), p, x).kept
        assert kept and all(row.shape[-2:] not in ((H, F), (F, H)) for row in kept)
        scanned = jremat.residuals(lambda p, x: scan_stack(cast, NONE, num_layers=L)(p, x), p, x).total_bytes
        copies = L * 2 * H * F * 2  # bytes of the bfloat16 weights
        assert scanned - sum(row.bytes for row in kept) == copies

    def test_a_dropout_mask_is_kept_as_its_policy_says(self):
        """Made from a key, not from a parameter: ``none`` reruns no random bits."""
        rows = jremat.residuals(lambda p, x: stack(block, NONE, num_layers=L)(p, x, SCALE), weights(), X)
        assert L * B * F in [row.bytes for row in rows.kept if row.dtype == "bool"]

    @pytest.mark.parametrize("spec", ["none", "full", "every_k:3", "revolve:2"])
    def test_what_the_carry_hands_on_unchanged_is_kept_once(self, spec):
        """As a step's positions and keys: no copy a layer, and their gradients are right."""

        def handing_on(p, carry):
            x, scale, count = carry
            return block(p, x, scale), scale, count

        run = stack(handing_on, policies.get(spec), num_layers=L)
        p, count = weights(), jnp.arange(3)
        found = jremat.residuals(lambda p, x, s: run(p, (x, s, count))[0], p, X, SCALE)
        shared = stack(block, policies.get(spec), num_layers=L)
        assert found.total_bytes == jremat.residuals(shared, p, X, SCALE).total_bytes
        gradient = jax.jit(jax.grad(lambda s: (lambda y, s, _: y.sum() + s.sum())(*run(p, (X, s, count)))))(SCALE)
        expected = jax.jit(jax.grad(lambda s: plain(p, X, s).sum() + s.sum()))(SCALE)
        assert largest_error(gradient, expected) <= 1e-6

    def test_frozen_parameters_have_no_gradient_buffer(self):
        p, run = weights(), stack(block, FULL, num_layers=L)

        def step(frozen):
            return lambda w, x: run(p | {frozen: w}, x, SCALE).sum()

        for chosen, other in (("in", "out"), ("out", "in")):
            text = str(jax.make_jaxpr(jax.grad(step(chosen)))(p[chosen], X))
            buffers = [f"f32[{','.join(map(str, p[n].shape))}] = broadcast_in_dim" for n in (chosen, other)]
            assert [text.count(b) for b in buffers] == [1, 0]


class TestWhatItRuns:
    @pytest.mark.parametrize("spec", ["none", "full", "save:up", DOTS, "alternate:2"])
    def test_as_many_matmuls_again_as_a_scan(self, spec):
        again = [reruns(make(block, policies.get(spec), num_layers=L)) for make in (stack, scan_stack)]
        assert again[0] == again[1]

    def test_matmuls_by_hand(self):
        """A block has two; the second is not rerun by its own remat, and a replay runs both."""
        count = {spec: reruns(stack(block, policies.get(spec), num_layers=L)) for spec in PLANS}
        assert count["none"] == 0
        assert count["full"] == L
        assert count["alternate:2"] == math.ceil(L / 2)
        assert count["block:2"] == 2
        assert count["torchtitan:3"] == 2
        assert count["save:up"] == 0

    @pytest.mark.parametrize("k", [2, 3, 7])
    def test_a_group_costs_one_forward_or_two(self, k):
        forward = 2 * L
        last = 2 * math.ceil(L / k) - math.ceil(L / k)  # a group's last layer: its output is not needed
        once = reruns(stack(block, policies.get(f"every_k:{k}"), num_layers=L))
        assert forward - last <= once <= forward
        assert reruns(stack(block, policies.get(f"every_k:{k},full"), num_layers=L)) <= 2 * forward

    @pytest.mark.parametrize("slots", [1, 2, 7])
    def test_a_schedule_runs_as_many_layers_as_it_says(self, slots):
        """Counted as it runs, by a callback in every forward."""
        ran = []

        def seen(p, x):
            jax.debug.callback(lambda: ran.append(1))
            return jnp.tanh(x * p)

        run = stack(seen, policies.get(f"revolve:{slots}"), num_layers=L)
        jax.block_until_ready(jax.jit(jax.grad(lambda p: run(p, jnp.float32(0.3))))(jnp.linspace(0.5, 1, L)))
        jax.effects_barrier()
        # The sweep and its last layer, the replay, and each layer's own rerun (twice: before and inside its pullback).
        advanced = binomial_steps(L, slots) + 1
        assert len(ran) - advanced in (L, 2 * L)
        assert len(tables(binomial(L, slots)).replay) == binomial_steps(L, slots) - (L - 1)

    @pytest.mark.parametrize("spec", ["full", "every_k:4", "every_k:4,full", "revolve:3", "mix:4*full,rest*none"])
    def test_the_program_does_not_grow_with_depth(self, spec):
        def equations(num_layers):
            p = weights(num_layers)
            run = stack(block, policies.get(spec), num_layers=num_layers)
            step = jax.grad(lambda w, x: run(p | {"in": w}, x, SCALE).sum())
            return str(jax.make_jaxpr(step)(p["in"], X)).count(" = ")

        assert equations(12) == equations(96)


@st.composite
def plans(draw: Any) -> tuple[int, LayerPlan]:
    """Any plan over a few layers."""
    segments = []
    for _ in range(draw(st.integers(1, 3))):
        pattern = tuple(draw(st.lists(st.sampled_from([FULL, NONE, Policy.save("up")]), min_size=1, max_size=2)))
        kind = draw(st.sampled_from(["plain", "group", "slots"]))
        group = draw(st.integers(2, 3)) * len(pattern) if kind == "group" else 1
        slots = draw(st.integers(1, 3)) if kind == "slots" else None
        pattern = pattern[:1] if kind == "slots" else pattern
        segments.append(Segment(pattern, draw(st.integers(1, 3)), group, slots))
    return sum(len(s.pattern) * s.repeats for s in segments), LayerPlan(tuple(segments), label="drawn")


class TestAnyPlan:
    @settings(max_examples=8, deadline=None)
    @given(plans())
    def test_same_gradients_and_the_bytes_of_its_parts(self, drawn):
        n, plan = drawn
        run = stack(block, plan, num_layers=n)
        assert largest_error(value_and_gradients(run, n), value_and_gradients(plain, n)) <= 1e-6
        found = jremat.residuals(lambda p, x: run(p, x, SCALE), weights(n), X).total_bytes
        alone = {p: kept_bytes(p.spec, 1) for p in {p for s in plan.segments for p in s.pattern}}
        total = 0
        for segment in plan.segments:
            length = len(segment.pattern) * segment.repeats
            if segment.slots is not None:
                total += min(segment.slots + 1, length) * STATE
            elif segment.group > 1:
                total += math.ceil(length / segment.group) * STATE
            else:
                total += segment.repeats * sum(alone[p] for p in segment.pattern)
        assert found == total


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
            stack(lambda p, x: (x, None), FULL, num_layers=L)(p, X)
        with pytest.raises(ValueError, match="names 9 layers, the stack has 7"):
            stack(block, policies.get("mix:9*full"), num_layers=L)
        with pytest.raises(ValueError, match="plan: expected a LayerPlan or a Policy"):
            stack(block, "full", num_layers=L)
        with pytest.raises(ValueError, match="which no value bears"):
            jax.grad(lambda x: stack(block, policies.get("save:upp"), num_layers=L)(p, x, SCALE).sum())(X)
        with pytest.raises(ValueError, match="a group must hold whole patterns, got groups of 3 and 2 policies"):
            plan = LayerPlan((Segment((FULL, NONE), 3, group=3),), label="odd")
            jax.grad(lambda x: stack(block, plan, num_layers=6)(weights(6), x, SCALE).sum())(X)

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
        assert largest_error(found, value_and_gradients(plain)) <= 1e-6


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
