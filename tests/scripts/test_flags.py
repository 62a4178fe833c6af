"""Every script speaks of the same step where nothing is said, and says which in its --help."""

import errno
from itertools import product
from pathlib import Path

import pytest

from scripts import bench, estimate, explain, plan, train
from scripts.benchmark.config import Bench, cases
from scripts.estimating.config import Estimate, understood
from scripts.explaining.config import Explain
from scripts.flags import check_file, check_folder
from scripts.planning.config import Planning
from scripts.training.config import Run


def test_the_same_batch_attention_and_dtype():
    (case,) = cases(Bench(policies=("full",)))
    asked, planned, explained, trained = Estimate(), Planning().case, Explain(), Run()
    assert {asked.step.batch, planned.batch, explained.batch, case.batch, trained.batch} == {8}
    models = (asked.model, planned, explained.model, case, trained.model)
    assert {model.attention for model in models} == {"dot"}
    assert {model.compute_dtype for model in models[:-1]} == {"bfloat16"}
    assert (asked.model.model, planned.model, explained.model.model) == ("gpt2",) * 3
    assert (case.model, trained.model.model) == ("tiny",) * 2
    assert (understood(asked).run.batch, understood(asked).run.seq) == (8, 1024)


@pytest.mark.parametrize(("devices", "batch"), [(1, 8), (4, 8), (6, 12), (16, 16)])
def test_a_plans_batch_is_a_multiple_of_its_devices(devices, batch):
    planning = Planning(devices=devices)
    planning.check()
    assert planning.case.batch == batch


@pytest.mark.parametrize("script", [bench, estimate, explain, plan, train])
def test_help_says_the_defaults(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    model = "tiny" if script in (bench, train) else "gpt2"
    for flag in (f"(default: {model})", "(default: dot)", "next multiple" if script is plan else "(default: 8)"):
        assert flag in said, flag


@pytest.mark.parametrize(("name", "there"), product(("json", "out"), (True, False)))
def test_a_file_that_cannot_be_written_is_refused_by_its_flag(name, there, tmp_path):
    path = tmp_path if there else tmp_path / "no" / "rows.json"
    said = "expected a file, got a folder" if there else "does not exist"
    with pytest.raises(ValueError, match=f"{name}: .*{said}"):
        check_file(name, path)
    check_file(name, tmp_path / "rows.json")
    check_file(name, None)


@pytest.mark.parametrize("flags", ["--out {}/p.json", "--json {}/all.json", "--plot {}", "--plot {}/new/er"])
def test_a_folder_that_takes_no_file_is_refused_before_the_work(flags, tmp_path, monkeypatch, capsys):
    def refused(folder):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr("scripts.flags.probe", refused)  # root may write anywhere
    monkeypatch.setattr("scripts.plan._run", lambda flags: pytest.fail("the work began"))
    assert plan.main(flags.format(tmp_path).split()) == 2
    name = flags.split()[0].removeprefix("--")
    assert capsys.readouterr().err == f"plan: error: {name}: cannot write in {tmp_path}: Permission denied\n"
    assert not list(tmp_path.iterdir())


def test_a_folder_for_pictures_may_be_new_but_is_no_file(tmp_path):
    check_folder("plot", tmp_path / "new")
    check_folder("plot", None)
    (tmp_path / "file").touch()
    for path in ("file", "file/below"):
        with pytest.raises(ValueError, match=r"plot: expected a folder, got a file: .*file$"):
            check_folder("plot", tmp_path / path)


def test_what_is_no_regular_file_is_written_to_as_it_stands(monkeypatch):
    monkeypatch.setattr("scripts.flags.probe", lambda folder: pytest.fail("nothing is put beside a device"))
    check_file("json", Path("/dev/null"))
