"""How a stack may be called: eagerly, in debug modes, on meshes, without parameters; each as lax.scan may."""

import gc
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jremat
import policies
from jremat.policy import Policy, plan_file, tag
from jremat.transform.scan import scan_stack

SPECS = ("full", "every_k:2", "revolve:2", "mix:1*none,rest*full", "offload:up")
L = 3
W, X = jnp.ones((L, 8, 8)) / 8, jnp.ones((4, 8))

pytestmark = pytest.mark.filterwarnings("ignore:stack", "ignore:policy", "ignore:plan")


def layer(w, c):
    return c + jnp.tanh(tag(c @ w, "up"))


def anew(block):
    return lambda *args: block(*args)


def gradient(run):
    return jax.grad(lambda w, x: run(w, x).sum(), (0, 1))


def scanned(block):
    return lambda w, x: lax.scan(lambda c, w: (jax.checkpoint(block)(w, c), None), x, w)[0]


@pytest.fixture
def compiles():
    """Counts compilations from the call of it on."""
    found: list[str] = []
    listener = lambda event, *_, **__: found.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listener)

    def count(call):
        call()
        before = len(found)
        call()
        return len(found) - before

    return count


class TestEagerCalls:
    @pytest.mark.parametrize("spec", SPECS)
    @pytest.mark.parametrize("make", [jremat.stack, scan_stack])
    def test_nothing_is_compiled_twice(self, compiles, make, spec):
        run = lambda w, x: make(layer, policies.get(spec), num_layers=L)(w, x)
        assert compiles(lambda: run(W, X)) == 0
        assert compiles(lambda: gradient(run)(W, X)) == 0
        assert compiles(lambda: jax.jvp(run, (W, X), (W, X))) == 0
        assert compiles(lambda: jax.vmap(gradient(run), (None, 0))(W, X[None])) == 0

    @pytest.mark.parametrize("spec", ["full", "save:up", "but:up"])
    def test_nor_by_checkpoint_of_a_loop(self, compiles, spec):
        loop = lambda w, c: lax.scan(lambda c, _: (layer(w, c), None), c, None, length=2)[0]
        run = lambda w, x: jremat.checkpoint(anew_once, policies.get(spec))(w, x)
        anew_once = anew(loop)
        assert compiles(lambda: run(W[0], X)) == 0
        assert compiles(lambda: gradient(run)(W[0], X)) == 0

    def test_what_a_block_closes_over_is_read_at_each_call(self):
        def scaled(by):
            factor = jnp.float32(by)
            return jremat.stack(lambda w, c: c * factor, policies.get("full"), num_layers=L)(W, X)[0, 0]

        assert [float(scaled(by)) for by in (2, 3, 2)] == [8.0, 27.0, 8.0]

    def test_blocks_are_let_go(self):
        def used():
            block = anew(layer)
            run = jremat.stack(block, policies.get("full"), num_layers=L)
            gradient(run)(W, X)
            jremat.checkpoint(block, policies.get("save:up"))(W[0], X)
            return weakref.ref(block)

        held = [used() for _ in range(3)]
        gc.collect()
        assert [ref() for ref in held] == [None] * 3


class TestDebugModes:
    @pytest.mark.parametrize("spec", SPECS[:4])
    def test_the_tracer_leak_checker_finds_none(self, spec):
        run = jremat.stack(anew(layer), policies.get(spec), num_layers=L)
        with jax.check_tracer_leaks():
            jax.jit(gradient(run))(W, X)

    @pytest.mark.parametrize("spec", SPECS)
    def test_the_key_reuse_checker_passes_a_replay_and_finds_a_reuse(self, spec):
        noisy = lambda p, c: c + jax.random.normal(p["key"], c.shape) * tag(c @ p["w"], "up")
        with jax.debug_key_reuse(True):
            keys = jax.random.split(jax.random.key(0), L)
            run = jremat.stack(noisy, policies.get(spec), num_layers=L)
            gradient(lambda w, x: run({"w": w, "key": keys}, x))(W, X)
            with pytest.raises(jax.errors.KeyReuseError):
                jax.random.normal(keys[0])  # the stack consumed them, as lax.scan does
            twice = lambda p, c: noisy(p, c) + jax.random.uniform(p["key"], c.shape)
            again = jax.random.split(jax.random.key(1), L)
            with pytest.raises(jax.errors.KeyReuseError):
                jremat.stack(twice, policies.get(spec), num_layers=L)({"w": W, "key": again}, X)

    @pytest.mark.parametrize("spec", SPECS)
    def test_checkify_finds_what_a_block_checks(self, spec):
        def checked(w, c):
            checkify.check(jnp.all(c < 1e9), "too large")
            return layer(w, c)

        run = jremat.stack(checked, policies.get(spec), num_layers=L)
        step = checkify.checkify(gradient(run))
        step(W, X)[0].throw()
        with pytest.raises(checkify.JaxRuntimeError, match="too large"):
            step(W, 1e10 * X)[0].throw()
        nans = checkify.checkify(gradient(jremat.stack(rooted, policies.get(spec), num_layers=L)), checkify.nan_checks)
        with pytest.raises(checkify.JaxRuntimeError, match="nan generated"):
            nans(W, -X)[0].throw()

    @pytest.mark.parametrize("spec", SPECS)
    def test_other_modes(self, spec):
        run = jremat.stack(anew(layer), policies.get(spec), num_layers=L)
        expected = gradient(scanned(layer))(W, X)
        for mode in (
            jax.disable_jit(),
            jax.numpy_rank_promotion("raise"),
            jax.numpy_dtype_promotion("strict"),
            jax.debug_nans(True),
            jax.debug_infs(True),
            jax.default_matmul_precision("float32"),
            jax.enable_checks(True),
        ):
            with mode:
                found = gradient(run)(W, X)
            assert all(jnp.allclose(a, b, atol=1e-5) for a, b in zip(found, expected))
        with jax.debug_nans(True), pytest.raises(FloatingPointError):
            gradient(jremat.stack(rooted, policies.get(spec), num_layers=L))(W, -X)

    @pytest.mark.parametrize("spec", SPECS)
    def test_nothing_is_moved_to_the_device(self, spec):
        step = jax.jit(gradient(jremat.stack(anew(layer), policies.get(spec), num_layers=L)))
        with jax.transfer_guard("disallow"):
            step(W, X)


def rooted(w, c):
    return jnp.sqrt(tag(c @ w, "up"))


@pytest.mark.parametrize("spec", [*SPECS[:4], "mix:1*none,rest*revolve:1", "every_k:2,full"])
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_buffers_have_the_type_of_what_they_hold(spec, kind):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        out = {"out_sharding": P("data", None)} if kind is AxisType.Explicit else {}
        block = lambda w, c: jnp.tanh(jnp.einsum("ab,bc->ac", c, w, **out))
        x = jax.device_put(X, jax.NamedSharding(mesh, P("data", None)))
        run = jremat.stack(block, policies.get(spec), num_layers=L)
        loss = lambda w: run(w, x).sum()
        plain = lambda w: scanned(block)(w, x).sum()
        again = lambda f: lambda w: jax.jvp(jax.grad(f), (w,), (w,))[1]
        for ours, theirs in ((jax.grad(loss), jax.grad(plain)), (again(loss), again(plain))):
            assert jnp.allclose(jax.jit(ours)(W), jax.jit(theirs)(W), atol=1e-5)


@pytest.mark.parametrize("spec", ["full", "every_k:2", "revolve:2", "mix:1*none,rest*full"])
class TestBlocks:
    @pytest.mark.parametrize("parameters", [(), None, {}])
    def test_without_parameters(self, spec, parameters):
        run = jremat.stack(lambda p, x: jnp.sin(x) + 1, policies.get(spec), num_layers=4)
        plain = lambda x: jnp.sin(jnp.sin(jnp.sin(jnp.sin(x) + 1) + 1) + 1) + 1
        x, ours = jnp.arange(3.0), lambda x: run(parameters, x)
        for of in (
            lambda f: f,
            lambda f: jax.grad(lambda x: f(x).sum()),
            lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
            lambda f: jax.hessian(lambda x: f(x).sum()),
            lambda f: lambda x: jax.vmap(jax.grad(f))(x),
        ):
            assert jnp.allclose(of(ours)(x), of(plain)(x), atol=1e-6)

    def test_a_carry_of_many_kinds(self, spec):
        def block(p, carry):
            x, count, key = carry["x"], carry["count"], carry["key"]
            key, own = jax.random.split(key)
            noise = jax.random.normal(own, x.shape)
            return {"x": x * p["w"].astype(x.dtype) + noise, "count": count + 1, "key": key}

        parameters = {"w": jnp.array([1, 2, 3, 1], jnp.int4), "none": None}
        carry = {"x": jnp.ones(3), "count": jnp.int32(0), "key": jax.random.key(0)}
        run = jremat.stack(block, policies.get(spec), num_layers=4)
        of = lambda f: jax.value_and_grad(lambda x: f(carry | {"x": x})["x"].sum())(carry["x"])
        plain = lambda carry: lax.scan(lambda c, p: (block(p, c), None), carry, parameters)[0]
        found, expected = of(lambda carry: run(parameters, carry)), of(plain)
        assert jnp.allclose(found[0], expected[0]) and jnp.allclose(found[1], expected[1])
        assert int(run(parameters, carry)["count"]) == 4

    def test_one_layer(self, spec):
        if spec.startswith("mix"):
            spec = "mix:rest*none"
        run = jremat.stack(layer, policies.get(spec), num_layers=1)
        assert all(map(jnp.allclose, gradient(run)(W[:1], X), gradient(scanned(layer))(W[:1], X)))


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x)))


def test_the_peak_of_blocks_that_write_beside_the_carry():
    own = Normed().init(jax.random.key(0), X)
    stacked = jax.tree.map(lambda a: jnp.stack([a] * 4), own)
    apply = lambda own, x: Normed().apply(own, x, mutable=["batch_stats"])
    peaks = {}
    for spec in ("none", "block:2", "full"):
        run = jremat.stack(apply, policies.get(spec), num_layers=4)
        loss = lambda s, x, run=run: sum(leaf.mean() for leaf in jax.tree.leaves(run(s, x)))
        peaks[spec] = jremat.predicted_memory(jax.value_and_grad(loss), stacked, jnp.ones((4096, 8))).peak_bytes
    assert peaks["full"] < peaks["block:2"] < peaks["none"]


class Drops(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = jnp.tanh(tag(nn.Dense(32)(x), "up"))
        h = nn.Dropout(0.5, deterministic=False)(nn.BatchNorm(use_running_average=False)(h))
        self.sow("intermediates", "h", h)
        return x + nn.Dense(8)(h)


class TestOnePlanForABlock:
    """A planned policy runs however its block is called, and keeps the same bytes."""

    key = jax.random.key(1)

    @pytest.fixture(scope="class")
    def variables(self):
        own = Drops().init({"params": jax.random.key(0), "dropout": self.key}, X)
        return {name: own[name] for name in ("params", "batch_stats")}

    @staticmethod
    def function(own, x, key):
        return Drops().apply(own, x, rngs={"dropout": key}, mutable=["batch_stats", "intermediates"])

    @pytest.fixture(scope="class")
    def policy(self, variables, tmp_path_factory):
        path = tmp_path_factory.mktemp("plan") / "plan.json"
        graph = jremat.trace(self.function, variables, X, self.key)
        active = next(op.outputs[0] for op in graph.ops if op.primitive == "tanh")
        plan_file.write(path, Policy(values=((active, jremat.Decision.SAVE),), fingerprint=graph.signature))
        return policies.get(f"plan:{path}")

    def test_in_every_form(self, policy, variables):
        assert policy.values, "some is kept, some isn't"
        module = jremat.remat(Drops, policy)
        rngs, mutable = {"dropout": self.key}, ["batch_stats", "intermediates"]
        as_module = lambda own, x, key: module().apply(own, x, rngs={"dropout": key}, mutable=mutable)
        as_function = jremat.checkpoint(self.function, policy)
        kept = [jremat.residuals(f, variables, X, self.key).total_bytes for f in (as_module, as_function)]
        assert kept[0] == kept[1]
        assert (
            module().init({"params": jax.random.key(0), **rngs}, X[:1])["params"].keys() == variables["params"].keys()
        )
        fewer = lambda own: module().apply(own, X, rngs=rngs, mutable=["batch_stats"])[0].sum()
        assert jax.tree.leaves(jax.grad(fewer)(variables))

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                axes = {"params": 0, "batch_stats": 0, "intermediates": 0}
                keys = {"params": True, "dropout": True}
                body = lambda one, c, _: (one(c), None)
                return nn.scan(body, variable_axes=axes, split_rngs=keys, length=2)(module(), x, None)[0]

        own = Model().init({"params": jax.random.key(0), **rngs}, X)
        loss = lambda own: Model().apply(own, X, rngs=rngs, mutable=mutable)[0].sum()
        assert jax.tree.leaves(jax.grad(loss)(own))

        layers = jax.tree.map(lambda a: jnp.stack([a] * 2), variables) | {"key": jax.random.split(self.key, 2)}
        one = lambda p, c: self.function({n: p[n] for n in variables}, c, p["key"])
        assert jremat.stack(one, policy, num_layers=2)(layers, X)[0].shape == X.shape

    def test_another_block_is_refused_with_the_operation_that_differs(self, policy, variables):
        def other(own, x, key):
            return jax.nn.relu(self.function(own, jnp.cos(x), key)[0])

        with pytest.raises(ValueError, match="first operation that differs is cos") as refused:
            jremat.checkpoint(other, policy)(variables, X, self.key)
        assert "test_stack_calls.py:" in str(refused.value) and "float32[4, 8]" in str(refused.value)


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(64)(jnp.sin(jnp.tanh(nn.Dense(256)(x))))


def test_a_plan_of_the_whole_step_runs_as_module_function_and_stack(tmp_path):
    """What ``jremat.plan`` chose for a Linen block with ``step=`` keeps as much however the block is called."""
    x = jnp.ones((512, 64))
    own = Plain().init(jax.random.key(0), x)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 12), own)
    layer = lambda own, x: Plain().apply(own, x)

    def step(policy):
        run = jremat.stack(layer, policy, num_layers=12)
        update = lambda w, x: jax.tree.map(jnp.subtract, w, jax.grad(lambda w: run(w, x).sum())(w))
        return jax.jit(update, donate_argnums=0), (stacked, x)

    plan = jremat.plan(layer, own, x, num_layers=12, hbm_bytes="14MiB", target="cpu", step=step, compiles=0)
    plan.save(tmp_path / "plan.json")
    policy = policies.load(tmp_path / "plan.json")
    [value] = plan.kept
    assert policy.values and plan.whole_step

    as_module = lambda own, x: jremat.remat(Plain, policy)().apply(own, x)
    as_function = jremat.remat(layer, policy)
    for form in (as_module, as_function):
        assert jremat.residuals(form, own, x).total_bytes == value.nbytes
    run = jremat.stack(layer, policy, num_layers=12)
    rows = jremat.residuals(run, stacked, x)
    assert sum(row.bytes for row in rows.kept if row.primitive == "tanh") == 12 * value.nbytes
    loss = lambda f: jax.value_and_grad(lambda own: f(own, x).sum())
    for form, own_or_all in ((as_module, own), (as_function, own), (run, stacked)):
        assert jremat.flops(loss(form), own_or_all).recompute == 0
