"""The script: a model under a policy, explained."""

import json

import pytest

import jremat
from scripts.explain import main
from scripts.explaining.config import Explain, Model
from scripts.explaining.subject import subject

TINY = ("--model", "tiny", "--layers", "4", "--batch", "2", "--seq", "32")


def explained(tmp_path, *argv: str) -> dict:
    path = tmp_path / "out.json"
    assert main([*TINY, *argv, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize("spec", ["full", "save_only_matmuls", "mix:2*full,2*none"])
def test_its_figures_are_the_losss(spec, tmp_path, capsys):
    found = explained(tmp_path, "--policy", spec)
    of = subject(Explain(batch=2, seq=32, model=Model(model="tiny", layers=4)), spec)
    assert found["kept_bytes"] == jremat.residuals(of.forward, *of.args).total_bytes
    parts = {row["part"] for row in found["rows"]}
    assert {"attention", "mlp", "norms", "loss", "embedding", "layer inputs"} <= parts
    assert found["timeline"]["peak_bytes"] > found["kept_bytes"]
    out, err = capsys.readouterr()
    assert err == "" and "predicted" in out and ("segment by segment" in out) == spec.startswith("mix")


def test_a_plan_tells_its_segments(tmp_path):
    found = explained(tmp_path, "--policy", "mix:1*full,2*save:mlp_up,1*none")
    whys = {(row["layers"], row["value"]): row["why"] for row in found["rows"] if row["fate"] == "kept"}
    assert whys["1-2", "mlp_up"] == "named mlp_up"
    assert whys["3", "mlp_up"] == "no remat here"
    assert ("0", "mlp_up") not in whys
    again = {row["layers"] for row in found["rows"] if row["recompute_flops"]}
    assert again == {"0", "1-2"}


def test_two_policies_a_lint_and_a_page(tmp_path, capsys):
    page = tmp_path / "page.html"
    found = explained(tmp_path, "--policy", "dots_saveable", "--against", "full", "--lint", "--html", str(page))
    assert found["against"]["recompute_flops"] > found["recompute_flops"] == 0
    assert found["findings"] == [] and "lint: nothing found" in capsys.readouterr().out
    assert len(page.read_bytes()) < 2_000_000 and page.read_text().count('role="slider"') == 2


def test_files_are_there_before_the_tables_are(tmp_path, monkeypatch):
    def nobody_reads(*_):
        raise BrokenPipeError

    monkeypatch.setattr("rich.console.Console.print", nobody_reads)
    files = tmp_path / "out.json", tmp_path / "page.html"
    with pytest.raises(BrokenPipeError):
        main([*TINY, "--json", str(files[0]), "--html", str(files[1])])
    assert all(file.stat().st_size > 1000 for file in files)


REFUSED = {
    "unknown model": ("--model gtp2", "did you mean 'gpt2'?"),
    "unknown policy": ("--policy fulll", "did you mean 'full'?"),
    "unknown second policy": ("--model tiny --against fulll", "did you mean 'full'?"),
    "beyond the context": ("--model tiny --seq 100000", "seq: expected at most the model's context"),
    "no batch": ("--batch 0", "batch: expected a whole number of at least 1"),
    "no divisor": ("--model tiny --seq 32 --loss-chunk 5", "loss_chunk: expected a divisor of seq=32"),
    "a plan for more layers": ("--model tiny --policy block:7", "names 7 layers, the stack has 6"),
    "unknown flag": ("--polcy full", "did you mean --policy"),
    "json nowhere": ("--json nowhere/out.json", "json: no such folder"),
    "a page that is a folder": ("--html .", "html: expected a file, got a folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_get_one_line_and_write_nothing(case, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags, said = REFUSED[case]
    assert main(flags.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("explain: error: ") and said in err
    assert not list(tmp_path.iterdir())
