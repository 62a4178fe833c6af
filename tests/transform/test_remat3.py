"""Engine, stack, planner and lint under JAX's remat of today and under the one that is to replace it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import jremat
import policies
from jremat.planner.block import Budget, best
from jremat.planner.read_block import read_block
from jremat.planner.roofline import matmul_flops
from jremat.policy import Policy, tag
from jremat.policy.ops import Family
from tests.transform.jax_count import jax_kept_bytes
from tests.transform.test_kept_outputs import SQUARE, kernel, runs, within

UP, UNIT = Policy.save("up"), SQUARE.nbytes


def mlp(w: Any, x: Any) -> Any:
    return jnp.sin(tag(x @ w, "up")) @ w


def under_cond(w: Any, x: Any) -> Any:
    return lax.cond(x.sum() > 0, partial(mlp, w), lambda x: x, x) @ w


def sharded(w: Any, x: Any) -> Any:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("d")
    run = jax.shard_map(
        lambda w, x: lax.psum(mlp(w, x), "d"), mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=PartitionSpec()
    )
    return run(w, x)


def with_a_rule(**how: Any) -> Callable[..., Any]:
    """A kernel whose backward pass reads a matmul, around names of the user's."""
    run = jax.custom_vjp(lambda w, x: jnp.cos(x @ w))

    def forward(w: Any, x: Any) -> Any:
        w, x = (leaf.value if how.get("symbolic_zeros") else leaf for leaf in (w, x))
        h = x @ w
        return jnp.cos(h), (w, x, h)

    def backward(kept: Any, g: Any) -> Any:
        w, x, h = kept
        d = -g * jnp.sin(h)
        return x.T @ d, d @ w.T

    run.defvjp(forward, backward, **how)
    return lambda w, x: run(w, jnp.sin(tag(x @ w, "up")))


FORMS = {
    "plain": mlp,
    "cond": under_cond,
    "shard_map": sharded,
    "optimize_remat": with_a_rule(optimize_remat=True),
    "symbolic_zeros": with_a_rule(symbolic_zeros=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_name_is_kept(either_remat: bool, form: str) -> None:
    f = FORMS[form]
    if form == "shard_map" and either_remat and jax.__version_info__ < (0, 12):
        with pytest.raises(AttributeError, match="process_shard_map"):  # JAX has no rule for it
            jax.grad(jax.checkpoint(lambda w: f(w, SQUARE).sum()))(SQUARE)
        return
    ours = jremat.checkpoint(f, UP)
    assert jremat.residuals(f, SQUARE, SQUARE, policy=UP).total_bytes == jax_kept_bytes(ours, SQUARE, SQUARE) == UNIT
    gradient = lambda f: jax.grad(lambda w: f(w, SQUARE).sum())(SQUARE)
    assert jnp.allclose(gradient(ours), gradient(f), rtol=1e-5)
    assert not [found for found in jremat.lint(f, SQUARE, SQUARE, policy=UP) if found.rule == "unheard-policy"]


@pytest.mark.parametrize(
    "spec, recompute", [("full", 3), ("save:up", 0), ("alternate:2", 2), ("mix:1*full,2*save:up", 1)]
)
def test_a_stack_recomputes_what_its_plan_says(either_remat: bool, spec: str, recompute: int) -> None:
    run = jremat.stack(mlp, policies.get(spec), num_layers=3)
    loss = lambda ws: run(ws, SQUARE).sum()
    assert jremat.flops(jax.grad(loss), jnp.stack([SQUARE] * 3)).count.recompute == recompute


def test_a_plan_leaves_out_the_names_of_a_rule_where_they_are_not_read(either_remat: bool) -> None:
    block = lambda w, x: jnp.sin(kernel(jnp.sin(tag(x @ w, "up")), w) @ w)
    resolved = lambda spec: policies.get(spec).resolve(block, SQUARE, SQUARE, num_layers=1, target="cpu")

    def recomputed(policy: Policy) -> int:
        loss = lambda w: jremat.checkpoint(block, policy)(w, SQUARE).sum()
        return jremat.flops(jax.grad(loss), SQUARE).count.recompute

    # the kernel's own matmul is one of three
    assert recomputed(resolved("overhead:0.4")) == 1
    assert recomputed(resolved("overhead:0")) == 0 and (resolved("overhead:0") == jremat.NONE) is either_remat


def reading_their_results(w: Any, x: Any) -> Any:
    """Operations whose derivatives read what they give, between matmuls."""
    return jax.nn.sigmoid(jnp.exp(jnp.tanh(x @ w) @ w) @ w) @ w


def test_a_plan_keeps_results_that_derivatives_read(either_remat: bool) -> None:
    block = read_block(reading_their_results, SQUARE, SQUARE, cost=matmul_flops)
    most = block.problem.outcome(block.problem.marks).kept_bytes
    chosen = [best(block.problem, Budget(most * k // 4)) for k in range(5)]
    assert len({outcome.recompute_flops for outcome in chosen}) > 2 and chosen[-1].recompute_flops == 0
    for outcome in chosen:
        f = jremat.checkpoint(reading_their_results, block.policy(outcome))
        assert jax_kept_bytes(f, SQUARE, SQUARE) == outcome.kept_bytes
        both = jax.grad(lambda w, x, f=f: f(w, x).sum(), (0, 1))
        assert jremat.flops(both, SQUARE, SQUARE).recompute == outcome.recompute_flops
    for g in (lambda f: f, second):
        of_plan, plain = (g(jax.grad(lambda w, f=f: f(w, SQUARE).sum())) for f in (f, reading_their_results))
        assert jnp.allclose(of_plan(SQUARE), plain(SQUARE), rtol=1e-4)


def second(gradient: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w: jax.jvp(gradient, (w,), (w,))[1]


@pytest.mark.parametrize("name", ["tanh", "exp", "logistic", "sqrt", "cholesky", "sort", "top_k", "reduce_max", "svd"])
def test_a_result_that_is_kept_is_not_recomputed(either_remat: bool, name: str) -> None:
    f = partial(within, name)
    ours = jremat.checkpoint(f, Policy.ops(Family("the_one", "one primitive", (name,))))
    assert runs(ours, name, SQUARE) == 1 and jax_kept_bytes(ours, SQUARE) > 0
    assert jnp.allclose(jax.grad(ours)(SQUARE), jax.grad(f)(SQUARE), rtol=1e-5)
