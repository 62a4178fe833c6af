"""Every rule of the lint finds its own fault in each form in which users write it, and is silent on the clean twin."""

import pytest

from jremat.check import RULES
from tests.check.programs import CLEAN, FAULTS


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
