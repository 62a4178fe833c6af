"""Every rule of the lint finds its own fault in each form in which users write it, and is silent on the clean twin."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jremat
import policies
from jremat.check import RULES
from tests.check.cases import CLEAN, FAULTS
from tests.check.programs import JAX, Case, W, X, deep, every_second, grouped, mlp, two_matmuls


def cases(programs):
    return [
        pytest.param(slug, case, id=f"{slug}-{k}") for slug, each in programs.items() for k, case in enumerate(each)
    ]


def test_every_rule_has_a_fault_and_a_clean_twin():
    assert [rule.slug for rule in RULES] == list(FAULTS) == list(CLEAN)
    assert all(rule.symptom and rule.why and rule.cure for rule in RULES)


@pytest.mark.parametrize("slug, case", cases(FAULTS))
def test_a_rule_finds_its_own_fault_and_nothing_else_does(slug, case):
    found = case.lint()
    assert {finding.rule for finding in found} == {slug}
    for finding in found:
        assert ".py:" in finding.place
        assert finding.message and finding.cure
        assert finding.cost_bytes > 0 or finding.cost_flops > 0
        shown = " ".join(str(finding).split())  # printed in lines of 100 columns
        assert slug in shown and finding.place in shown and finding.cost in shown


@pytest.mark.parametrize("slug, case", cases(CLEAN))
def test_no_rule_fires_on_the_clean_twin(slug, case):
    assert case.lint() == ()


def test_a_group_too_large_is_so_by_the_compilers_count():
    [finding] = jremat.lint(grouped("every_k:8", 16), *deep(16))
    assert finding.cure.startswith("use full")
    temp = {
        spec: jremat.compiled_memory(
            jax.value_and_grad(grouped(spec, 16)), *deep(16), target="cpu", num_buffers=0
        ).temp_bytes
        for spec in ("every_k:8", "full")
    }
    assert finding.cost_bytes == pytest.approx(temp["every_k:8"] - temp["full"], rel=0.01)


def test_flops_and_bytes_are_those_worked_out_by_hand():
    rows, inner = X.shape[0], W.shape[0]
    one_matmul = 2 * rows * inner * inner
    [unknown] = jremat.lint(jax.checkpoint(mlp, policy=JAX.save_only_these_names("upp")), X, W)
    assert unknown.cost_flops == one_matmul  # the first of two; the last is dead in the backward pass
    assert "did you mean 'up'?" in unknown.message
    [mask] = FAULTS["dropout-mask"][0].lint()
    assert mask.cost_bytes == rows * inner  # a byte an element


def test_a_counting_policy_is_told_by_its_matmuls_and_left_as_it_was():
    policy = every_second()
    [finding] = jremat.lint(jax.checkpoint(two_matmuls, policy=policy), X, W)
    assert "of 3 matmuls it keeps 1 (" in finding.message and ", 3 (" in finding.message
    dot = jax.make_jaxpr(jnp.dot)(W, W).eqns[0].primitive
    assert sorted(policy(dot) for _ in range(2)) == [False, True]  # it still counts by one


def test_findings_in_a_scan_are_counted_once_a_turn():
    block = jax.checkpoint(mlp, policy=JAX.save_only_these_names("upp"))
    stacked = jax.ShapeDtypeStruct((6, *W.shape), W.dtype)
    [finding] = jremat.lint(lambda ws, x: jax.lax.scan(lambda x, w: (block(x, w), None), x, ws)[0], stacked, X)
    assert finding.cost_flops == 6 * 2 * X.shape[0] * W.shape[0] ** 2


@pytest.mark.parametrize(
    "policy, message",
    [
        ("full", "policy: expected a policy"),
        (policies.get("every_k:2"), "num_layers: expected the number of layers"),
    ],
)
def test_a_wrong_policy_is_named(policy, message):
    with pytest.raises(ValueError, match=message):
        jremat.lint(mlp, X, W, policy=policy)


@pytest.mark.parametrize("num_layers", ["3", 0, -1, 2.0, True])
def test_a_wrong_number_of_layers_is_named(num_layers):
    for policy in (None, policies.get("full"), policies.get("every_k:2")):
        with pytest.raises(ValueError, match="num_layers: expected a whole number of at least 1, got"):
            jremat.lint(mlp, X, W, policy=policy, num_layers=num_layers)


def test_a_number_of_layers_may_be_numpys():
    args = {"policy": policies.get("every_k:2")}
    block = lambda w, x: mlp(x, w)
    assert jremat.lint(block, W, X, num_layers=np.int64(4), **args) == jremat.lint(block, W, X, num_layers=4, **args)


# -- what is wrong of a whole program is right of one block of a stack -----------------------------------------------


def one_number(w, x):
    return jnp.tanh(jnp.tanh(x * w).sum() * w.sum()).reshape(1)


def scanned(w, x):
    return x + jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=4)[0]


def mapped(w, x):
    return x + jax.lax.map(lambda row: jnp.tanh(jnp.tanh(row @ w) @ w), x)


def turned(w, x):
    return x + jax.lax.fori_loop(0, 4, lambda _, c: jnp.tanh(c @ w), x)


NUMBERS = (jnp.ones(64), jnp.ones(1))


@pytest.mark.parametrize(
    "slug, block, args",
    [
        ("whole-loss", one_number, NUMBERS),
        ("bare-scan-body", scanned, (W, X)),
        ("bare-scan-body", mapped, (W, X)),
        ("bare-scan-body", turned, (W, X)),
    ],
)
def test_a_block_of_a_stack_is_not_taken_for_the_whole(slug, block, args):
    assert slug in {finding.rule for finding in jremat.lint(block, *args, policy=policies.get("full"))}
    own = jax.checkpoint(block)
    assert slug in {finding.rule for finding in jremat.lint(own, *args)}
    for spec in ("full", "every_k:2", "alternate:2"):
        assert slug not in {f.rule for f in jremat.lint(block, *args, policy=policies.get(spec), num_layers=4)}
    assert slug not in {finding.rule for finding in jremat.lint(own, *args, num_layers=4)}


@pytest.mark.parametrize("block", [scanned, mapped, turned])
def test_much_is_saved_by_a_layer_with_a_loop_in_it(block):
    """As the rule would deny: by the predicted peak of a stack of eight."""
    ws = jnp.ones((8, *W.shape))
    step = lambda policy: jax.grad(
        lambda ws, x: jremat.stack(block, policies.get(policy), num_layers=8)(ws, x).sum(), argnums=(0, 1)
    )
    full, none = (jremat.predicted_memory(step(policy), ws, X).temp_bytes for policy in ("full", "none"))
    assert full < 0.7 * none


def test_a_print_is_no_value_that_a_policy_could_keep():
    def printing(x, w):
        jax.debug.print("{}", x)
        return jnp.sin(x @ w) @ w

    case = Case(lambda x, w: jax.checkpoint(printing, policy=JAX.dots_saveable)(x, w), (X, W), third=True)
    assert "side-effect" in {finding.rule for finding in case.lint()}


def test_nothing_that_floats_is_an_error():
    with pytest.raises(ValueError, match="args: expected a floating-point array"):
        jremat.lint(lambda n: n + 1, jnp.arange(3))


def test_the_page_lists_every_rule_in_its_own_words():
    page = (Path(__file__).parents[2] / "docs" / "lint.md").read_text()
    rows = [f"| `{rule.slug}` | {rule.symptom} | {rule.why} | {rule.cure} |" for rule in RULES]
    table = [line for line in page.splitlines() if line.startswith("| `")]
    assert table == rows
