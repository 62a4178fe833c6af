"""The executor in every mode of differentiation: loops of its own in reverse mode, scans in the others, and says so."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax import lax

import jremat
import policies
from jremat.policy import FULL, NONE
from jremat.transform.chain import stack
from jremat.transform.scan import scan_stack
from tests.transform.chain_case import ROUNDING, SCALE, H, L, X, block, largest_error, plain, weights

SPECS = ("full", "every_k:3", "revolve:2", "mix:3*full,2*every_k:2,2*none")
SAID = r"stack: forward mode or a second derivative runs '{}' as scans, which copy"


@pytest.fixture(scope="module")
def parameters():
    p = weights()
    return {n: p[n] for n in ("in", "out")}, p["key"]


def output(run, key):
    """The last carry by its real parameters, its carry and what its layers share."""
    return lambda real, x, scale: run(real | {"key": key}, x, scale)


def total(run, key):
    return lambda *args: (output(run, key)(*args) ** 2).sum()


def anew(block):
    """A block that no trace is remembered of: warnings are those of a first trace."""
    return lambda *args: block(*args)


def both(make, spec, parameters):
    """The same derivative of the executor and of a plain scan."""
    real, key = parameters
    with pytest.warns(UserWarning, match=SAID.format(spec.replace("*", r"\*"))):
        found = make(stack(anew(block), policies.get(spec), num_layers=L), key)(real, X, SCALE)
    return found, make(plain, key)(real, X, SCALE)


class TestForwardMode:
    @pytest.mark.parametrize("spec", ["every_k:3"])
    def test_jacobian(self, spec, parameters):
        rows = lambda run, key: jax.jacfwd(lambda *args: output(run, key)(*args).sum(0), argnums=2)
        assert largest_error(*both(rows, spec, parameters)) <= ROUNDING

    def test_hessian_by_the_parameters(self, parameters):
        """A batch of cotangents through the compiled stack, differentiated again."""
        by_scale = lambda run, key: jax.hessian(
            lambda scale, *at: total(run, key)(jax.tree.map(lambda w: w * scale, at[0]), *at[1:])
        )
        made = lambda run, key: lambda *at: by_scale(run, key)(1.0, *at)
        assert largest_error(*both(made, "full", parameters)) <= 1e-5

    def test_in_a_shard_map(self, parameters):
        """Types are checked there: a tangent varies over devices as its value does."""
        mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec
        real, _ = parameters
        simple = lambda p, x: x + jnp.tanh(x @ p["in"]) @ p["out"]

        def step(run):
            inner = jax.shard_map(run, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec("data"))
            pushed = jax.jit(lambda p, x: jax.jvp(inner, (p, x), (p, x)))(real, X)
            return pushed, jax.jit(jax.grad(lambda p, x: (inner(p, x) ** 2).sum(), (0, 1)))(real, X)

        expected = step(lambda p, x: lax.scan(lambda x, p: (simple(p, x), None), x, p)[0])
        with pytest.warns(UserWarning, match=SAID.format("every_k:3")):
            found = step(stack(simple, policies.get("every_k:3"), num_layers=L))
        assert largest_error(found, expected) <= ROUNDING


class TestAgain:
    @pytest.mark.parametrize("spec", ["every_k:3"])
    def test_reverse_over_forward_and_a_third_derivative(self, spec, parameters):
        def mixed(run, key):
            def third(*args):
                along = lambda f: lambda scale: jax.jvp(f, (scale,), (jnp.cos(scale),))[1]
                one = lambda scale: total(run, key)(args[0], args[1], scale)
                return jax.grad(along(one))(args[2]), jax.grad(along(along(one)))(args[2])

            return jax.jit(third)

        assert largest_error(*both(mixed, spec, parameters)) <= 1e-5

    def test_keeps_what_the_scan_keeps(self):
        """Of second derivatives; the executor's own loops, differentiated as they stand, took over twice as much."""
        p = weights(12)
        real, x = {n: p[n] for n in ("in", "out")}, jnp.ones((64, H))

        def temp(make):
            run = make(anew(block), policies.get("every_k:3,full"), num_layers=12)
            slope = jax.grad(total(run, p["key"]), (0, 1))
            step = jax.grad(lambda *args: sum((g**2).sum() for g in jax.tree.leaves(slope(*args, SCALE))), (0, 1))
            return jax.jit(step).lower(real, x).compile().memory_analysis().temp_size_in_bytes

        with pytest.warns(UserWarning, match=SAID.format("every_k:3,full")):
            assert temp(stack) <= 1.25 * temp(scan_stack)


class TestSays:
    def test_once(self, parameters):
        real, key = parameters
        for differentiate in (
            lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x,))).lower(X),
            lambda f: jax.jit(jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum())).lower(X),
            lambda f: jax.jit(jax.hessian(f)).lower(X),
        ):
            run = stack(anew(block), policies.get("revolve:2"), num_layers=L)
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                differentiate(lambda x, run=run: total(run, key)(real, x, SCALE))
            assert len(heard) == 1, [str(w.message) for w in heard]
            price, instead = str(heard[0].message).split("; ", 1)
            assert price.endswith("runs 'revolve:2' as scans, which copy parameters and gradients")
            assert instead == "a scan can't follow a schedule of 2 slots; its layers run in groups of 4"

    @pytest.mark.parametrize("spec", SPECS)
    def test_nothing_in_reverse_mode_nor_traces_a_scan_there(self, spec, parameters, monkeypatch):
        def never(*_):
            raise AssertionError("reverse mode traced the scan")

        monkeypatch.setattr("jremat.transform.scan.scanned", never)
        real, key = parameters
        run = stack(anew(block), policies.get(spec), num_layers=L)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jaxpr = jax.make_jaxpr(jax.grad(total(run, key), (0, 1, 2)))(real, X, SCALE)
        assert "linear_map" not in str(jaxpr)


@pytest.mark.parametrize("spec", SPECS[1:])
def test_a_batch_of_stacks_is_differentiated(spec, parameters):
    """Batched first: parameters that the batch shares get the sum over it."""
    real, key = parameters
    pair = jnp.stack([X, 2 * X])

    def step(run):
        batched = jax.vmap(output(run, key), in_axes=(None, 0, None))
        return jax.jit(jax.grad(lambda real, x: (batched(real, x, SCALE) ** 2).sum(), (0, 1)))(real, pair)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = step(stack(block, policies.get(spec), num_layers=L))
    assert largest_error(found, step(plain)) <= ROUNDING


class TestWrites:
    """Blocks that write beside their carry."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + jnp.tanh(nn.Dense(H)(nn.BatchNorm(use_running_average=False, momentum=0.5)(x)))

    def stacked(self):
        """Parameters and statistics of L layers, and a block that writes its statistics."""
        one = self.Layer()
        variables = jax.vmap(lambda key: one.init(key, X))(jax.random.split(jax.random.key(0), L))

        def layer(variables, x):
            return one.apply(variables, x, mutable=["batch_stats"])

        return variables, layer

    @pytest.mark.parametrize("spec", ["full", "every_k:3,full", "alternate:2", SPECS[-1]])
    def test_batch_statistics_are_written_once(self, spec):
        """As Flax's own scan over layers writes them, and the gradients too."""
        variables, layer = self.stacked()
        scanned = nn.scan(
            nn.remat(type("Pair", (self.Layer,), {"__call__": lambda s, x: (self.Layer.__call__(s, x), None)})),
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True},
            length=L,
        )()

        def flax(params):
            (y, _), written = scanned.apply(variables | {"params": params}, X, mutable=["batch_stats"])
            return (y**2).sum(), written

        run = stack(layer, policies.get(spec), num_layers=L)

        def ours(params):
            y, written = run(variables | {"params": params}, X)
            return (y**2).sum(), written

        with pytest.warns(UserWarning, match=r"stack: a block that writes values beside its carry runs .* as scans"):
            found = jax.jit(jax.value_and_grad(ours, has_aux=True))(variables["params"])
        expected = jax.jit(jax.value_and_grad(flax, has_aux=True))(variables["params"])
        assert largest_error(found, expected) <= ROUNDING
        moved = found[0][1]["batch_stats"]["BatchNorm_0"]["mean"]
        assert moved.shape == (L, H)
        assert largest_error(moved[0], X.mean(0) / 2) <= ROUNDING  # once: twice would be three quarters

    def test_a_pair_of_carries_is_a_carry(self):
        run = stack(lambda w, x: (x[1] * w, x[0]), NONE, num_layers=3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [float(x) for x in run(jnp.array([2.0, 3.0, 5.0]), (1.0, 1.0))] == [10.0, 3.0]

    def test_one_that_is_like_no_carry_raises(self):
        with pytest.raises(ValueError, match="block: expected it to return a carry like its own"):
            stack(lambda w, x: (x.astype(jnp.bfloat16), w), FULL, num_layers=3)(jnp.ones(3), X)


def test_a_first_input_that_the_backward_pass_does_not_read_is_not_kept():
    """Under ``none`` this block's backward reads tanh x alone; forward mode and second derivatives start from x."""

    def inner(w, x):
        return x + jnp.tanh(jnp.tanh(x) @ w)

    w = weights()["in"][:, :, :H]
    runs = [make(inner, NONE, num_layers=L) for make in (stack, scan_stack)]
    steps = [lambda w, x, run=run: (run(w, 2 * x) ** 2).sum() for run in runs]  # an input that is made, not given
    kept = [jremat.residuals(step, w, X).total_bytes for step in steps]
    assert kept[0] == kept[1] > 0
    wide = jnp.ones((2**14, H))
    temp = [jax.jit(jax.grad(step)).lower(w, wide).compile().memory_analysis().temp_size_in_bytes for step in steps]
    assert temp[0] < temp[1] + wide.nbytes / 2
