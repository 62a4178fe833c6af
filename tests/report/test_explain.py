"""Every value explained: bytes and FLOPs as the counters have them, reasons and readers as worked out by hand."""

import jax
import jax.numpy as jnp
import pytest

import jremat
import policies
from jremat.graph.arguments import take_apart
from jremat.policy import tag
from jremat.report.explain import explain, explain_call
from jremat.report.explained import by_segment
from jremat.report.kept_reasons import PolicyRules
from tests.transform.blocks import case

SPECS = ["full", "dots_saveable", "save_only_matmuls", "save:attn_out", "but:mlp_up", "none", "offload:attn_out"]
CASES = [("gpt", "dot"), ("llama", "blockwise")]


def gradient(f):
    return jax.value_and_grad(lambda *args: sum(out.astype(jnp.float32).sum() for out in jax.tree.leaves(f(*args))), 0)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family, attention", CASES)
def test_the_rows_sum_to_what_the_counters_count(spec, family, attention):
    block, policy = case(family, attention), policies.get(spec)
    f, args = block.function(), block.args()
    found = explain(f, *args, policy=policy)
    kept = jremat.residuals(f, *args, policy=policy)
    assert (found.kept_bytes, found.offloaded_bytes) == (kept.device_bytes, kept.host_bytes)
    assert sum(row.bytes for row in found.of("input")) == kept.input_bytes
    rematted = jremat.checkpoint(f, policy)
    total = lambda *args: rematted(*args).astype(jnp.float32).sum()
    counted = jremat.flops(jax.value_and_grad(total, (0, 1)), *args)
    assert found.recompute_flops == counted.recompute
    assert sum(row.recompute_other_flops for row in found) == counted.other.recompute


@pytest.mark.parametrize("spec", ["every_k:2", "mix:2*full,1*none,1*dots_saveable", "alternate:2", "revolve:2"])
def test_plans_sum_up_too_and_each_segment_holds_its_own(spec):
    plan, layers, unit = policies.get(spec), 4, 8 * 16 * 4

    def block(w, x):
        return x + jnp.sin(tag(x @ w, "up"))

    f = jremat.stack(block, plan, num_layers=layers)
    args = jnp.ones((layers, 16, 16)), jnp.ones((8, 16))
    found = explain_call(take_apart(f, args, {}), PolicyRules(plan, layers))
    assert found.kept_bytes == jremat.residuals(f, *args).total_bytes
    counted = jremat.flops(jax.value_and_grad(lambda w, x: f(w, x).sum(), (0, 1)), *args)
    assert found.recompute_flops == counted.recompute
    if spec.startswith("mix"):
        held = {segment.layers: segment for segment in by_segment(found)}
        assert set(held) == {"0-1", "2", "3"}
        # full: the input; none: the input of the matmul and cos of its output; dots: the input and the matmul
        assert [held[layers].kept_bytes // unit for layers in ("0-1", "2", "3")] == [2, 2, 2]
        assert [held[layers].recompute_flops > 0 for layers in ("0-1", "2", "3")] == [True, False, False]
        whys = {row.layers: row.why for row in found.of("kept") if row.value == "layer input"}
        assert whys["0-1"].startswith("required")
        assert {row.why for row in found.of("kept") if row.layers == "3" and row.value == "up"} == {"keeps matmul"}
    if spec == "revolve:2":
        (states,) = {row.why for row in found.of("kept") if row.value == "states of the schedule" and row.shape[1:]}
        assert states == "required: of the 2 states that the schedule runs from"
    if spec == "every_k:2":
        assert {row.why for row in found.of("kept") if row.layers} == {"required: 2 layers are replayed from it"}


def mlp(x, w, v):
    return jnp.sin(tag(x @ w, "up")) @ v


ARGS = jnp.ones((8, 4)), jnp.ones((4, 16)), jnp.ones((16, 4))


def test_a_reason_for_each_rule():
    def why(spec):
        return {row.value: row.why for row in explain(mlp, *ARGS, policy=policies.get(spec)).of("kept", "offloaded")}

    assert why("save:up") == {"up": "named up"}
    assert why("offload:up") == {"up": "named up"}
    assert why("ops:weight_matmul") == {"up": "keeps weight_matmul"}
    assert set(why("but:up").values()) == {"keeps all that it doesn't name"}
    assert set(why("none").values()) == {"no remat here"}
    assert {row.why for row in explain(mlp, *ARGS).of("kept")} == {"the backward pass reads it"}
    inside = jremat.checkpoint(mlp, policies.get("save:up"))
    assert [row.why for row in explain(inside, *ARGS).of("kept")] == ["kept by a policy in the function"]


def test_a_planned_value_says_so():
    graph = jremat.trace(mlp, *ARGS)
    sin = next(op.outputs[0] for op in graph.ops if op.primitive == "sin")
    policy = policies.get("full")
    planned = type(policy)(values=((sin, jremat.Decision.SAVE),), fingerprint=graph.fingerprint)
    (row,) = explain(mlp, *ARGS, policy=planned).of("kept")
    line = mlp.__code__.co_firstlineno + 1
    assert (row.value, row.why, row.read_by) == ("sin", "planned", (f"matmul of test_explain.py:{line}",))


def test_what_is_made_again_costs_what_making_it_costs():
    rows = {row.value: row for row in explain(mlp, *ARGS, policy=policies.get("full")).of("recomputed")}
    assert rows["up"].recompute_flops == 2 * 8 * 4 * 16
    assert rows["sin"].recompute_flops == rows["cos"].recompute_flops == 0
    assert rows["sin"].recompute_other_flops == 8 * 16
    assert rows["up"].bytes == 4 * 8 * 16


def test_steps_on_the_way_are_counted_to_the_value_that_needs_them():
    def f(x, w):
        hidden = jnp.tanh(x @ w)  # no name, and the derivative reads it
        return tag(hidden @ w, "out") ** 2

    found = explain(f, jnp.ones((8, 4)), jnp.ones((4, 4)), policy=policies.get("full"))
    again = {row.value: row.recompute_flops for row in found.of("recomputed")}
    assert again["tanh"] == again["out"] == 2 * 8 * 4 * 4
    assert found.recompute_flops == 2 * again["out"] and found.forward_flops == 2 * again["out"]


def test_readers_are_found_through_casts_and_loops():
    def body(x, w):
        return jnp.sin(x @ w), None

    def f(x, ws):
        y = tag(jnp.cos(x), "start").astype(jnp.bfloat16)
        return jax.lax.scan(body, y, ws)[0]

    found = explain(f, jnp.ones((8, 4)), jnp.ones((3, 4, 4), jnp.bfloat16))
    read = {row.value: row.read_by for row in found.of("kept")}
    assert all(len(readers) == 1 for readers in read.values())
    assert any("matmul of test_explain.py" in readers[0] for readers in read.values())


def test_parts_of_the_models_are_those_of_the_paper_layer():
    block = case("gpt", "dot")
    found = explain(block.function(), *block.args(), policy=policies.get("full"))
    parts = {row.value: row.part for row in found.of("recomputed")}
    assert parts["attn_probs"] == parts["query"] == parts["attn_proj"] == "attention"
    assert parts["mlp_up"] == parts["mlp_act"] == "mlp"
    assert parts["attn_norm"] == parts["mlp_norm"] == "norms"


def test_twins_of_one_line_stay_two_rows():
    def f(x):
        return jnp.sin(jnp.sin(x) * jnp.cos(x)) * jnp.sin(x)

    found = explain(f, jnp.ones(4), policy=policies.get("full"))
    again = sorted(row.value for row in found.of("recomputed"))
    assert again == ["cos"] * 4 + ["sin"] * 4 and all(row.copies == 1 for row in found.of("recomputed"))


def test_a_plan_is_refused_with_the_call_that_takes_it():
    with pytest.raises(ValueError, match=r"jremat\.stack"):
        explain(mlp, *ARGS, policy=policies.get("every_k:2"))
