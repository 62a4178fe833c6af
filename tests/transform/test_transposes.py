"""Where JAX transposes and batches a rematted function, as under its own policies; with and without ``jax_remat3``."""

import contextlib

import chex
import jax
import jax.numpy as jnp
import pytest

import jremat
import policies

M, A = 2 * jnp.eye(4) + 0.1, jnp.arange(4.0)
X = jax.random.normal(jax.random.key(0), (3, 2, 4))
POLICIES = [policies.get(spec) for spec in ("dots_saveable", "full", "ops:pointwise+matmul")]


@contextlib.contextmanager
def remat3(on):
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", on)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", before)


def linear(a):
    return a @ M


def bent(w, x):
    return jnp.sin(x @ w).sum()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.spec)
class TestTransposes:
    def test_a_linear_map_is_transposed(self, policy):
        f = jremat.checkpoint(linear, policy, strict=False)
        (back,) = jax.linear_transpose(f, A)(A)
        assert jnp.allclose(back, M @ A)
        rows = jax.vmap(lambda a: jax.linear_transpose(f, a)(a)[0])(X[0])
        assert jnp.allclose(rows, X[0] @ M.T, atol=1e-5)
        _, moved = jax.jvp(lambda a: jax.linear_transpose(f, a)(a)[0], (A,), (A,))
        assert jnp.allclose(moved, M @ A)

    def test_iterative_solvers_take_it_as_their_operator(self, policy):
        f = jremat.checkpoint(linear, policy, strict=False)
        for name in ("gmres", "cg", "bicgstab"):
            solve = lambda b, name=name: getattr(jax.scipy.sparse.linalg, name)(f, b)[0]
            assert jnp.allclose(solve(A) @ M, A, atol=1e-4), name
            assert jnp.allclose(
                jax.grad(lambda b, solve=solve: solve(b).sum())(A), jnp.linalg.solve(M, jnp.ones(4)), atol=1e-4
            )

    def test_custom_linear_solve_transposes_it(self, policy):
        f = jremat.checkpoint(linear, policy, strict=False)

        def solve(b):
            by = lambda matrix: lambda _, b: jnp.linalg.solve(matrix, b)
            return jax.lax.custom_linear_solve(f, b, by(M.T), by(M)).sum()

        assert jnp.allclose(jax.grad(solve)(A), jnp.linalg.solve(M, jnp.ones(4)), atol=1e-5)


MODES = {
    "vmap of grad": lambda f: jax.vmap(jax.grad(f), (None, 0))(M, X),
    "grad of vmap": lambda f: jax.grad(lambda w: jax.vmap(f, (None, 0))(w, X).sum())(M),
    "weights batched": lambda f: jax.vmap(jax.grad(f))(jnp.stack([M, 2 * M, -M]), X),
    "vmap of vmap": lambda f: jax.vmap(jax.vmap(jax.grad(f), (None, 0)), (0, None))(jnp.stack([M, -M]), X),
    "by name": lambda f: jax.vmap(jax.grad(f), (None, 0), axis_name="batch")(M, X),
    "jit": lambda f: jax.jit(jax.vmap(jax.value_and_grad(f), (None, 0)))(M, X),
    "jacfwd": lambda f: jax.jacfwd(f)(M, X[0]),
    "hessian": lambda f: jax.hessian(lambda v: f(v.reshape(4, 4), X[0]))(M.ravel()),
    "linearize": lambda f: jax.linearize(lambda w: f(w, X[0]), M)[1](M),
    "linearize, transposed": lambda f: jax.linear_transpose(jax.linearize(lambda w: f(w, X[0]), M)[1], M)(1.0),
    "vmap of jvp": lambda f: jax.vmap(lambda x: jax.jvp(lambda w: f(w, x), (M,), (M,)))(X),
}


@pytest.mark.parametrize("on", [False, True], ids=["remat", "remat3"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.spec)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_differentiation_under_vmap(mode, policy, on):
    with remat3(on):
        found = MODES[mode](jremat.checkpoint(bent, policy))
    chex.assert_trees_all_close(found, MODES[mode](bent), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("on", [False, True], ids=["remat", "remat3"])
def test_under_vmap_the_same_values_are_kept(on):
    with remat3(on):
        f = jremat.checkpoint(bent, policies.get("dots_saveable"))
        rows = jremat.residuals(lambda w: jax.vmap(f, (None, 0))(w, X), M).kept
        step = jax.value_and_grad(lambda w: jax.vmap(f, (None, 0))(w, X).sum())
        assert [row.bytes for row in rows] == [3 * 2 * 4 * 4]  # x @ w of the three
        assert jremat.flops(step, M).recompute == 0
