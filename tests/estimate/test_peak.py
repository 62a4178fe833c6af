"""The estimate's peak against the compiler's, as the benchmark recorded it."""

import json
import statistics

import pytest

from benchmarks import estimate_peak as benchmark


@pytest.fixture(scope="module")
def errors():
    found = json.loads(benchmark.results(benchmark.CALIBRATED).read_text())
    cases = [case for case in benchmark.cases() if case.key in found]
    assert len({case.key for case in cases}) == len(cases) >= 60
    return [(case, benchmark.ours(case) / found[case.key]["peak_bytes"] - 1) for case in cases]


def test_every_recorded_peak_is_met(errors):
    assert {case.key: error for case, error in errors if abs(error) > 0.06} == {}
    assert statistics.median(abs(error) for _, error in errors) < 0.005


def test_the_newest_compilers_peaks_are_met_too():
    newest = "0.12.0.1"
    found = json.loads(benchmark.results(newest).read_text())
    errors = {
        case.key: benchmark.ours(case, newest) / found[case.key]["peak_bytes"] - 1
        for case in benchmark.cases()
        if case.key in found
    }
    assert len(errors) > 70 and {key: error for key, error in errors.items() if abs(error) > 0.12} == {}
    assert statistics.median(map(abs, errors.values())) < 0.012


def test_the_peak_rests_on_all_parts(errors):
    """State alone, or state and what is kept, would miss by far more."""
    found = json.loads(benchmark.results(benchmark.CALIBRATED).read_text())
    by_arguments = [1 - found[case.key]["argument_bytes"] / found[case.key]["peak_bytes"] for case, _ in errors]
    assert statistics.median(by_arguments) > 0.4


def test_no_other_formula_is_nearer_on_any_kind_of_policy(errors):
    """Although each is taken at its best setting for each case, on top of the state that the program does hold."""
    found = json.loads(benchmark.results(benchmark.CALIBRATED).read_text())
    for kind in benchmark.KINDS:
        of_kind = [(case, error) for case, error in errors if benchmark.kind_of(case) == kind]
        assert len(of_kind) > 10
        own = [abs(error) for _, error in of_kind]
        for formula in benchmark.FORMULAS.values():
            theirs = [benchmark.nearest(case, found[case.key]["peak_bytes"], formula) for case, _ in of_kind]
            assert statistics.median(own) < statistics.median(theirs) and max(own) < max(theirs)
