"""Figures that stand in the documents are the ones in the files that they name."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "choosing-a-policy.md").read_text()


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
