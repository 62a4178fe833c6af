"""The traced peak on programs that can be worked by hand, and on programs of every kind."""

import time
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import policies
from jremat.graph.peak import ASSUMPTIONS, predicted_memory
from jremat.transform.chain import stack

N = 64
SQUARE = N * N * 4  # bytes of a float32 [64, 64]
x = jax.ShapeDtypeStruct((N, N), jnp.float32)
stacked = jax.ShapeDtypeStruct((5, N, N), jnp.float32)


def figures(found):
    return found.argument_bytes, found.output_bytes, found.alias_bytes, found.temp_bytes


def test_a_chain_of_matmuls_holds_two_results_at_a_time():
    # x·w, (x·w)·w and ((x·w)·w)·w: while the third is made the second is alive, and the third is the result.
    assert figures(predicted_memory(lambda x, w: x @ w @ w @ w, x, x)) == (2 * SQUARE, SQUARE, 0, 2 * SQUARE)


def test_pointwise_chains_need_nothing():
    found = predicted_memory(lambda x: jnp.exp(x) * 2 + jnp.sin(x) - x.T, x)
    assert figures(found) == (SQUARE, SQUARE, 0, 0)


def test_a_matmul_reads_what_is_materialised():
    # the sum is fused into nothing that a matmul could read, so it stands in memory while the result is made
    assert figures(predicted_memory(lambda x: (x + 1) @ (x + 1), x)) == (SQUARE, SQUARE, 0, SQUARE)


def test_a_value_converted_twice_is_converted_once():
    half = lambda x: x.astype(jnp.bfloat16)
    found = predicted_memory(lambda x, w: half(x) @ half(w) + half(w) @ half(x), x, x)
    assert found.temp_bytes == 4 * SQUARE // 2  # two casts, one product, and the other before they are added


def test_a_donated_update_is_written_in_place():
    update = lambda w, g: (w - 0.1 * g, (g**2).sum())
    kept = predicted_memory(jax.jit(update), x, x)
    donated = predicted_memory(jax.jit(update, donate_argnums=0), x, x)
    assert figures(kept) == (2 * SQUARE, SQUARE + 4 + 16, 0, 0)  # with a table of two pointers
    assert figures(donated) == (2 * SQUARE, SQUARE + 4 + 16, SQUARE, 0)
    assert predicted_memory(update, x, x, donate=[0]).alias_bytes == SQUARE
    assert donated.peak_bytes == 2 * SQUARE + 20
    assert [b.donated for b in donated.buffers if b.kind == "argument"] == [True, False]


def test_a_scan_holds_its_stack_and_one_turn():
    def run(c, ws):
        c, ys = lax.scan(lambda c, w: (jnp.tanh(c @ w), c @ c), c, ws)
        return c.sum() + ys.sum()

    # the stack of ys, the carry, this turn's c·w and c·c, and the slice of ws that the matmul reads
    assert predicted_memory(run, x, stacked).temp_bytes in (5 * SQUARE + k * SQUARE for k in (3, 4))
    unstacked = lambda c, ws: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), c, ws)[0].sum()
    assert predicted_memory(unstacked, x, stacked).temp_bytes < 4 * SQUARE


def test_a_scan_in_a_scan_carries_its_buffers_through():
    def inner(c, _):
        return lax.fori_loop(0, 3, lambda i, c: lax.dynamic_update_index_in_dim(c, c[0] @ c[1], i, 0), c), None

    alone = predicted_memory(lambda c: inner(c, None)[0].sum(), stacked).temp_bytes
    nested = predicted_memory(lambda c: lax.scan(inner, c, None, length=4)[0].sum(), stacked).temp_bytes
    assert nested == alone


def test_of_a_conds_branches_the_larger_counts():
    def branchy(flag, x):
        return lax.cond(flag, lambda x: (x @ x) @ (x @ x), lambda x: x, x).sum()

    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    # the result, and the product that it is made from, which is made once; beside them the branch's number
    assert predicted_memory(branchy, flag, x).temp_bytes == 2 * SQUARE + 4
    assert (
        predicted_memory(lambda flag, x: lax.cond(flag, lambda x: x, lambda x: x, x).sum(), flag, x).temp_bytes
        <= SQUARE
    )


def test_a_scattered_gradient_is_written_over_what_it_is_added_to():
    table = jax.ShapeDtypeStruct((1000, N), jnp.float32)
    ids = jax.ShapeDtypeStruct((32,), jnp.int32)

    def step(table, ids, x):
        loss = lambda table: ((table[ids] @ x) @ table.T).sum()
        return table - jax.grad(loss)(table)

    nbytes = 1000 * N * 4
    assert nbytes <= predicted_memory(jax.jit(step, donate_argnums=0), table, ids, x).temp_bytes < 2.5 * nbytes


def remat_stack(policy, layers=8):
    def block(h, w):
        return jnp.tanh(h @ w) @ w, None

    def loss(ws, h):
        run = block if policy is None else jax.checkpoint(block, policy=policy, prevent_cse=False)
        return (lax.scan(run, h, ws)[0] ** 2).mean()

    ws = jax.ShapeDtypeStruct((layers, N, N), jnp.float32)
    h = jax.ShapeDtypeStruct((512, N), jnp.float32)
    return predicted_memory(jax.jit(jax.grad(loss)), ws, h)


def test_remat_keeps_less_and_full_remat_one_input_a_layer():
    full = remat_stack(jax.checkpoint_policies.nothing_saveable)
    none = remat_stack(None)
    row = 512 * N * 4
    assert none.temp_bytes - full.temp_bytes >= 8 * row  # at least a stack
    assert full.temp_bytes >= 8 * row
    inputs = [b for b in full.buffers if b.copies == 8 and b.shape == (8, 512, N)]
    assert len(inputs) == 1 and inputs[0].nbytes == 8 * row


def test_the_timeline_and_the_buffers_add_up_to_the_peak():
    for found in (remat_stack(None), remat_stack(jax.checkpoint_policies.nothing_saveable)):
        at = found.peak_step
        assert max(m.alive_bytes for m in found.timeline) == found.peak_bytes
        assert [m.step for m in found.timeline] == list(range(len(found.timeline)))
        results = found.output_bytes - found.alias_bytes
        assert sum(b.nbytes for b in found.alive_at(at)) + results == found.peak_bytes
        assert {m.phase for m in found.timeline} >= {"forward", "backward"}
        assert all(0 <= b.born <= b.dies < len(found.timeline) for b in found.buffers)
        assert any("test_peak.py" in b.source for b in found.buffers)


def test_what_waits_on_the_host_needs_no_device_memory():
    row = 512 * N * 4
    names = {"names_which_can_be_saved": [], "offload_src": "device", "offload_dst": "pinned_host"}
    kept = jax.checkpoint_policies.save_only_these_names("kept")
    offloaded = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_offloaded=["kept"], **names
    )

    def peak(policy):
        def block(h, w):
            return checkpoint_name(jnp.tanh(h @ w), "kept") @ w, None

        def loss(ws, h):
            return (lax.scan(jax.checkpoint(block, policy=policy, prevent_cse=False), h, ws)[0] ** 2).mean()

        ws, h = jax.ShapeDtypeStruct((8, N, N), jnp.float32), jax.ShapeDtypeStruct((512, N), jnp.float32)
        return predicted_memory(jax.jit(jax.grad(loss)), ws, h)

    # 8 layers' values are gone, and of what comes back one layer's is alive at a time
    assert peak(kept).temp_bytes - peak(offloaded).temp_bytes >= 7 * row
    assert abs(peak(offloaded).temp_bytes - peak(jax.checkpoint_policies.nothing_saveable).temp_bytes) <= row


def test_arguments_and_results_on_the_host_are_not_the_devices():
    there = predicted_memory(lambda x: jax.device_put(x @ x, jax.memory.Space.Host), x)
    assert figures(there) == (SQUARE, 0, 0, SQUARE)  # the product is made on the device first


# Matmuls in the program, forward, recomputed, backward: of a layer two, none, four; a loop's body counts once. A layer
# that is run again leaves its last matmul out, as nobody reads that result.
PHASES = {
    "none": (2, 0, 4),
    "full": (2, 1, 4),
    "every_k:2": (2, 3, 8),  # two layers run again, the second of them cut short
    "revolve:2": (4, 3, 4),  # the last layer stands alone; a loop of replays, and each layer's own, cut short
    "mix:2*full,2*none": (4, 1, 8),
}


@pytest.mark.parametrize("spec", PHASES)
def test_a_stacks_phases_are_told_apart_however_deep_its_calls_are(spec):
    layers = stack(lambda w, h: h + jnp.tanh(h @ w) @ w, policies.get(spec), num_layers=4)
    plain = lambda ws, h: (layers(ws, h) ** 2).mean()

    def step(loss, ws, h):
        value, gradient = jax.value_and_grad(loss)(ws, h)
        return ws - 0.1 * gradient, value

    ws, h = jax.ShapeDtypeStruct((4, N, N), jnp.float32), jax.ShapeDtypeStruct((256, N), jnp.float32)
    for loss in (plain, jax.jit(plain), jax.jit(lambda *args: jax.jit(plain)(*args))):
        timeline = predicted_memory(jax.jit(partial(step, loss)), ws, h).timeline
        matmuls = [m.phase for m in timeline if m.operation == "dot_general"]
        assert tuple(matmuls.count(phase) for phase in ("forward", "recompute", "backward")) == PHASES[spec]
        assert "forward" not in matmuls[PHASES[spec][0] :] and matmuls[-1] == "backward"
        phases = [m.phase for m in timeline]
        last = len(phases) - phases[::-1].index("backward")
        assert "update" not in phases[:last] and "update" in phases[last:]


@pytest.mark.parametrize("version, used", [("0.13.5", "0.12.0.1"), ("0.11.0", "0.10.2"), ("0.9.1", "0.10.2")])
def test_a_jax_that_nobody_calibrated_is_announced_once(version, used):
    with pytest.warns(UserWarning, match=f"not calibrated for jax {version}, .* rules for jax {used};") as caught:
        found = [predicted_memory(jnp.sin, x, jax_version=version) for _ in range(2)]
    assert len(caught) == 1 and {peak.calibrated_on for peak in found} == {used}


@pytest.mark.parametrize("version", ["0.10.2", "0.12.0.1", "0.12.7"])
def test_it_names_its_jax_and_its_assumptions(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = predicted_memory(jnp.sin, x, jax_version=version)
    assert found.calibrated_on.split(".")[:2] == version.split(".")[:2] and found.assumptions == ASSUMPTIONS


def test_donate_beyond_the_arguments_is_refused():
    with pytest.raises(ValueError, match=r"donate: expected positions of the 1 arguments.*got \[3\]"):
        predicted_memory(jnp.sin, x, donate=[3])


@jax.custom_jvp
def softplus(x):
    return jnp.log1p(jnp.exp(x))


softplus.defjvp(lambda primals, tangents: (softplus(*primals), jax.nn.sigmoid(*primals) * tangents[0]))

ANY = {
    "fft": lambda x: jnp.fft.fft(x).real,
    "sort": lambda x: jnp.sort(x) + jnp.cumsum(x, 0),
    "convolution": lambda x: lax.conv(x[None, None], jnp.ones((1, 1, 3, 3)), (1, 1), "SAME"),
    "cholesky": lambda x: jnp.linalg.cholesky(x @ x.T),
    "svd": lambda x: jnp.linalg.svd(x)[1],
    "random": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    "while": lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] @ x), (0, x)),
    "switch": lambda x: lax.switch(2, [jnp.sin, jnp.cos, lambda x: x @ x], x),
    "custom_jvp": jax.grad(lambda x: softplus(x).sum()),
    "vmap": jax.vmap(lambda row: row[:, None] * row[None, :]),
    "top_k": lambda x: lax.top_k(x, 3),
    "map": lambda x: lax.map(lambda row: jnp.outer(row, row) @ x, x),
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x),
    "identity": lambda x: x,
    "constant": lambda x: jnp.ones((3, 3)),
    "nested remat": jax.grad(lambda x: jax.checkpoint(lambda x: jax.checkpoint(jnp.sin)(x @ x).sum())(x)),
    "jit in jit": jax.jit(lambda x: jax.jit(lambda y: y @ y)(x) + jax.jit(jnp.sin)(x)),
    "hessian": jax.hessian(lambda x: (x[0] ** 3).sum()),
}


@pytest.mark.parametrize("name", ANY)
def test_any_function_is_predicted(name):
    found = predicted_memory(ANY[name], x)
    out = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(ANY[name], x)))
    assert found.output_bytes - out in range(64)
    assert found.peak_bytes >= found.argument_bytes and found.temp_bytes >= 0


def test_a_deep_models_step_is_predicted_in_seconds():
    start = time.process_time()
    remat_stack(jax.checkpoint_policies.nothing_saveable, layers=32)
    assert time.process_time() - start < 2


def test_a_stack_that_is_a_result_is_counted_once():
    """Gradients of scanned weights are written where they are handed back, zeros and all."""
    ws, x = jax.ShapeDtypeStruct((8, N, N), jnp.float32), jax.ShapeDtypeStruct((16, N), jnp.float32)
    layers = lambda ws, x: jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0].sum()
    found = predicted_memory(jax.grad(layers), ws, x)
    assert found.output_bytes == 8 * N * N * 4
    kept = 3 * 8 * 16 * N * 4  # the carry, its tanh and what its derivative is made of, of each layer
    assert found.temp_bytes - kept < 4 * N * N * 4  # a few matrices of one layer, not a second stack of eight
