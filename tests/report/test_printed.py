"""Every result prints as a short table: its own figures with units, and how they came about."""

import jax
import jax.numpy as jnp
import pytest

import jremat
import policies
from jremat.estimator.config import TransformerConfig
from jremat.measure import PeakFlops, Timing, check_memory, target, throughput
from jremat.policy import tag


def mlp(x, up, down):
    return jnp.tanh(tag(x @ up, "up")) @ down


def block(w, x):
    return x + jnp.sin(jnp.tanh(x @ w["up"])) @ w["down"]


ARGS = jnp.ones((512, 256)), jnp.ones((256, 1024)), jnp.ones((1024, 256))
LAYER = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}, jnp.ones((512, 64))
SAVE_UP = policies.get("save:up")
STEP = jax.value_and_grad(lambda *args: jremat.checkpoint(mlp, SAVE_UP)(*args).sum(), (0, 1, 2))
MISTYPED = jax.checkpoint(mlp, policy=jax.checkpoint_policies.save_only_these_names("upp"))


def planned(**options):
    return jremat.plan(block, *LAYER, num_layers=12, hbm_bytes=12 * 2**20, target="cpu", **options)


def whole_step(plan):
    run = jremat.stack(block, plan, num_layers=12)
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((12, *leaf.shape), leaf.dtype), LAYER[0])
    return jax.grad(lambda w, x: run(w, x).sum()), (stacked, LAYER[1])


CONFIG = TransformerConfig(
    vocab_size=256, num_layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, mlp_hidden=256, max_seq=64
)
RESULTS = {
    "plan": (planned, ("MiB, compiled for cpu", "predicted", "layers only", "tanh  ", " layers  on the device")),
    "prediction": (lambda: planned(compiles=0), ("predicted, not compiled", "of the layers' forward matmul FLOPs")),
    "plan of a function": (
        lambda: jremat.plan(mlp, *ARGS, hbm_bytes=2**30, target="cpu"),
        ("this function's gradient only", "of the function's forward matmul FLOPs"),
    ),
    "frontier": (lambda: planned().frontier, ("MiB expected", "recomputes", "peak of the step")),
    "point": (lambda: planned().frontier[0], ("MiB expected", "recomputes 0 FLOP", "none")),
    "kept": (lambda: planned().kept[0], ("tanh  ", " MiB  in ", " layers  on the device")),
    "residuals": (lambda: jremat.residuals(mlp, *ARGS), ("bytes", "2,097,152", "4,194,304  bytes kept in 2 values")),
    "flops": (lambda: jremat.flops(STEP, *ARGS), ("GFLOP", "in 6 matmuls", "0.0% of the model's matmul FLOPs")),
    "memory": (lambda: jremat.compiled_memory(STEP, *ARGS, target="h200"), ("MiB", "compiled for h200, not run")),
    "memory here": (lambda: jremat.compiled_memory(STEP, *ARGS, target="cpu"), ("MiB", "compiled for cpu")),
    "fits": (lambda: check_memory(STEP, *ARGS, target="h200"), ("fits in 132.8 GiB", "compiled for h200, not run")),
    "traced peak": (lambda: jremat.predicted_memory(STEP, *ARGS), ("MiB", "predicted", "not compiled", "up")),
    "trace": (lambda: jremat.trace(mlp, *ARGS), ("537 MFLOP", "up", "2.0 MiB")),
    "ledger": (
        lambda: jremat.estimate(CONFIG, policies.get("full"), batch=2, seq=64),
        ("bytes at the peak", "predicted"),
    ),
    "lint": (lambda: jremat.lint(MISTYPED, *ARGS), ("'upp'", "costs 2.68e+08 FLOPs", "cure")),
    "no findings": (lambda: jremat.lint(mlp, *ARGS), ("no findings",)),
    "replay": (lambda: jremat.replay(mlp, *ARGS, policy=SAVE_UP), ("equal bit for bit", "recomputed")),
    "explanation": (
        lambda: jremat.explain(mlp, *ARGS, policy=SAVE_UP),
        ("bytes kept", "of the forward's matmul FLOPs"),
    ),
    "zoo": (policies.table, ("dots_saveable", "every_k:K", "keeps")),
    "entry": (lambda: policies.table()[0], ("everything_saveable", "keeps", "recomputes")),
    "target": (lambda: target("h200x8"), ("h200x8: cuda, 8 devices of 139.8 GiB, described",)),
    "timing": (lambda: Timing(1.5, (0.25,)), ("step 250.0 ms measured", "first call 1.50 s")),
    "throughput": (
        lambda: throughput(
            Timing(1, (2.0,)),
            tokens=8,
            model_flops=60,
            model_flops_half=50,
            total_flops=80,
            peak=PeakFlops(1e14, "a100"),
        ),
        ("4  of all devices", "100 TFLOP/s (a100)", "measured"),
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_prints_what_it_found(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    make, words = RESULTS[name]
    found = make()
    shown = str(found)
    assert [word for word in words if word not in shown] == [], shown
    assert max(map(len, shown.splitlines())) <= 100
    assert f"{type(found).__name__}(" not in shown and "planned values" not in shown
    assert repr(found) == shown


def test_only_a_plan_of_layers_alone_lists_what_it_leaves_out():
    alone, whole = planned(), planned(step=whole_step)
    assert "layers only: the optimizer's state" in str(alone) and not alone.whole_step
    assert "not counted" not in str(whole) and whole.whole_step and whole.not_counted == ""
    with pytest.raises(ValueError, match="layers only: the optimizer's state"):
        jremat.plan(block, *LAYER, num_layers=12, hbm_bytes=2**20, target="cpu")


def test_a_planned_policy_prints_the_largest_values_that_it_keeps():
    plan = planned()
    assert plan.policy.spec.endswith(f"rest*[{plan.kept[0].name}]") and plan.needs_file
