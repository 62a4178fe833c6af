"""Every rule of the lint finds its own fault in each form in which users write it, and is silent on the clean twin."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jremat
import policies
from jremat.check import RULES
from tests.check.programs import CLEAN, FAULTS, JAX, W, X, deep, every_second, grouped, mlp, two_matmuls


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
        assert slug in str(finding) and finding.place in str(finding) and finding.cost in str(finding)


@pytest.mark.parametrize("slug, case", cases(CLEAN))
def test_no_rule_fires_on_the_clean_twin(slug, case):
    assert case.lint() == ()


def test_a_group_too_large_is_so_by_the_compilers_count():
    [finding] = jremat.lint(grouped("every_k:8", 16), *deep(16))
    assert finding.cure.startswith("use full")
    temp = {
        spec: jremat.memory(jax.value_and_grad(grouped(spec, 16)), *deep(16), target="cpu", num_buffers=0).temp_bytes
        for spec in ("every_k:8", "full")
    }
    assert finding.cost_bytes == pytest.approx(temp["every_k:8"] - temp["full"], rel=0.5)


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


def test_nothing_that_floats_is_an_error():
    with pytest.raises(ValueError, match="args: expected a floating-point array"):
        jremat.lint(lambda n: n + 1, jnp.arange(3))


def test_the_page_lists_every_rule_in_its_own_words():
    page = (Path(__file__).parents[2] / "docs" / "lint.md").read_text()
    rows = [f"| `{rule.slug}` | {rule.symptom} | {rule.why} | {rule.cure} |" for rule in RULES]
    table = [line for line in page.splitlines() if line.startswith("| `")]
    assert table == rows
