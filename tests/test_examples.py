"""The newcomer's example runs as its first line says, and its numbers are those worked out by hand."""

import math
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = "docs/examples/your_model.py"

# The example's sizes: 4 layers of [512, 256] with an inner width of 1024, float32.
INNER_MIB = 4 * 512 * 1024 * 4 / 2**20
UP, DOWN = 1, 1  # matmuls of one layer's forward; each costs two more in the backward pass


def ran(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def printed() -> str:
    """What the example prints, in at most 20 seconds of processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = ran(EXAMPLE)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20
    return said


@pytest.mark.parametrize("section", ["Linen", "NNX", "A plain function, stacked"])
def test_each_kind_of_model_keeps_and_recomputes_what_the_policy_says(printed, section):
    [body] = re.findall(rf"^{section}\n((?:  .*\n)+)", printed, re.MULTILINE)
    rows = re.findall(r"^  (\S+) +keeps +([\d.]+) MiB, recomputes +([\d.]+)%$", body, re.MULTILINE)
    kept = {spec: float(mib) for spec, mib, _ in rows}
    again = {spec: float(percent) for spec, _, percent in rows}
    assert list(kept) == ["none", "save:up", "full"]
    assert kept["save:up"] - kept["full"] == INNER_MIB
    assert kept["none"] > 4 * kept["save:up"]
    # full makes each layer's first matmul again; the second one's result is never read
    assert again == {"none": 0, "save:up": 0, "full": round(100 * UP / (3 * (UP + DOWN)), 1)}


def test_a_misspelt_name_is_an_error_that_names_the_right_one(printed):
    assert "'save:upp' names 'upp' (did you mean 'up'?)" in printed


def test_the_plan_fits_its_budget_and_runs(printed):
    [budget] = re.findall(r"^The best for \d+ layers under (\d+) MiB", printed, re.MULTILINE)
    [peak] = re.findall(r"^  peak +([\d.]+) MiB, compiled for cpu", printed, re.MULTILINE)
    assert 0.5 * float(budget) < float(peak) <= 0.95 * float(budget)
    assert "not counted" not in printed  # the whole step is planned
    [loss] = re.findall(r"run: loss (\d+\.\d+)", printed)
    assert abs(float(loss) - math.log(2048)) < 0.1  # small weights give each of 2,048 tokens the same probability


def commands() -> list[str]:
    """The command lines in the example's first words."""
    words = (ROOT / EXAMPLE).read_text().split('"""')[1].replace("\\\\\n", " ")
    return re.findall(r"^ +jremat (.*)$", words, re.MULTILINE)


@pytest.mark.parametrize("line", commands())
def test_the_explanations_that_it_points_to(line):
    said = ran("-m", "jremat", *shlex.split(line))
    assert re.search(r"\bup +kept +f32\[512,1024\]", said)


def test_there_are_commands_to_try():
    assert len(commands()) == 2
