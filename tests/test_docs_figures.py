"""Figures that stand in the documents are the ones in the files that they name."""

import json
import re
import statistics
from pathlib import Path

import pytest

from benchmarks import estimate_peak, estimate_peak_devices

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "choosing-a-policy.md").read_text()
LIMITS = " ".join((ROOT / "docs" / "limits.md").read_text().split())


@pytest.mark.parametrize("file", ["gpt2_h200.json", "llama1b_h200.json"])
def test_the_guides_table_is_the_benchmarks(file):
    rows = {row["policy"]: row for row in json.loads((ROOT / "benchmarks" / file).read_text())}
    (section,) = re.findall(rf"\(`benchmarks/{file}`\).*?\n\n((?:\|[^\n]*\n)+)", GUIDE, re.DOTALL)
    told = re.findall(r"\| `(.+?)` \| ([\d.]+) \| ([\d.]+)% \|", section)
    assert {policy for policy, _, _ in told} == rows.keys()
    for policy, peak, share in told:
        row = rows[policy]
        assert peak == f"{row['peak_bytes'] / 2**30:.1f}", policy
        assert share == f"{100 * row['recompute_flops'] / row['model_flops']:.1f}", policy
    assert [float(peak) for _, peak, _ in told] == sorted((float(peak) for _, peak, _ in told), reverse=True)


def test_state_of_the_llama_is_what_its_table_says():
    row = json.loads((ROOT / "benchmarks" / "llama1b_h200.json").read_text())[0]
    (told,) = re.findall(r"([\d.]+) GiB of the peak are\s+parameters and optimizer state", GUIDE)
    assert told == f"{row['argument_bytes'] / 2**30:.1f}"


def told(errors):
    """Median, most under and most over, as the documents write them."""
    return tuple(f"{100 * n:.1f}" for n in (statistics.median(map(abs, errors)), -min(errors), max(errors)))


def test_the_estimates_errors_are_the_benchmarks():
    (pinned, *newest) = (re.search(pattern, LIMITS).groups() for pattern in (
        r"with 0\.10\.2 by ([\d.]+)% in the median, the worst by ([\d.]+)% under and ([\d.]+)% over",
        r"with 0\.12\.0\.1 by ([\d.]+)%, ([\d.]+)%\s+and ([\d.]+)%",
    ))  # fmt: skip
    counts = re.search(r"Of (\d+) train steps .*? of (\d+) of these steps", LIMITS).groups()
    for version, said, count in zip(("0.10.2", "0.12.0.1"), (pinned, *newest), counts):
        found = json.loads(estimate_peak.results(version).read_text())
        cases = [case for case in estimate_peak.cases() if case.key in found]
        assert len(cases) == int(count)
        assert told([estimate_peak.ours(case, version) / found[case.key]["peak_bytes"] - 1 for case in cases]) == said


def test_the_ledgers_errors_on_several_devices_are_the_benchmarks():
    pattern = (
        r"of the peaks of (\d+) steps the median is missed by ([\d.]+)%, the worst by ([\d.]+)% under and ([\d.]+)%"
    )
    count, *said = re.search(pattern, LIMITS).groups()
    found = json.loads(estimate_peak_devices.FILE.read_text())
    errors = [
        estimate_peak_devices.ledger_of(c).peak_bytes / found[c.key]["peak_bytes"] - 1
        for c in estimate_peak_devices.cases()
    ]
    assert len(errors) == int(count) and told(errors) == tuple(said)
