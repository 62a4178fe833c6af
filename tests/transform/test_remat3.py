"""Engine, stack, planner and lint under JAX's remat of today and under the one that is to replace it."""

import warnings
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
from jremat.policy import Policy, tag
from tests.transform.jax_count import jax_kept_bytes
from tests.transform.test_kept_outputs import SQUARE, kernel

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


def test_a_planner_whose_figures_remat3_does_not_keep_warns(either_remat: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jremat.plan(mlp, SQUARE, SQUARE, hbm_bytes=2**20, target="cpu", compiles=0)
    assert [str(w.message)[:23] for w in caught] == ["plan: under jax_remat3 "] * either_remat
