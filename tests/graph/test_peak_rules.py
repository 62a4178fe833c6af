"""The rules of the traced peak one by one, on programs so small that kernels and bytes can be told by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jremat.estimator.decoder.loss import cross_entropy
from jremat.graph import liveness, order
from jremat.graph.arguments import take_apart
from jremat.graph.operations import Computation
from jremat.graph.peak import predicted_memory
from jremat.graph.read_kernels import read_program
from jremat.graph.rules import rules_for
from jremat.graph.trace import capture
from jremat.jax_internals import live

N = 64
SQUARE = N * N * 4  # bytes of a float32 [64, 64]


def shape(*axes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(axes, dtype)


x = shape(N, N)


def kernels(f, *args, version="0.10.2"):
    return computation(f, *args, version=version).kernels


def computation(f, *args, version="0.10.2") -> Computation:
    return read_program(live(capture(take_apart(f, args, {})).jaxpr), rules_for(version))


def named(found, name):
    return [kernel for kernel in found if kernel.op.name == name]


def in_order(*places):
    """The kernels outside of loops in that order, those inside as they stand."""
    return lambda c: [c.kernels[k] for k in places] if len(c.kernels) == len(places) else c.kernels


def test_of_two_orders_the_one_that_xla_expects_less_of_is_run():
    """XLA counts what a loop carries twice where the loop starts, so it may well take the order that needs more."""

    def f(big, wide, w):
        carried = lax.scan(lambda c, _: (jnp.tanh(c), None), big @ w, None, length=3)[0]
        return carried.sum() + ((wide @ w).T @ wide).sum()

    found = computation(f, shape(4 * N, N), shape(3 * N, N), x)
    names = ["dot_general", "scan", "reduce_sum", "dot_general", "dot_general", "reduce_sum", "add", "result"]
    assert [kernel.op.name for kernel in found.kernels] == names
    after = in_order(0, 1, 3, 4, 2, 5, 6, 7)  # the other product while the loop's result waits: 4 + 3 + 1 squares
    before = in_order(3, 4, 0, 1, 2, 5, 6, 7)  # one square waits while the loop goes over four in place
    squares = {
        order: (run.peak_bytes // SQUARE, run.estimate_bytes // SQUARE)
        for order in (after, before)
        for run in [liveness.run(found, order, results_apart=True)]
    }
    assert squares == {after: (4 + 3 + 1, 2 * 4), before: (1 + 4, 1 + 2 * 4)}
    for orders in ([after, before], [before, after]):
        assert liveness.best(found, orders).peak_bytes // SQUARE == 8


@pytest.mark.parametrize(("rows", "written"), [(65_536, True), (65_537, False)])
def test_exponentials_of_few_rows_that_three_kernels_read_are_written(rows, written):
    def f(x, w):
        x = jnp.swapaxes(w @ x, -1, -2)  # as it lies in memory, columns are reduced
        e = jnp.exp(x - x.max(-1, keepdims=True))
        return (e / e.sum(-1, keepdims=True)) @ w, (e * x).sum(0), (e * x * x).sum(-1)

    found = kernels(f, shape(1, 16, rows), shape(1, 16, 16))
    assert len(named(found, "exp")) == written
    two = lambda x, w: f(x, w)[0]  # the sum and the quotient
    assert not named(kernels(two, shape(1, 16, rows), shape(1, 16, 16)), "exp")


def test_a_float32_matmul_that_only_adds_to_what_is_handed_in_has_no_result_of_its_own():
    grows = jax.jit(lambda total, x: total + x @ x, donate_argnums=0)
    assert predicted_memory(grows, x, x).temp_bytes == 0
    assert [kernel.op.name for kernel in kernels(grows.__wrapped__, x, x)] == ["dot_general", "result"]
    half = shape(N, N, dtype=jnp.bfloat16)  # rounded before it is added
    assert predicted_memory(grows, half, half).temp_bytes == SQUARE // 2
    scaled = jax.jit(lambda total, x: total + 2 * (x @ x), donate_argnums=0)
    assert predicted_memory(scaled, x, x).temp_bytes == SQUARE
    made = lambda y, x: y @ y + x @ x  # neither summand is handed in
    assert len(named(kernels(made, x, x), "dot_general")) == 2 and named(kernels(made, x, x), "add")


def test_a_loss_is_taken_as_soon_as_its_log_sum_exp_is_there():
    tokens = shape(4, 128, dtype=jnp.int32)
    hidden, table = shape(4, 128, N, dtype=jnp.bfloat16), shape(N, 1024, dtype=jnp.bfloat16)

    def step(hidden, table, tokens):
        return jax.value_and_grad(lambda table: cross_entropy(hidden @ table, tokens).mean())(table)

    found = kernels(step, hidden, table, tokens)
    (logits,) = named(found, "dot_general")[0].writes
    rows = [kernel for kernel in found if [v.aval.size for v in kernel.writes] == [4 * 128, 4 * 128]]
    assert len(rows) == 1 and logits in rows[0].reads  # one kernel writes the log-sum-exp and each token's loss
    # so logits are read for the last time by their gradient, not by a gather after it
    assert [kernel.op.name for kernel in found if logits in kernel.reads][-1] == "convert_element_type"


def test_copies_in_two_layouts_are_made_in_one_kernel():
    def f(x, w, k):
        kept = jnp.sin(jnp.einsum("bsh,hnd->bsnd", x, w))
        turned = jnp.transpose(kept, (0, 2, 3, 1))  # three axes change places: no matmul can read that
        return jnp.einsum("bnds,bsk->bndk", turned, k), jnp.einsum("bnds,bnjs->bdj", turned, turned)

    found = kernels(f, shape(2, 1024, N), shape(N, 4, N), shape(2, 1024, 8))
    (copies,) = named(found, "relaid")
    nbytes = 2 * 1024 * 4 * N * 4
    assert [value.nbytes for value in copies.writes] == [nbytes] * 3 and len(copies.reads) == 1


@pytest.mark.parametrize("version", ["0.10.2", "0.12.0.1"])
def test_readers_of_a_matmuls_result_are_not_joined(version):
    def f(x):
        product = x @ x
        return jnp.sin(product), product * 2

    readers = [kernel for kernel in kernels(f, x, version=version) if kernel.op.name in ("sin", "mul")]
    assert [len(kernel.writes) for kernel in readers] == [1, 1]
    plain = lambda x: (jnp.sin(x), x * 2)  # of anything else they are joined
    assert [len(kernel.writes) for kernel in kernels(plain, x, version=version) if kernel.writes] == [2]


@pytest.mark.parametrize(("rows", "width", "written"), [(4096, 64, False), (8192, 64, True), (4096, 8192, True)])
def test_an_activation_of_few_rows_is_taken_twice(rows, width, written):
    def f(x, w):
        a = jnp.tanh(x)
        return (a * x) @ w, (a * a) @ w

    found = kernels(f, shape(rows, width), shape(width, 8))
    assert len(named(found, "tanh")) == written


def test_an_activation_waits_for_a_reader_that_comes_after_another():
    """As in a replay of two layers, where the first one's is read forward, and again backward after the second's."""

    def f(x, w):
        a = jnp.tanh(x)
        forward = (a * x) @ w
        return (a * a * jnp.sin(forward)) @ w

    assert len(named(kernels(f, shape(4096, 128), shape(128, 128)), "tanh")) == 1


def test_a_loop_of_one_turn_is_no_loop():
    """XLA unrolls it: what it carries isn't held twice, and its stack of one slice is that slice."""

    def f(x, w):
        turn = lambda c, w: (jnp.sin(c @ w), c @ c)
        return lax.scan(turn, x, w[None])

    unrolled = lambda x, w: (jnp.sin(x @ w), (x @ x)[None])
    found = kernels(f, x, x)
    assert not named(found, "scan") and [k.op.name for k in found] == [k.op.name for k in kernels(unrolled, x, x)]
    of = lambda g: predicted_memory(jax.jit(g), x, x, jax_version="0.10.2").peak_bytes
    assert of(f) == of(unrolled) == 5 * SQUARE + 16  # two arguments, a product to take the sine of, two results' table


def test_random_bits_are_made_by_the_one_kernel_that_their_readers_become():
    def dropped(x, w, key):
        bits = jax.random.bits(key, x.shape)
        return jnp.where(bits < 5, x, 0) @ w, bits < 7

    big, key = shape(1024, 1024), jax.eval_shape(lambda: jax.random.key(0))
    found = kernels(dropped, big, big, key)
    assert not named(found, "random_bits")
    assert [len(kernel.writes) for kernel in named(found, "select_n")] == [2], "what is masked, and the other mask"


def test_a_loop_of_no_turn_hands_on_what_it_is_given():
    f = lambda x, w: lax.scan(lambda c, w: (c @ w, c), x, w)[0]
    found = predicted_memory(f, x, shape(0, N, N), jax_version="0.10.2")
    assert (found.temp_bytes, found.peak_bytes) == (0, 2 * SQUARE)


def halves(w, x):
    a, b = jnp.split(x @ w, 2, -1)
    return x + jnp.sin(a) * b


def test_every_result_of_an_operation_that_is_done_twice_is_known():
    """The rerun of a remat without barriers repeats the split: both of its results stand for those of the first."""
    remat = jax.checkpoint(halves, prevent_cse=False)
    step = lambda f: jax.grad(lambda w, x: f(w, x).sum())
    again, once = (predicted_memory(step(f), shape(64, 128), shape(32, 64)) for f in (remat, halves))
    assert again.peak_bytes == once.peak_bytes


def test_each_part_of_a_split_is_fused_into_what_reads_it():
    found = predicted_memory(lambda x: sum(jnp.sin(part) for part in jnp.split(x, 2, -1)), shape(256, 512))
    assert found.temp_bytes == 0


def test_a_split_sum_that_is_done_twice_is_its_whole_both_times():
    a, b = shape(64, 1 << 14), shape(1 << 14, 64)
    once = predicted_memory(lambda a, b: jnp.sin(a @ b) @ (a @ a.T), a, b)
    twice = predicted_memory(lambda a, b: jnp.sin(a @ b) @ (a @ a.T) + 0 * (a @ b), a, b)
    assert once.temp_bytes == twice.temp_bytes


@pytest.mark.parametrize("version, blocks", [("0.10.2", 3), ("0.12.0", 1)])
def test_the_stacks_of_unrolled_replays_are_zeroed_together_by_the_older_compiler(version, blocks):
    block = jax.checkpoint(lambda x: lax.scan(lambda c, _: (c + jnp.sin(jnp.cos(c)), None), x, None, length=50)[0])
    found = predicted_memory(jax.grad(lambda x: block(block(block(x))).sum()), x, jax_version=version)
    stack = 2 * 50 * SQUARE  # sin and cos of each turn
    assert blocks * stack <= found.temp_bytes < (blocks + 0.5) * stack


@pytest.mark.parametrize(
    "summed, rows, columns, parts",
    [(4096, 256, 256, 16), (8192, 256, 256, 32), (4096, 512, 512, 8), (16384, 128, 128, 64), (4096, 64, 64, 32),
     (1024, 64, 64, 16), (1024, 512, 512, 4), (16384, 64, 64, 64), (8192, 768, 768, 4), (2048, 768, 3072, 1)],
)  # fmt: skip
def test_a_long_sum_is_split_as_it_is_compiled(summed, rows, columns, parts):
    [matmul] = named(kernels(lambda a, b: a.T @ b, shape(summed, rows), shape(summed, columns)), "dot_general")
    assert matmul.writes[0].nbytes == parts * rows * columns * 4


def test_of_branches_by_platform_the_gpus_alone_is_read():
    """``jnp.diag`` has a branch for a TPU's kernels: on a GPU it is a sum along rows, fused."""
    found = predicted_memory(lambda x: jnp.diag(x @ x), shape(512, 512))
    assert (
        found.temp_bytes == predicted_memory(lambda x: jnp.sum(jnp.eye(512) * (x @ x), 0), shape(512, 512)).temp_bytes
    )


@pytest.mark.parametrize(("turned", "keys", "arrays"), [(False, 1024, 2), (True, 512, 1), (False, 1 << 15, 1)])
def test_scores_outlive_the_kernel_that_reduces_their_rows(turned, keys, arrays):
    """Rows as they lie, and not too long, are reduced in the kernel that subtracts their maximum: it writes anew."""

    def f(x, w):
        scores = x @ w  # in a batch of one, so that the matmul can't read its operands swapped
        return jax.nn.softmax(jnp.swapaxes(scores, -1, -2) if turned else scores) @ jnp.swapaxes(w, -1, -2)

    args = shape(1, 512, N), shape(1, N, keys)
    softmax = next(kernel for kernel in kernels(f, *args) if kernel.op.name == "div")
    assert [len(taken) for taken in softmax.shares] == [2 - arrays]
    assert predicted_memory(f, *args).temp_bytes // (512 * keys * 4) == arrays


@pytest.mark.parametrize(("version", "first"), [("0.10.2", "dot_general"), ("0.12.0.1", "scan")])
def test_a_loop_waits_only_where_xla_counts_what_goes_round_in_it_as_made(version, first):
    def f(big, wide):  # the product makes one square, the loop goes over four in place
        return lax.scan(lambda c, _: (jnp.tanh(c), None), big, None, length=3)[0].sum() + (wide.T @ wide).sum()

    found = computation(f, shape(4 * N, N), shape(3 * N, N), version=version)
    names = [kernel.op.name for kernel in order.greedy(found)]
    assert next(name for name in names if name in ("scan", "dot_general")) == first


def test_a_second_scheduler_runs_each_kernel_as_late_as_it_can():
    found = computation(lambda x, w: (x @ w) @ ((w @ x) @ x), x, x)
    early, one, two, last, result = order.as_written(found)
    assert [kernel.op.name for kernel in (early, one, two, last)] == ["dot_general"] * 4
    assert order.late(order.as_written)(found) == [one, early, two, last, result]
