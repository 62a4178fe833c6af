"""The estimate's peak against the compiler's, as the benchmark recorded it."""

import json
import re
import statistics
from functools import cache
from pathlib import Path

import pytest

from benchmarks import estimate_peak as benchmark

LIMITS = Path(__file__).parents[2] / "docs" / "limits.md"


@cache
def errors_of(version):
    """Of every step that was compiled with a JAX, by that JAX's rules."""
    found = json.loads(benchmark.results(version).read_text())
    cases = [case for case in benchmark.cases() if case.key in found]
    assert len({case.key for case in cases}) == len(cases) >= 60
    return [(case, benchmark.ours(case, version) / found[case.key]["peak_bytes"] - 1) for case in cases]


@pytest.fixture
def errors():
    return errors_of(benchmark.CALIBRATED)


@pytest.mark.parametrize("version, worst, median", [("0.10.2", 0.06, 0.005), ("0.12.0.1", 0.11, 0.008)])
def test_every_recorded_peak_is_met(version, worst, median):
    errors = errors_of(version)
    assert {case.key: error for case, error in errors if abs(error) > worst} == {}
    assert statistics.median(abs(error) for _, error in errors) < median


def test_the_documents_errors_are_these():
    text = " ".join(LIMITS.read_text().split())
    (pinned, *newest) = (re.search(pattern, text).groups() for pattern in (
        r"with 0\.10\.2 by ([\d.]+)% in the median, the worst by ([\d.]+)% under and ([\d.]+)% over",
        r"with 0\.12\.0\.1 by ([\d.]+)%, ([\d.]+)%\s+and ([\d.]+)%",
    ))  # fmt: skip
    counts = re.search(r"Of (\d+) train steps .*? of (\d+) of these steps", text).groups()
    for version, shown, count in zip(("0.10.2", "0.12.0.1"), (pinned, *newest), counts):
        errors = [error for _, error in errors_of(version)]
        figures = statistics.median(map(abs, errors)), -min(errors), max(errors)
        assert len(errors) == int(count) and tuple(f"{100 * n:.1f}" for n in figures) == shown


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
