"""What a policy keeps is what the derivative reads: every primitive with a rule, held against JAX under its policy."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

import jremat
from jremat.jax_internals import inner_jaxprs, opened
from jremat.policy import Policy, tag
from jremat.policy.ops import Family
from tests.transform.jax_count import jax_kept_bytes

SQUARE = jnp.array(
    [[0.9, 0.1, 0.2, 0.12], [0.1, 0.8, 0.15, 0.05], [0.2, 0.15, 0.7, 0.11], [0.12, 0.05, 0.11, 0.6]], jnp.float32
)
SYMMETRIC = lambda x: (x + x.T) / 2
PRIMITIVES = {
    primitive.name
    for module in (lax, lax.linalg, jax.random)
    for primitive in vars(module).values()
    if isinstance(primitive, Primitive) and primitive in ad.primitive_jvps
}
"""What JAX's own modules name: the registry of rules grows with every library that a process imports."""

SHAPED: dict[str, Callable[..., Any]] = {
    "approx_top_k": lambda x: lax.approx_max_k(x, 2),
    "argmax": lambda x: x * lax.argmax(x, 0, jnp.int32),
    "argmin": lambda x: x * lax.argmin(x, 0, jnp.int32),
    "bitcast_convert_type": lambda x: x * lax.bitcast_convert_type(x, jnp.int32),
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (2, 4, 4), (1, 2)),
    "cholesky": lambda x: lax.linalg.cholesky(SYMMETRIC(x)),
    "clamp": lambda x: lax.clamp(0.2, x, 0.7),
    "concatenate": lambda x: lax.concatenate([x, x], 0),
    "conv_general_dilated": lambda x: lax.conv(x[None, None], x[None, None, :2, :2], (1, 1), "SAME"),
    "convert_element_type": lambda x: lax.convert_element_type(x, jnp.bfloat16),
    "copy": lambda x: jnp.copy(x),
    "cumlogsumexp": lax.cumlogsumexp,
    "cummax": lax.cummax,
    "cummin": lax.cummin,
    "cumprod": lax.cumprod,
    "cumsum": lax.cumsum,
    "dot_general": lambda x: x @ x,
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (1, 1), (2, 2)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:2, :2], (1, 1)),
    "eigh": lambda x: lax.linalg.eigh(SYMMETRIC(x)),
    "gather": lambda x: x[jnp.array([2, 0])],
    "imag": lambda x: lax.imag(lax.complex(x, x)),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "logistic": lax.logistic,
    "lu": lambda x: lax.linalg.lu(x)[0],
    "optimization_barrier": lax.optimization_barrier,
    "polynomial": lambda x: lax.polynomial(x, [x, x]),
    "pad": lambda x: lax.pad(x, 0.0, ((1, 1, 0), (0, 0, 0))),
    "polygamma": lambda x: lax.polygamma(jnp.ones_like(x), x),
    "qr": lambda x: lax.linalg.qr(x, full_matrices=False),
    "random_gamma": lambda x: jax.random.gamma(jax.random.key(0), x),
    "real": lambda x: lax.real(lax.complex(x, x)),
    "reduce_max": lambda x: x.max(0),
    "reduce_min": lambda x: x.min(0),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 7),
    "reduce_prod": lambda x: x.prod(0),
    "reduce_sum": lambda x: x.sum(0),
    "reduce_window_max": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "SAME"),
    "reduce_window_min": lambda x: lax.reduce_window(x, jnp.inf, lax.min, (2, 2), (2, 2), "SAME"),
    "reduce_window_sum": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (2, 2), "SAME"),
    "regularized_incomplete_beta": lambda x: lax.betainc(1.5, 2.5, x),
    "reshape": lambda x: x.reshape(2, 8),
    "rev": lambda x: lax.rev(x, (0,)),
    "round": lambda x: x * lax.round(x),
    "scatter-add": lambda x: x.at[jnp.array([1])].add(x[0]),
    "scatter-max": lambda x: x * lax.stop_gradient(x).at[jnp.array([1])].max(0.5),
    "scatter-min": lambda x: x * lax.stop_gradient(x).at[jnp.array([1])].min(0.5),
    "scatter-sub": lambda x: x.at[jnp.array([1])].subtract(x[0]),
    "scatter-mul": lambda x: x.at[jnp.array([1])].multiply(x[0], unique_indices=True),
    "select_n": lambda x: lax.select_n(x > 0.2, x, x * x),
    "slice": lambda x: x[1:3],
    "sort": lambda x: lax.sort(x),
    "split": lambda x: lax.split(x, (2, 2)),
    "square": lax.square,
    "squeeze": lambda x: lax.squeeze(x[None], (0,)),
    "stop_gradient": lambda x: x * lax.stop_gradient(x),
    "svd": lambda x: lax.linalg.svd(x, full_matrices=False),
    "tile": lambda x: lax.tile(x, (2, 1)),
    "top_k": lambda x: lax.top_k(x, 2),
    "transpose": lambda x: x.T,
    "triangular_solve": lambda x: lax.linalg.triangular_solve(x, x, left_side=True),
    "tridiagonal_solve": lambda x: lax.linalg.tridiagonal_solve(x[0], x[1] + 3, x[2], x),
    "igamma": lambda x: lax.igamma(2.5, x),
    "igammac": lambda x: lax.igammac(2.5, x),
}
"""Primitives whose call is more than one or two arrays of one shape."""

REASONS = {
    "references to memory": "stage",
    "communication, tested on devices": "all_gather all_to_all ppermute psum ragged_all_to_all",
    "hold programs, which are decided value by value or not at all": "cond custom_linear_solve scan while reduce "
    "reduce_window dce_sink",
    "of integers, booleans or keys": "and eq eq_to ge gt is_finite le le_to lt lt_to mulhi ne not or shift_left "
    "shift_right_arithmetic shift_right_logical xor",
    "identities that name a place": "device_put sharding_constraint",
    "no derivative, or none by reverse mode": "eig select_and_gather_add select_and_scatter_add nextafter",
    "complex, which JAX's own remat can't keep": "complex conj fft",
    "its rule runs another one, which a policy by primitive keeps and ours does not name": "scatter",
    "no public function binds it alone": "stack unstack",
}
"""Primitives left out, by reason."""

LEFT_OUT = {name for names in REASONS.values() for name in names.split()}
WALKED = sorted(PRIMITIVES - LEFT_OUT)


def example(name: str) -> Callable[..., Any]:
    """A function that binds a primitive."""
    if name in SHAPED:
        return SHAPED[name]
    function = getattr(lax, name)

    def of_one_or_two(x: Any) -> Any:
        try:
            return function(x)
        except TypeError:
            return function(x, x[::-1] + 0.1)

    return of_one_or_two


def within(name: str, x: Any) -> Any:
    """The example between operations: its input is recomputed, its output is read by nothing but a sum of multiples."""
    inner = x + 0.05 if name in ("acosh",) else x * 0.9
    outs = jax.tree.leaves(example(name)(inner + (1.0 if name == "acosh" else 0.0)))
    return sum((out * 1.5).sum().astype(jnp.float32) for out in outs if jnp.issubdtype(out.dtype, jnp.inexact))


def equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in opened(jaxpr).eqns:
        yield eqn
        for inner, _ in inner_jaxprs(eqn):
            yield from equations(inner)


def runs(f: Callable[..., Any], name: str, *args: Any) -> int:
    """How often a gradient runs a primitive."""
    return sum(eqn.primitive.name == name for eqn in equations(jax.make_jaxpr(jax.grad(f))(*args)))


@pytest.mark.parametrize("name", WALKED)
def test_bytes_and_recompute_are_those_of_jax(name: str) -> None:
    f = functools.partial(within, name)
    assert any(eqn.primitive.name == name for eqn in equations(jax.make_jaxpr(f)(SQUARE))), "the example binds it"
    ours = jremat.checkpoint(f, Policy.ops(Family("the_one", "one primitive", (name,))))
    theirs = jax.checkpoint(f, policy=lambda primitive, *_, **__: primitive.name == name)
    assert runs(ours, name, SQUARE) <= runs(theirs, name, SQUARE)
    assert jax_kept_bytes(ours, SQUARE) <= jax_kept_bytes(theirs, SQUARE)
    assert jnp.allclose(jax.grad(ours)(SQUARE), jax.grad(theirs)(SQUARE), rtol=1e-5, equal_nan=True)


@jax.custom_vjp
def kernel(x: Any, w: Any) -> Any:
    return jnp.sin(tag(x @ w, "primal_only"))


def _forward(x: Any, w: Any) -> Any:
    h = tag(x @ w, "rule_only")
    return jnp.sin(h), (x, w, h)


def _backward(kept: Any, g: Any) -> Any:
    x, w, h = kept
    d = g * jnp.cos(h)
    return d @ w.T, x.T @ d


kernel.defvjp(_forward, _backward)


@jax.custom_jvp
def smooth(x: Any) -> Any:
    return jnp.sin(x)


smooth.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), tangents[0] * tag(jnp.cos(primals[0]), "slope")))


class TestNamesInARule:
    """A kernel is read by the rule that its derivative runs."""

    forms = pytest.mark.parametrize(
        "form",
        [kernel, jax.jit(kernel), lambda x, w: lax.scan(lambda c, _: (kernel(c, w), None), x, None, length=3)[0]],
        ids=["plain", "jit", "scan"],
    )

    @forms
    def test_the_rules_names_are_kept_as_jax_keeps_them(self, form: Callable[..., Any]) -> None:
        block = lambda x, w: jnp.tanh(form(jnp.sin(x), w)) @ w
        policy = Policy.save("rule_only")
        theirs = jax_kept_bytes(jax.checkpoint(block, policy=policy), SQUARE, SQUARE)
        assert jremat.residuals(block, SQUARE, SQUARE, policy=policy).total_bytes == theirs > 0

    @forms
    def test_a_name_in_the_primal_alone_is_an_error(self, form: Callable[..., Any]) -> None:
        with pytest.raises(ValueError, match=r"names 'primal_only'.*names in this function: rule_only"):
            jremat.checkpoint(form, Policy.save("primal_only"))(SQUARE, SQUARE)

    @forms
    def test_remat3_which_reads_no_rule_is_refused(self, form: Callable[..., Any], remat3: None) -> None:
        block = lambda x, w: jnp.tanh(form(jnp.sin(x), w)) @ w
        assert jax_kept_bytes(jax.checkpoint(block, policy=Policy.save("rule_only")), SQUARE, SQUARE) == 0
        with pytest.raises(ValueError, match=r"keeps rule_only in the derivative rule .* turn jax_remat3 off"):
            jremat.checkpoint(block, Policy.save("rule_only"))(SQUARE, SQUARE)
        with pytest.raises(ValueError, match=r"keeps slope in the derivative rule .* turn jax_remat3 off"):
            jremat.checkpoint(lambda x, w: smooth(form(x, w)), Policy.save("slope"))(SQUARE, SQUARE)
        assert runs(lambda x: jremat.checkpoint(block, Policy())(x, SQUARE).sum(), "tanh", SQUARE) == 2

    def test_a_stack_keeps_them_too(self) -> None:
        def loss(policy: Policy) -> Callable[..., Any]:
            run = jremat.stack(lambda w, x: kernel(jnp.sin(x), w), policy, num_layers=3)
            return jax.grad(lambda ws: run(ws, SQUARE).sum())

        weights = jnp.stack([SQUARE] * 3)
        kept = jremat.flops(loss(Policy.save("rule_only")), weights).count.recompute
        assert (kept, jremat.flops(loss(Policy()), weights).count.recompute > 0) == (0, True)


@pytest.mark.parametrize("policy", [Policy.save("router"), Policy.ops(Family("choice", "top_k", ("top_k",)))])
def test_a_kept_decision_is_made_once(policy: Policy) -> None:
    def router(x: Any, w: Any) -> Any:
        values, _ = lax.top_k(x @ w, 2)
        return (tag(values, "router") * jnp.arange(2.0)) @ w[:2]

    loss = lambda w: jremat.checkpoint(router, policy)(SQUARE, w).sum()
    assert runs(loss, "top_k", SQUARE) == 1
    assert not [f for f in jremat.lint(router, SQUARE, SQUARE, policy=policy) if f.rule == "decision-rerun"]


def test_what_is_not_differentiated_is_kept_under_its_name_too() -> None:
    f = lambda x, w: (jnp.tanh(x * 2.0) @ w).sum()
    policy = Policy.ops(Family("the_one", "one primitive", ("tanh",)))
    count = lambda g: sum(e.primitive.name == "tanh" for e in equations(jax.make_jaxpr(jax.grad(g, 1))(SQUARE, SQUARE)))
    assert count(jremat.checkpoint(f, policy)) == 1
