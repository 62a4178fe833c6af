"""One step: the mean over micro-batches, the optimizer, the FLOPs, and the same losses under every policy."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jremat
import policies
from models.config import get
from models.remat import remat, resolved
from models.transformer import Transformer, init_params, mean_loss
from scripts.training.config import Model, Optimizer, Run, Text
from scripts.training.cost import model_flops
from scripts.training.data import Batches, standard_library
from scripts.training.optimizer import decayed, optimizer, schedule
from scripts.training.step import accumulated, initial_state, train_step

CONFIG = replace(
    get("tiny"), num_layers=3, hidden=16, heads=2, kv_heads=2, head_dim=8, mlp_hidden=64, max_seq=16, dropout=0.1
)
QUICK = {"xla_backend_optimization_level": 0}  # compiles in a third of the time; nothing here is timed
RUN = Run(steps=50, model=Model(), text=Text(seq=16, micro_batch=2, accumulate=2), optimizer=Optimizer())


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(0))


def tokens(step: int = 0) -> np.ndarray:
    """[accumulate, micro_batch, seq + 1] of the standard library."""
    return Batches(standard_library(), 16, 0).train(step, 4).reshape(2, 2, 17)


def test_accumulated_gradients_are_the_large_batchs(params) -> None:
    model = Transformer(replace(CONFIG, dropout=0.0))
    loss = lambda params, batch, _: mean_loss(model, params, batch[:, :-1], batch[:, 1:])
    batch = jnp.asarray(tokens())
    value, grads = jax.jit(lambda p: accumulated(loss, p, batch), compiler_options=QUICK)(params)
    whole, whole_grads = jax.jit(lambda p: accumulated(loss, p, batch.reshape(1, 4, 17)), compiler_options=QUICK)(
        params
    )
    np.testing.assert_allclose(value, whole, rtol=1e-6)
    chex.assert_trees_all_close(grads, whole_grads, rtol=1e-4, atol=1e-7)


def test_accumulation_sums_in_float32_and_numbers_the_micro_batches() -> None:
    batches = jnp.arange(6.0).reshape(3, 2)
    loss = lambda w, batch, i: (w.astype(jnp.float32) * batch).mean() + i
    value, grad = accumulated(loss, jnp.bfloat16(1.0), batches)
    assert value == 2.5 + 1 and grad == 2.5 and grad.dtype == jnp.bfloat16  # the mean of 0..5, and of 0, 1, 2
    inside = str(jax.make_jaxpr(lambda w: accumulated(loss, w, batches))(jnp.bfloat16(1.0)))
    assert "scan[" in inside and "length=3" in inside


def test_the_learning_rate_rises_to_its_top_and_falls_to_its_last() -> None:
    run = Run(steps=40, optimizer=Optimizer(learning_rate=2.0, final_rate=0.25, warmup_steps=4))
    rate = jax.vmap(schedule(run))(jnp.arange(60))
    np.testing.assert_allclose(
        rate[:5], [0.5, 1.0, 1.5, 2.0, 2 * (0.25 + 0.75 * (1 + np.cos(np.pi / 36)) / 2)], rtol=1e-6
    )
    np.testing.assert_allclose(rate[39:], 0.5, rtol=1e-6)  # the last step's, and whatever comes after
    assert (np.diff(rate[3:40]) < 0).all()
    without = schedule(Run(steps=4, optimizer=Optimizer(learning_rate=2.0, warmup_steps=0)))
    assert without(jnp.int32(0)) < 2.0 and jnp.isfinite(without(jnp.int32(0)))


def test_biases_and_norms_do_not_decay(params) -> None:
    mask = jax.tree_util.tree_leaves_with_path(decayed(params))
    kept = {jax.tree_util.keystr(path, simple=True, separator="/") for path, decays in mask if not decays}
    assert all(name.endswith(("bias", "scale")) for name in kept)
    assert {name for name in kept if "attn_norm" in name} == {"blocks/attn_norm/scale", "blocks/attn_norm/bias"}
    assert all(decays for path, decays in mask if path[-1].key in ("kernel", "token_embedding"))


def test_one_update_is_adamws_by_hand() -> None:
    run = Run(
        steps=10, optimizer=Optimizer(learning_rate=0.1, final_rate=1.0, warmup_steps=0, weight_decay=0.5, clip=1e9)
    )
    weights = {"kernel": jnp.array([2.0]), "bias": jnp.array([2.0])}
    adamw = optimizer(run)
    updates, _ = adamw.update({"kernel": jnp.array([3.0]), "bias": jnp.array([3.0])}, adamw.init(weights), weights)
    # The first step of Adam is the gradient's sign; decay adds rate * 0.5 * weight on the kernel alone.
    np.testing.assert_allclose(updates["kernel"], [-0.1 - 0.1 * 0.5 * 2.0], rtol=1e-5)
    np.testing.assert_allclose(updates["bias"], [-0.1], rtol=1e-5)


def test_the_gradient_is_clipped_by_its_global_norm() -> None:
    run = Run(steps=10, optimizer=Optimizer(clip=1.0))
    clip = optimizer(run)
    weights = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    _, state = clip.update({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, clip.init(weights), weights)
    mean = jax.tree.leaves(state[1][0].mu)  # (1 - beta1) of the clipped gradient
    np.testing.assert_allclose(np.concatenate(mean), [0.1 * 0.6, 0.1 * 0.8], rtol=1e-6)


@pytest.mark.parametrize("name", ["tiny", "tiny-llama"])
def test_model_flops_are_those_counted_on_the_program(name: str) -> None:
    config = replace(get(name), num_layers=2, dropout=0.0)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    batch = jax.ShapeDtypeStruct((3, 16), jnp.int32)
    loss = lambda params, x, y: mean_loss(Transformer(config), params, x, y)
    counted = jremat.flops(jax.value_and_grad(loss), params, batch, batch)
    closed = model_flops(config, tokens=48, seq=16)
    assert (closed.full, closed.half) == (counted.model, counted.model_half)
    assert counted.recompute == 0


@pytest.mark.parametrize(("num_layers", "held"), [(3, False), (1, True)])
def test_a_scans_replay_is_held_apart_only_where_it_is_unrolled(num_layers: int, held: bool) -> None:
    config = replace(CONFIG, num_layers=num_layers, dropout=0.0)
    model = remat(policies.get("full"), config, "scan").model(config)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    batch = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    text = str(jax.make_jaxpr(jax.grad(lambda params, x: mean_loss(model, params, x, x)))(params, batch))
    assert f"prevent_cse={held}" in text
    assert f"prevent_cse={not held}" not in text


def losses(spec: str, steps: int, stack: str = "auto", config=CONFIG, run: Run = RUN, options=QUICK) -> np.ndarray:
    """The loss of each step under a policy, float32 [steps]."""
    plan = resolved(policies.get(spec), config, run.text.micro_batch, run.text.seq, stack)
    adamw = optimizer(run)
    step = jax.jit(train_step(plan.model(config), adamw, run.seed), donate_argnums=0, compiler_options=options)
    state = jax.jit(lambda: initial_state(init_params(config, jax.random.key(run.seed)), adamw))()
    batches = Batches(standard_library(), run.text.seq, run.seed)
    shape = (run.text.accumulate, run.text.micro_batch, run.text.seq + 1)
    seen = []
    for i in range(steps):
        state, metrics = step(state, batches.train(i, run.batch).reshape(shape))
        seen.append(float(metrics.loss))
    return np.array(seen, np.float32)


@pytest.fixture(scope="module")
def bare() -> np.ndarray:
    """50 steps without remat, dropout on."""
    return losses("none", 50)


@pytest.mark.parametrize(
    ("spec", "stack"),
    [
        ("save:attn_out,mlp_up", "scan"),
        ("mix:1*full,rest*dots_saveable", "chain"),
    ],
)
def test_the_loss_curve_is_the_same_under_every_policy(bare: np.ndarray, spec: str, stack: str) -> None:
    """To 1e-5, not to the bit: XLA fuses a recomputed value with other neighbours than a kept one, so sums round
    otherwise, and fifty updates carry that on."""
    np.testing.assert_allclose(losses(spec, 50, stack), bare, rtol=1e-5)


def test_the_curve_is_learned_and_dropout_is_on(bare: np.ndarray) -> None:
    assert bare[-5:].mean() < bare[:5].mean() - 0.25
    undropped = losses("none", 1, config=replace(CONFIG, dropout=0.0))
    assert abs(undropped[0] - bare[0]) > 1e-4


def test_each_micro_batch_drops_values_of_its_own(params) -> None:
    same = jnp.asarray(np.repeat(tokens()[:1], 2, axis=0))  # two equal micro-batches
    model, key = Transformer(CONFIG), jax.random.key(0)
    loss = lambda params, batch, i: mean_loss(model, params, batch[:, :-1], batch[:, 1:], jax.random.fold_in(key, i))
    alone = jax.jit(loss, compiler_options=QUICK)
    one = [float(alone(params, same[i], i)) for i in range(2)]
    assert one[0] != one[1]
    both, _ = jax.jit(lambda p: accumulated(loss, p, same), compiler_options=QUICK)(params)
    np.testing.assert_allclose(both, np.mean(one), rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    "spec", ["full", "dots_saveable", "dots_with_no_batch_dims_saveable", "selective", "every_k:2"]
)
def test_the_default_models_curve_is_the_same_under_every_policy(spec: str) -> None:
    config, run = get("tiny"), Run(steps=50)
    bare = losses("none", 50, config=config, run=run, options=None)
    np.testing.assert_allclose(losses(spec, 50, config=config, run=run, options=None), bare, rtol=1e-5)
