"""A replay names the first value that an impure function makes twice differently, and finds nothing in pure ones."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jremat
import policies
from jremat import tag
from models.transformer import Carry, block_apply, init_params
from tests.models.families import LLAMA
from tests.transform.blocks import case

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
X = jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)
W = jnp.linspace(0.5, 1.5, 16).reshape(4, 4)


def replayed(f, *args, **options):
    return jremat.replay(f, *args, compiler_options=FAST, **options)


def shape_of(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


# -- impure functions --------------------------------------------------------------------------------------------

CALLS = itertools.count(1)
SEEN: list[int] = []


def with_a_counter(x, w):
    return jnp.sin(x @ w) * next(CALLS)


def with_a_global(x, w):
    SEEN.append(1)
    return jnp.sin(x @ w) * len(SEEN)


def with_noise_at_trace_time(x, w):
    return jnp.sin(x @ w + np.random.normal(size=x.shape).astype(np.float32))


def counted_inside(x, w):
    return jnp.sin(x @ w) * next(CALLS)


def with_a_counter_inside(x, w):
    return jax.checkpoint(counted_inside)(x, w) @ w


@pytest.mark.parametrize("f", [with_a_counter, with_a_global, with_noise_at_trace_time, with_a_counter_inside])
def test_what_differs_from_trace_to_trace_is_named(f):
    found = replayed(f, X, W, policy=policies.get("full"))
    first = found.first_difference
    assert not found.equal and not found.bitwise
    assert first.where == "trace" and first.line.startswith("test_replay.py:") and first.relative > 0
    [line] = re.findall(r":(\d+) ", first.line)
    written = Path(__file__).read_text().splitlines()[int(line) - 1]
    assert any(word in written for word in ("next(CALLS)", "len(SEEN)", "np.random"))
    assert "not equal" in str(found) and first.line in str(found)


def from_the_host(values):
    """A block that adds what ``values`` gives on the host."""

    def block(x, w):
        up = tag(x @ w, "up")
        noise = jax.pure_callback(lambda _: next(values), shape_of(up), jax.lax.stop_gradient(up))
        return jnp.sin(jnp.sin(up) * noise) @ w

    return jax.checkpoint(block)


def random_arrays():
    while True:
        yield np.random.normal(size=(8, 4)).astype(np.float32)


def test_host_randomness_in_a_callback_is_named():
    found = replayed(from_the_host(random_arrays()), X, W)
    first = found.first_difference
    assert (first.name, first.where, first.shape, first.dtype) == ("pure_callback", "run", (8, 4), "float32")
    assert "(block)" in first.line and found.largest_difference > 0.1


def test_a_callback_that_gives_the_rerun_another_value_is_named_though_every_run_is_alike():
    turns = itertools.cycle([np.ones((8, 4), np.float32), np.full((8, 4), 1.5, np.float32)])
    found = replayed(from_the_host(turns), X, W)
    assert (found.first_difference.name, found.first_difference.where) == ("pure_callback", "rerun")
    assert found.first_difference.relative == pytest.approx(1 / 3)


@pytest.mark.parametrize("ordered", [False, True])
def test_an_effect_that_jax_refuses_in_a_remat_is_named(ordered):
    def block(x, w):
        up = x @ w
        io_callback(lambda _: None, None, jax.lax.stop_gradient(up), ordered=ordered)
        return jnp.sin(up) @ w

    first = replayed(jax.checkpoint(block), X, W).first_difference
    assert (first.name, first.where) == ("io_callback", "refused") and "(block)" in first.line


def test_an_effect_that_gives_another_value_each_time_is_named_before_the_refusal():
    count = itertools.count()

    def block(x, w):
        number = io_callback(lambda: np.float32(next(count)), jax.ShapeDtypeStruct((), jnp.float32))
        return jnp.sin(x @ w) * jax.lax.stop_gradient(number)

    first = replayed(jax.checkpoint(block), X, W).first_difference
    assert (first.name, first.where) == ("io_callback", "run")


# -- pure functions ----------------------------------------------------------------------------------------------


def dropped_block(x, w, key):
    return nn.Dropout(0.5, deterministic=False).apply({}, jnp.sin(x @ w), rngs={"dropout": key}) @ w


def test_dropout_is_the_same_mask_again():
    found = replayed(dropped_block, X, W, jax.random.key(3), policy=policies.get("full"))
    assert found.equal and found.first_difference is None
    assert found.values_rerun > 5 and found.values_compared > 2 * found.values_rerun
    assert str(found).startswith("equal")


@pytest.mark.parametrize(
    "family, attention, spec",
    [
        *(("gpt", "dot", spec) for spec in ("full", "but:mlp_act")),
        *(("llama", "blockwise", spec) for spec in ("full", "save_only_matmuls")),
    ],
)
def test_a_block_of_ours_is_equal_under_a_policy(family, attention, spec):
    block = case(family, attention)
    found = replayed(block.function(), *block.args(), policy=policies.get(spec))
    assert found.equal, found
    assert found.values_rerun > 0


def test_a_stack_of_ours_is_equal_in_groups():
    config = replace(LLAMA, num_layers=4)
    params = init_params(config, jax.random.key(0))["blocks"]
    x = jax.random.normal(jax.random.key(1), (2, 9, config.hidden))
    carry = Carry(x, jnp.int32(0), None, jnp.arange(9))
    found = replayed(block_apply(config), params, carry, policy=policies.get("every_k:2"), num_layers=4)
    assert found.equal, found
    assert found.values_rerun > 0


@pytest.mark.parametrize("spec", ["alternate:2", "revolve:2", "mix:2*full,2*save:up", "every_k:3,full"])
def test_a_stack_is_equal_under_a_plan(spec):
    ws = jnp.linspace(0.5, 1.0, 64).reshape(4, 4, 4)
    found = replayed(lambda w, x: x + jnp.sin(tag(x @ w, "up")) @ w, ws, X, policy=policies.get(spec), num_layers=4)
    assert found.equal, found
    assert found.values_rerun > 0


def test_a_policy_of_jaxs_and_a_remat_of_ones_own_are_replayed_too():
    def block(x, w):
        return jnp.sin(tag(x @ w, "up")) @ w

    assert replayed(block, X, W, policy=jax.checkpoint_policies.dots_saveable).equal
    own = replayed(jax.checkpoint(block), X, W)
    assert own.equal and own.bitwise and own.values_rerun > 0
    assert replayed(block, X, W).values_rerun == 0


def test_a_difference_within_the_tolerance_is_told_but_equal():
    def block(x, w):
        bits = itertools.cycle([1.0, 1.0 + 2e-7])
        scale = jax.pure_callback(lambda: np.float32(next(bits)), jax.ShapeDtypeStruct((), jnp.float32))
        return jnp.sin(jnp.sin(x @ w) * scale) @ w

    found = replayed(jax.checkpoint(block), X, W)
    assert found.equal and not found.bitwise and 0 < found.largest_difference < found.tolerance
    exact = replayed(jax.checkpoint(block), X, W, tolerance=0.0)
    assert not exact.equal and exact.first_difference.name == "pure_callback"


def test_a_shape_without_values_can_not_be_replayed():
    with pytest.raises(ValueError, match="expected arrays with values, got a"):
        jremat.replay(jnp.sin, jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(ValueError, match="policy: expected a policy"):
        jremat.replay(jnp.sin, X, policy="full")
    with pytest.raises(ValueError, match="expected a floating-point array"):
        jremat.replay(lambda n: n + 1, jnp.arange(3))


# -- what it is given ----------------------------------------------------------------------------------------------


def rowwise(w, x):
    return x + jnp.sin(tag(x @ w, "up")) @ w


WS = jnp.linspace(0.5, 1.0, 64).reshape(4, 4, 4)


@pytest.mark.parametrize("tolerance", [float("nan"), -1, -1e-9, "x", float("inf"), True, [1e-3]])
def test_a_tolerance_that_is_no_share_is_refused(tolerance):
    with pytest.raises(ValueError, match="tolerance: expected a share of at least 0"):
        jremat.replay(with_a_counter, X, W, tolerance=tolerance)
    assert not replayed(with_a_counter, X, W, tolerance=np.float32(1e-3)).equal


def test_one_policy_and_a_number_of_layers_are_a_stack():
    found = replayed(rowwise, WS, X, policy=policies.get("full"), num_layers=np.int64(4))
    assert found == replayed(rowwise, WS, X, policy=policies.get("every_k:1"), num_layers=4)
    assert found.equal and found.values_rerun > 0
    calls = itertools.count()

    def impure(w, x):
        return rowwise(w, x) * next(calls)

    assert not replayed(impure, WS, X, policy=policies.get("full"), num_layers=4).equal


@pytest.mark.parametrize("policy", ["full", "every_k:2", "none"])
def test_parameters_that_are_not_stacked_are_named(policy):
    with pytest.raises(
        ValueError, match=r"parameters\['w'\]: expected \[5, \.\.\.\], one entry per layer, got \[4, 4\]"
    ):
        jremat.replay(lambda p, x: rowwise(p["w"], x), {"w": W}, X, policy=policies.get(policy), num_layers=5)


def test_a_number_of_layers_that_would_do_nothing_says_so():
    for policy in (None, jax.checkpoint_policies.dots_saveable):
        with pytest.raises(ValueError, match="num_layers: expected a policy or a plan of ours beside it"):
            jremat.replay(rowwise, WS, X, policy=policy, num_layers=4)
    for wrong in ("3", 0, 2.5):
        with pytest.raises(ValueError, match="num_layers: expected a whole number of at least 1"):
            jremat.replay(rowwise, WS, X, policy=policies.get("full"), num_layers=wrong)
    with pytest.raises(ValueError, match="args: expected those of a stack"):
        jremat.replay(rowwise, WS, policy=policies.get("full"), num_layers=4, x=X)


@pytest.mark.parametrize(
    "options", [{"no_such_option": 1}, {"xla_backend_optimization_level": "much"}, {3: 1}, {"a": object()}, ["a"]]
)
def test_options_that_the_compiler_does_not_know_are_named(options):
    with pytest.raises(ValueError, match="compiler_options: "):
        jremat.replay(jnp.sin, X, compiler_options=options)


def test_a_replay_inside_of_a_trace_says_so():
    seen = []
    for transform in (jax.jit, lambda f: jax.grad(lambda x: f(x).sum()), jax.vmap):
        for f in (lambda x: jremat.replay(jnp.sin, x), lambda x: jremat.replay(lambda y: y * x.sum(), X)):
            with pytest.raises(ValueError, match=r"tracer; a replay is run: call it\s+outside of jax\.jit"):
                transform(lambda x, f=f: seen.append(f(x)) or x)(X)
    assert not seen


def nothing_in_it(w, x):
    return jnp.tanh(x @ w)


def associative(w, x):
    return x + jax.lax.associative_scan(jnp.multiply, x @ w, axis=0)


@pytest.mark.parametrize("block, x", [(nothing_in_it, X[:0]), (associative, X), (associative, X[:5])])
def test_values_without_numbers_are_replayed(block, x):
    for policy in (None, policies.get("full"), policies.get("none")):
        assert replayed(block, W, x, policy=policy).equal
    found = replayed(block, WS, x, policy=policies.get("every_k:2"), num_layers=4)
    assert found.equal and (found.values_rerun > 0) == bool(x.size)
