"""The ways in which checkpointing goes wrong in PyTorch, each reproduced, and the same thing done here."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")

import torch._functorch.config as functorch
import torch.nn.functional as F
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import jremat
import policies
from jremat.estimator.decoder.layers import dropout
from jremat.policy import FULL, NONE, tag
from scripts.compare.torch_kept import kept

X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)


def test_a_reentrant_checkpoint_of_frozen_inputs_gives_no_gradient_there_and_the_right_one_here():
    weight, head = (torch.tensor(w).requires_grad_() for w in (W, W))
    layer = lambda x: torch.tanh(x @ weight)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        out = checkpoint(layer, torch.tensor(X), use_reentrant=True) @ head
    out.sum().backward()
    assert weight.grad is None
    assert head.grad is not None

    def loss(w, head, x, remat=lambda f: f):
        return (remat(lambda w, x: jnp.tanh(x @ w))(w, x) @ head).sum()

    ours = jax.grad(loss)(W, W, X, lambda f: jremat.checkpoint(f, FULL))
    assert np.abs(ours).max() > 0.1
    np.testing.assert_allclose(ours, jax.grad(loss)(W, W, X), rtol=1e-6)


def test_batch_norms_statistics_move_twice_there_and_once_here():
    def statistics(run):
        norm = torch.nn.BatchNorm1d(8)
        run(norm, torch.tensor(X).requires_grad_()).square().sum().backward()
        return norm.num_batches_tracked.item(), norm.running_mean.norm().item()

    once = statistics(lambda norm, x: norm(x))
    twice = statistics(lambda norm, x: checkpoint(norm, x, use_reentrant=False))
    assert (once[0], twice[0]) == (1, 2)
    assert twice[1] == pytest.approx(1.9 * once[1], rel=1e-4)  # momentum 0.1: a share 0.1, then 0.1 of what is left

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.tanh(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))

    def moved(block):
        module = block()
        variables = module.init(jax.random.key(0), X)

        def loss(params):
            out, new = module.apply(
                {"params": params, "batch_stats": variables["batch_stats"]}, X, mutable=["batch_stats"]
            )
            return jnp.square(out).sum(), new

        (_, new), gradient = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        return jax.tree.leaves(new["batch_stats"]), jax.tree.leaves(gradient)

    for ours, plain in zip(moved(jremat.remat(Block, FULL)), moved(Block), strict=True):
        assert all(np.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(ours, plain, strict=True))
    assert np.linalg.norm(moved(Block)[0][0]) == pytest.approx(once[1], rel=1e-4)


def test_a_value_that_is_also_held_elsewhere_is_kept_whatever_the_checkpoint_says():
    weight = torch.tensor(W).requires_grad_()
    held = []

    def block(x, hold):
        up = x @ weight
        if hold:
            held.append(up)
        return torch.sin(torch.sin(up))

    def bytes_kept(hold, run):
        held.clear()
        x = torch.tensor(X).requires_grad_()
        return sum(row.bytes for row in kept(lambda tag: run(block, x, hold)))

    bare, remat = (lambda f, *args: f(*args)), (lambda f, *args: checkpoint(f, *args, use_reentrant=False))
    assert [bytes_kept(False, run) for run in (bare, remat)] == [2 * X.nbytes, 0]
    assert bytes_kept(True, remat) == X.nbytes

    def pair(x, w):
        up = tag(x @ w, "up")
        return jnp.sin(jnp.sin(up)), up

    def ours(hold, policy):
        def loss(x, w):
            out, up = jremat.checkpoint(pair, policy)(x, w)
            return out.sum() + (jnp.square(up).sum() if hold else 0.0)

        return jremat.residuals(loss, X, W).total_bytes

    assert ours(False, FULL) == 0
    assert ours(True, FULL) == X.nbytes
    assert ours(False, NONE) == 2 * X.nbytes  # the two cosines


def test_a_checkpoint_whose_output_another_reads_saves_nothing_and_here_the_lint_says_so():
    """``exp`` keeps its output, which the matmul behind it keeps anyway: a checkpoint around it adds its input."""
    weight = torch.tensor(W).requires_grad_()

    def theirs(run):
        x = torch.tensor(X).requires_grad_()
        return sum(row.bytes for row in kept(lambda tag: run(torch.exp, x @ weight) @ weight))

    bare, remat = (lambda f, x: f(x)), (lambda f, x: checkpoint(f, x, use_reentrant=False))
    assert [theirs(run) for run in (bare, remat)] == [X.nbytes, 2 * X.nbytes]

    def part(run):
        return lambda x, w: run(jnp.exp)(x @ w) @ w

    ours = part(lambda f: jremat.checkpoint(f, FULL))
    plain = part(lambda f: f)
    assert [jremat.residuals(f, X, W).total_bytes for f in (plain, ours)] == [X.nbytes, 2 * X.nbytes]
    [finding] = jremat.lint(ours, X, W)
    assert finding.rule == "saves-nothing"
    assert "the remat saves nothing: what its body makes is kept by others that read it" in finding.message
    assert f"({X.nbytes} bytes more)" in finding.message
    assert finding.place.startswith("test_failures.py:")
    # Its cure: the value left out for all its readers.
    whole = jremat.checkpoint(lambda x, w: tag(jnp.exp(x @ w), "act") @ w, policies.get("but:act"))
    assert jremat.lint(whole, X, W) == ()
    assert jremat.residuals(whole, X, W).total_bytes == 0  # nothing is kept in its place: the matmul runs again
    assert jremat.residuals(jremat.checkpoint(plain, FULL), X, W).total_bytes == 0


def test_a_memory_budget_draws_dropouts_mask_again_there_and_here_it_comes_from_its_key():
    """https://github.com/pytorch/pytorch/issues/190758, open and in 2.13.0."""

    def theirs(budget):
        torch.manual_seed(0)
        x = torch.ones(1000, requires_grad=True)
        block = lambda x: F.dropout(torch.sin(x), 0.5).square()
        as_it_is = lambda module, inputs: make_boxed_func(module.forward)
        run = aot_function(block, as_it_is, as_it_is, partition_fn=min_cut_rematerialization_partition)
        with functorch.patch(activation_memory_budget=budget, activation_memory_budget_runtime_estimator="flops"):
            out = run(x)
        out.sum().backward()
        return out.detach(), x.grad

    (out, right), (same, wrong) = theirs(1.0), theirs(0.0)
    assert torch.equal(out, same)
    assert (wrong - right).norm() / right.norm() > 0.5

    def ours(share):
        block = lambda x, key: jnp.square(dropout(jnp.sin(x), key, 0.5))
        x, key = jnp.ones(1000), jax.random.key(0)
        policy = policies.get(f"budget:{share}").resolve(block, x, key, num_layers=1, target="cpu")
        return jax.grad(lambda x: jremat.checkpoint(block, policy)(x, key).sum())(x)

    np.testing.assert_array_equal(ours(0), ours(1))
    assert 0.4 < float((ours(0) == 0).mean()) < 0.6


def test_dropout_without_saved_generators_replays_another_mask_there_and_the_same_one_here():
    def gradient(**how):
        torch.manual_seed(0)
        x = torch.ones(1000, requires_grad=True)
        run = lambda x: F.dropout(torch.sin(x), 0.5).square()
        out = checkpoint(run, x, use_reentrant=False, **how) if how else run(x)
        out.sum().backward()
        return out.detach(), x.grad

    out, right = gradient()
    same, wrong = gradient(preserve_rng_state=False)
    assert torch.equal(out, same)
    assert (wrong - right).norm() / right.norm() > 0.5
    assert torch.equal(gradient(preserve_rng_state=True)[1], right)

    def ours(policy):
        f = lambda x, key: jnp.square(dropout(jnp.sin(x), key, 0.5))
        run = f if policy is None else jremat.checkpoint(f, policy)
        return jax.grad(lambda x: run(x, jax.random.key(0)).sum())(jnp.ones(1000))

    np.testing.assert_array_equal(ours(FULL), ours(None))
    assert 0.4 < float((ours(None) == 0).mean()) < 0.6


def test_an_impure_function_passes_in_silence_there_and_is_traced_once_here():
    calls = []

    def impure(x, sin):
        calls.append(None)
        return sin(x * len(calls))

    x = torch.tensor(1.0, requires_grad=True)
    checkpoint(impure, x, torch.sin, use_reentrant=False).backward()
    assert x.grad.item() == pytest.approx(math.cos(2.0), abs=1e-6)  # of sin(2x)'s outer factor; cos(1) is right
    calls.clear()
    slope = jax.grad(lambda x: jremat.checkpoint(lambda x: impure(x, jnp.sin), FULL)(x))(1.0)
    assert (len(calls), float(slope)) == (1, pytest.approx(math.cos(1.0), abs=1e-6))


def test_what_a_sac_list_keeps_stays_on_the_device_under_save_on_cpu_there_and_moves_here():
    """The checkpoint's hooks stand inside the outer ones, and the list's cache is behind both."""
    matmul = torch.ops.aten.mm.default
    contexts = lambda: create_selective_checkpoint_contexts([matmul])
    wide = np.random.default_rng(2).standard_normal((8, 24)).astype(np.float32)
    weight, x = torch.tensor(wide).requires_grad_(), torch.tensor(X).requires_grad_()
    block = lambda x: torch.sin(torch.sin(x @ weight))
    moved, runs = [], []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            runs.append(func is matmul)
            return func(*args, **(kwargs or {}))

    def to_host(t):
        moved.append(tuple(t.shape))
        return t.cpu()

    with torch.autograd.graph.saved_tensors_hooks(to_host, lambda t: t):
        out = checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum()
    with Counted():
        out.backward()
    assert sum(runs) == 2  # the matmul's two gradients: its own output was kept
    assert (4, 24) not in moved

    def ours(x, w):
        return jnp.sin(jnp.sin(x @ w)).sum()

    found = jremat.residuals(ours, X, wide, policy=policies.get("offload_dots"))
    assert (found.host_bytes, found.device_bytes) == (4 * 24 * 4, 0)
