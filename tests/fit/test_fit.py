"""``jremat.fit``: one line, the same function, another backward pass."""

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest

import jremat
from jremat.fitting.planner import DoesNotFit
from tests.fit.programs import layers, layers_arguments

ARGS = layers_arguments(8, 64, 512)


def planned(f, *args, share=0.6, **options):
    """Fitted into a share of what lies between the arguments and the traced peak."""
    peak = jremat.predicted_memory(jax.value_and_grad(f, has_aux=options.pop("has_aux", False)), *args)
    held = peak.peak_bytes - peak.temp_bytes
    limit = int(held + share * peak.temp_bytes)
    return jremat.fit(f, *args, hbm_bytes=limit, target="cpu", margin=0.0, compiles=0, **options)


def equal(plain, ours):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), plain, ours)


def remats(f, *args):
    text = str(jax.make_jaxpr(f)(*args))
    return text.count("remat2[") + text.count("checkpoint[")


def test_the_same_values_and_gradients_under_every_transformation():
    ours = planned(layers, *ARGS)
    assert any(segment.kept is not None for segment in ours.plan.segments)
    equal(layers(*ARGS), ours(*ARGS))
    equal(jax.jit(jax.grad(layers))(*ARGS), jax.jit(jax.grad(ours))(*ARGS))
    both = [jax.jit(jax.vmap(jax.grad(f), (None, 0)))(ARGS[0], jnp.stack([ARGS[1]] * 2)) for f in (layers, ours)]
    equal(*both)
    assert remats(jax.grad(ours), *ARGS) and not remats(jax.grad(layers), *ARGS)


def test_the_traced_peak_is_within_the_budget_and_more_memory_is_never_slower():
    peak = jremat.predicted_memory(jax.value_and_grad(layers), *ARGS)
    found = [planned(layers, *ARGS, share=share).plan for share in (0.55, 0.7, 0.85, 1.0)]
    for plan in found:
        assert plan.predicted_peak_bytes <= plan.hbm_bytes
        peaks = [point.expected_peak_bytes for point in plan.frontier]
        assert peaks == sorted(peaks, reverse=True), "as time grows, memory falls"
    spent = [plan.seconds for plan in found]
    assert spent == sorted(spent, reverse=True) and spent[0] > 0
    assert found[-1].predicted_peak_bytes <= peak.peak_bytes and found[-1].seconds == 0


def test_the_compiler_confirms_it():
    peak = jremat.compiled_memory(jax.value_and_grad(layers), *ARGS, target="cpu", num_buffers=0)
    ours = jremat.fit(layers, *ARGS, hbm_bytes=peak.peak_bytes, target="cpu", margin=0.0)
    assert ours.plan.peak_bytes <= peak.peak_bytes and ours.plan.compiles >= 1


def test_the_function_is_traced_once():
    calls = []

    def counted(ws, x):
        calls.append(1)
        return layers(ws, x)

    peak = jremat.predicted_memory(jax.value_and_grad(layers), *ARGS)
    ours = jremat.fit(
        counted, *ARGS, hbm_bytes=peak.peak_bytes - peak.temp_bytes // 3, target="cpu", margin=0.0, compiles=0
    )
    step = jax.jit(jax.value_and_grad(ours))
    for _ in range(3):
        ours(*ARGS)
        step(*ARGS)
    assert len(calls) == 1
    assert step._cache_size() == 1


def test_dropout_statistics_and_integers():
    def loss(ws, stats, tokens, key):
        x = ws[0]["up"][tokens]
        means = []
        for k, w in enumerate(ws):
            x = x @ w["down"] @ w["up"] if k else x
            mean = x.mean(0)
            means.append(0.9 * stats[k] + 0.1 * mean)
            x = jnp.tanh(x - mean)
            x = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, k), 0.8, x.shape), x / 0.8, 0.0)
        return jnp.mean(x**2), means

    stats = [jnp.zeros(256)] * 8
    args = ARGS[0], stats, jnp.arange(512) % 64, jax.random.key(3)
    ours = planned(loss, *args, has_aux=True)
    assert remats(jax.grad(ours, has_aux=True), *args)
    equal(*(jax.jit(jax.value_and_grad(f, has_aux=True))(*args) for f in (loss, ours)))


def test_a_choice_by_value_is_made_once():
    def experts(ws, x):
        for w in ws:
            scores, which = jax.lax.top_k(x @ w["up"], 2)
            x = x + jnp.tanh(scores @ w["down"][:2]) * (1 + which.sum(-1, keepdims=True) / 512)
        return jnp.mean(x**2)

    ours = planned(experts, *ARGS, share=0.8)
    assert remats(jax.grad(ours), *ARGS)
    count = lambda f: str(jax.make_jaxpr(jax.grad(f))(*ARGS)).count("top_k[")
    assert count(ours) == count(experts) == 8
    equal(*(jax.jit(jax.grad(f))(*ARGS) for f in (experts, ours)))


def test_a_plan_is_saved_and_read_back(tmp_path):
    ours = planned(layers, *ARGS)
    ours.plan.save(tmp_path / "plan.json")
    again = jremat.fit(layers, *ARGS, plan=tmp_path / "plan.json")
    assert again.plan == ours.plan
    equal(jax.jit(jax.grad(ours))(*ARGS), jax.jit(jax.grad(again))(*ARGS))

    def other(ws, x):
        return layers(ws, jnp.sin(x))

    with pytest.raises(ValueError, match=r"plan: .*the first operation that differs is sin to .* at test_fit.py:\d+"):
        jremat.fit(other, *ARGS, plan=str(tmp_path / "plan.json"))
    (tmp_path / "plan.json").write_text('{"format": "jremat-plan-1"}')
    with pytest.raises(ValueError, match=r"plan: expected .* format 'jremat-fit-1', got 'jremat-plan-1'"):
        jremat.fit(layers, *ARGS, plan=tmp_path / "plan.json")


def test_the_step_of_a_caller_is_what_counts():
    def step_of(loss):
        def step(ws, moments, x):
            gradient = jax.grad(loss)(ws, x)
            moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradient)
            return jax.tree.map(lambda w, m: w - 0.1 * m, ws, moments), moments

        return jax.jit(step, donate_argnums=(0, 1)), (ARGS[0], ARGS[0], ARGS[1])

    peak = jremat.predicted_memory(*(lambda s: (s[0], *s[1]))(step_of(layers)))
    limit = peak.peak_bytes - peak.temp_bytes // 3
    ours = jremat.fit(layers, *ARGS, hbm_bytes=limit, target="cpu", margin=0.0, compiles=0, step=step_of)
    own = jremat.predicted_memory(*(lambda s: (s[0], *s[1]))(step_of(ours)))
    assert own.peak_bytes == ours.plan.predicted_peak_bytes <= limit < peak.peak_bytes


def test_mistakes_are_named():
    fit = lambda *args, **options: jremat.fit(layers, *args, **{"target": "cpu", "compiles": 0, **options})
    with pytest.raises(
        DoesNotFit, match=r"^hbm_bytes: nothing fits in .* the least that was reached is [^\n]*$"
    ) as error:
        fit(*ARGS, hbm_bytes="600KiB")
    equal(error.value.leanest(*ARGS), layers(*ARGS))
    with pytest.raises(ValueError, match="size: expected a number and a unit"):
        fit(*ARGS, hbm_bytes="80 gigs")
    with pytest.raises(ValueError, match="argnums: expected positions of the 2 arguments"):
        fit(*ARGS, hbm_bytes="1GiB", argnums=2)
    ours = fit(*ARGS, hbm_bytes="1GiB")
    with pytest.raises(ValueError, match=r"argument 1: expected float32\[512, 64\] as planned, got float32\[4, 64\]"):
        ours(ARGS[0], jnp.ones((4, 64)))
    with pytest.raises(ValueError, match="arguments: expected"):
        ours(ARGS[0][:2], ARGS[1])

    def loud(ws, x):
        jax.experimental.io_callback(lambda x: None, None, x[0, 0])
        return layers(ws, x)

    with pytest.raises(ValueError, match="f: expected no effect that must happen once, got io_callback"):
        jremat.fit(loud, *ARGS, hbm_bytes="1GiB", target="cpu", compiles=0)
