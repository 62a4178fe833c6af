"""The graph of a function: what is entered, what stays whole, and what is known of each value."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jremat
from jremat.policy import tag

X, W = jnp.ones((4, 8)), jnp.ones((8, 8))


def by_primitive(graph):
    return {op.primitive: op for op, _ in graph.walk()}


def test_calls_are_entered_and_values_know_their_source_line():
    graph = jremat.trace(jax.jit(lambda x, w: jax.jit(jnp.tanh)(x @ w)), X, W)
    assert [op.primitive for op in graph.ops] == ["dot_general", "tanh"]
    value = graph.values[graph.outputs[0]]
    assert (value.shape, value.dtype, value.nbytes, value.family) == ((4, 8), "float32", 128, "pointwise")
    assert value.source.startswith("test_trace.py:")


def test_a_librarys_jitted_function_comes_from_the_line_that_calls_it():
    jnp.where(X > 0, X, 0)  # JAX remembers the inside of `where` with this line
    here = jremat.trace(lambda x: jnp.where(x > 0, x, 0), X)
    lines = {here.values[v].source for op in here.ops for v in op.outputs}
    assert len(lines) == 1 and "<lambda>" in lines.pop()


def test_a_scan_stays_whole_and_its_inside_runs_once_a_step():
    graph = jremat.trace(lambda x, w: lax.scan(lambda x, w: (tag(x @ w, "up"), None), x, w)[0], X, jnp.stack([W] * 5))
    assert [op.primitive for op in graph.ops] == ["scan"]
    inner = by_primitive(graph)["dot_general"]
    assert inner.repeats == 5 and inner.matmul_flops == 2 * 4 * 8 * 8
    assert graph.matmul_flops == 5 * inner.matmul_flops
    assert graph.names == ("up",)


def test_of_a_conds_branches_the_dearest_is_charged():
    graph = jremat.trace(lambda p, x, w: lax.cond(p, lambda x: x @ w, lambda x: x @ w @ w, x), True, X, W)
    assert graph.matmul_flops == 2 * (2 * 4 * 8 * 8)


@pytest.mark.parametrize("start, bound, trips", [(0, 6, 6), (2, 6, 4), (9, 6, 0)])
def test_a_counted_while_counts_its_trips(start, bound, trips):
    def f(x, w):
        return lax.while_loop(lambda c: c[0] < bound, lambda c: (c[0] + 1, c[1] @ w), (start, x))[1]

    graph = jremat.trace(f, X, W)
    assert graph.matmul_flops == max(trips, 1) * 2 * 4 * 8 * 8


def test_a_while_that_does_not_count_is_charged_once():
    def f(x, w):
        return lax.while_loop(lambda c: c.sum() < 1e9, lambda c: c @ w, x)

    def by_halves(x, w):
        return lax.while_loop(lambda c: c[0] < 3.5, lambda c: (c[0] + 1.0, c[1] @ w), (0.0, x))[1]

    for loop in (f, by_halves):
        assert jremat.trace(loop, X, W).matmul_flops == 2 * 4 * 8 * 8


def test_a_custom_vjp_is_whole_and_its_tags_are_read():
    @jax.custom_vjp
    def kernel(x):
        return forward(x)[0]

    def forward(x):
        y = tag(jnp.exp(x), "kernel_out")
        return y, y

    kernel.defvjp(forward, lambda y, g: (g * y,))
    (op,) = jremat.trace(kernel, X).ops
    assert op.opaque and op.inner[0].names == ("kernel_out",)
    assert op.inside(op.outputs[0]).name == "kernel_out"


def test_equal_functions_have_equal_fingerprints_and_others_have_not():
    fingerprint = lambda f, *args: jremat.trace(f, *args).fingerprint
    f = lambda x, w: jnp.sin(x @ w)
    assert fingerprint(f, X, W) == fingerprint(lambda y, v: jnp.sin(y @ v), X, W)
    assert fingerprint(f, X, W) != fingerprint(lambda x, w: jnp.cos(x @ w), X, W)
    assert fingerprint(f, X, W) != fingerprint(f, X[:2], W)
    assert fingerprint(f, X, W) != fingerprint(f, X.astype(jnp.bfloat16), W.astype(jnp.bfloat16))


def test_shapes_do_as_well_as_arrays_and_nothing_is_run():
    huge = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.bfloat16)
    graph = jremat.trace(lambda x: jnp.sin(x), huge)
    assert graph.values[graph.outputs[0]].nbytes == 2 << 40


def test_a_value_that_a_tag_reads_bears_its_name_too():
    graph = jremat.trace(lambda x, w: tag(x @ w, "up"), X, W)
    assert [(graph.values[v].name, op.primitive) for op in graph.ops for v in op.outputs] == [
        ("up", "dot_general"),
        ("up", "name"),
    ]
