"""The planner's command line: a plan that other scripts run, and one line for what is refused."""

import json
from pathlib import Path

import pytest

from scripts.plan import main

SMALL = "--model tiny --target cpu --layers 3 --seq 32 --batch 2 --attention dot --compute-dtype float32".split()  # noqa: SIM905

REFUSED = {
    "unknown flag": ("--batsh 2", "did you mean --batch"),
    "unknown model": ("--model tinny", "no size 'tinny'"),
    "unknown target": ("--target h20", "'h20' is unknown; near: h200"),
    "unknown policy": ("--named dots_savable", "did you mean 'dots_saveable'?"),
    "a request beside the answer": ("--named auto", "named: 'auto' is what the planner is asked"),
    "no memory": ("--target cpu", "memory of target 'cpu' is unknown"),
    "no unit": ("--hbm 80", "hbm: size: expected a number and a unit"),
    "seconds without a chip": ("--target cpu --hbm 1GiB --objective seconds", "no chip of the table"),
    "negative": ("--batch -1", "batch: expected at least 0, got -1"),
    "odd batch": ("--devices 8 --batch 3", "batch: expected a multiple of the 8 devices, got 3"),
    "margin": ("--margin 1", "margin: expected a share from 0 to 1"),
    "beyond the context": ("--model gpt2 --seq 4096", "gpt2 takes at most 1024 tokens, got 4096"),
    "two sizes at once": ("--largest-batch --largest-seq", "can be chosen at a time"),
    "measured elsewhere": ("--measure --target h200", "takes --target local"),
    "no such tag": ("--target cpu --hbm 1GiB --keep routr", "keep: expected tags of this function"),
    "json nowhere": ("--json nowhere/out.json", "nowhere does not exist"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_said_in_one_line(case, capsys):
    line, message = REFUSED[case]
    assert main(line.split()) == 2
    told = capsys.readouterr()
    assert message in told.err and told.err.count("\n") == 1 and told.err.startswith("plan: error: ")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A plan with room to spare, its files and what was printed."""
    folder = tmp_path_factory.mktemp("plan")
    files = ["--out", str(folder / "plan.json"), "--json", str(folder / "all.json"), "--plot", str(folder)]
    code = main([*SMALL, "--hbm", "19MiB", "--margin", "0", "--named", "full", "none", *files])
    return code, folder, json.loads((folder / "all.json").read_text())


def test_the_plan_fits_and_stands_beside_the_named_policies(run):
    code, folder, figures = run
    assert code == 0
    assert figures["peak_bytes"] <= figures["hbm_bytes"] == 19 * 2**20
    assert [row["plan"] for row in figures["beside"]] == ["full", "none"]
    peaks = [row["predicted_peak_bytes"] for row in figures["frontier"]]
    assert peaks == sorted(peaks, reverse=True)
    full, none = figures["beside"]
    assert none["recompute_flops"] == 0 < full["recompute_flops"]
    assert (folder / "frontier.png").stat().st_size > 1000 and (folder / "frontier.svg").exists()


def test_the_saved_plan_runs_in_the_benchmark(run, tmp_path):
    from scripts.benchmark.config import Case
    from scripts.benchmark.measure import row

    _, folder, figures = run
    same = {"seq": 32, "layers": 3, "compute_dtype": "float32", "compile_only": True}
    found = row(Case("tiny", f"plan:{folder / 'plan.json'}", "cpu", 2, **same))
    assert found["peak_bytes"] == figures["peak_bytes"], "the compiler's figure for the very same step"
    assert found["recompute_flops"] == figures["recompute_flops"]


def test_nothing_fits_says_what_would_help(capsys):
    assert main([*SMALL, "--hbm", "1MiB", "--named", "full"]) == 1
    told = capsys.readouterr()
    assert "nothing fits in" in told.err and "more" in told.err
    assert "fit" in told.out


def test_the_largest_batch_is_chosen_with_its_plan(capsys, tmp_path):
    json_file = tmp_path / "b.json"
    found = main([*SMALL, "--hbm", "40MiB", "--largest-batch", "--named", "full", "--json", str(json_file)])
    assert found == 0
    figures = json.loads(json_file.read_text())
    assert figures["peak_bytes"] <= 0.95 * 40 * 2**20
    assert figures["case"]["batch"] >= 4
    assert "does not fit" in capsys.readouterr().out


def test_the_flags_have_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0 and "--largest-batch" in capsys.readouterr().out


def test_nothing_is_written_where_nothing_comes_of_it(tmp_path):
    assert main([*SMALL, "--hbm", "1MiB", "--named", "full", "--out", str(tmp_path / "plan.json")]) == 1
    assert not list(Path(tmp_path).iterdir())
