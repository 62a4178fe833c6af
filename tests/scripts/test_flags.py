"""Every script speaks of the same step where nothing is said, and says which in its --help."""

import ast
import contextlib
import dataclasses
import errno
import inspect
import itertools
import re
import textwrap
import typing
from pathlib import Path

import pytest

import jremat.__main__
import jremat.command.explain as installed
import policies.__main__
from jremat.policy.files import check_file, check_folder
from scripts import bench, compare_torch, estimate, explain, plan, train
from scripts.benchmark.build import config_of
from scripts.benchmark.config import Bench, cases
from scripts.compare.config import Compare
from scripts.estimating.config import Estimate, understood
from scripts.explaining.config import Explain
from scripts.planning.config import Planning
from scripts.training.architecture import architecture
from scripts.training.config import Run


def test_the_same_batch_attention_and_dtype():
    (case,) = cases(Bench(policies=("full",)))
    asked, planned, explained, trained = Estimate(), Planning().case, Explain(), Run()
    assert {asked.step.batch, planned.batch, explained.batch, case.batch, trained.batch} == {8}
    models = (asked.model, planned, explained.model, case, trained.model)
    assert {model.attention for model in models} == {"dot"}
    assert {model.compute_dtype for model in models} == {"auto"}
    assert (asked.model.model, planned.model, explained.model.model) == ("gpt2",) * 3
    assert (case.model, trained.model.model) == ("tiny",) * 2
    assert (understood(asked).run.batch, understood(asked).run.seq) == (8, 1024)


def test_where_nothing_is_said_a_cpu_computes_in_float32_and_all_else_in_bfloat16():
    on = lambda target: config_of(next(cases(Bench(policies=("full",), target=(target,))))).compute_dtype
    assert (on("cpu"), on("h200"), on("v5e")) == ("float32", "bfloat16", "bfloat16")
    assert understood(Estimate()).run.config.compute_dtype == "bfloat16"
    assert architecture(Run().model, None, "cpu").compute_dtype == "float32"
    assert architecture(Run().model, None, "gpu").compute_dtype == "bfloat16"


CONFIGS = {"bench": Bench, "compare_torch": Compare, "estimate": Estimate, "explain": Explain, "plan": Planning,
           "train": Run, "jremat explain": installed.Explain}  # fmt: skip
# Where a script's own job gives a flag another default, or the word another meaning. All else is one and the same.
OWN_DEFAULT = {
    "policy": "the only policy, or those that are compared",
    "policies": "the policies that stand beside one another",
    "model": "what runs here is tiny",
    "seq": "training is over soon",
    "batch": "the comparison's own small model, as its width; a plan's is a multiple of its devices",
    **dict.fromkeys(("layers", "hidden", "heads", "vocab-size"), "the comparison's own small model"),
    "target": "a benchmark runs here, a plan is for a large GPU",
}
OWN_MEANING = {
    ("layers", "jremat explain"): "of a stack of the function",
    ("policy", "jremat explain"): "optional there",
    ("steps", "bench"): "timed ones",
    ("steps", "compare_torch"): "timed ones",
    ("out", "plan"): "the plan's file; a run's folder in train",
    ("largest-batch", "plan"): "the fastest one, not the largest of a policy",
}


def flags_of(config) -> dict[str, tuple[str, object, str]]:
    """Flag -> its type (of one, where it takes several), default and help."""
    hints = typing.get_type_hints(config, include_extras=True)
    docs = docs_of(config)
    found = {}
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            found |= flags_of(hint)
            continue
        told = getattr(hint, "__metadata__", ())
        kind = typing.get_args(hint)[0] if told else hint
        optional = [arg for arg in typing.get_args(kind) if arg is not type(None)]
        kind = optional[0] if typing.get_origin(kind) is not typing.Literal and optional else kind
        name = next((one.name for one in told if getattr(one, "name", None)), field.name.replace("_", "-"))
        text = next((one.help for one in told if getattr(one, "help", None)), docs.get(field.name, ""))
        found[name] = str(kind), field.default, text
    return found


def docs_of(config) -> dict[str, str]:
    """Field -> the string below it."""
    found = {}
    for kind in reversed(config.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
        for field, doc in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                found[field.target.id] = " ".join(str(doc.value.value).split())
    return found


def test_a_flag_of_several_scripts_has_one_type_one_default_and_one_help():
    seen: dict[str, dict[str, tuple[str, object, str]]] = {}
    for script, config in CONFIGS.items():
        for name, flag in flags_of(config).items():
            if (name, script) not in OWN_MEANING:
                seen.setdefault(name, {})[script] = flag
    shared = {name: scripts for name, scripts in seen.items() if len(scripts) > 1}
    assert {
        "batch",
        "seq",
        "layers",
        "attention",
        "compute-dtype",
        "hbm",
        "json",
        "plot",
        "vocab-size",
    } <= shared.keys()
    for name, scripts in shared.items():
        kinds, defaults, helps = (set(map(str, column)) for column in zip(*scripts.values(), strict=True))
        assert len(kinds) == len(helps) == 1 and all(helps), (name, scripts)
        assert len(defaults) == 1 or name in OWN_DEFAULT, (name, scripts)


@pytest.mark.parametrize("main", [*(s.main for s in (bench, compare_torch, estimate, explain, plan, train)),
                                  installed.main])  # fmt: skip
def test_no_default_is_an_empty_word(main, capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert not re.search(r"\(default: (''|\"\"|None)?\s*\)", out)


@pytest.mark.parametrize("main", [*(s.main for s in (bench, compare_torch, estimate, explain, plan, train)),
                                  installed.main, jremat.__main__.main, policies.__main__.main])  # fmt: skip
def test_help_is_no_wider_than_the_terminal(main, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        main(["--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


NO_USE = [
    (bench, "--suite gpu --policies full", "policies: of no use here"),
    (bench, "--minutes 3", "minutes: of no use without --suite gpu"),
    (bench, "--compile-only --steps 3", "steps: of no use here"),
    (bench, "--target cpu --target-config mine.pbtxt", "target: of no use here"),
    (bench, "--margin 0.2", "margin: only --largest-batch"),
    (compare_torch, "--minutes 3", "minutes: of no use without --device cuda"),
    (estimate, "--plot pictures", "plot: memory against the sequence's length"),
    (estimate, "--model tiny --config config.json", "model: of no use here"),
]


@pytest.mark.parametrize(("script", "flags", "said"), NO_USE)
def test_a_flag_that_would_do_nothing_says_so(script, flags, said, capsys):
    assert script.main(flags.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("script", "flags"), [
    (estimate, "--model tiny --hbm 1MiB"),
    (plan, "--model tiny --layers 2 --batch 1 --seq 32 --target cpu --hbm 1MiB --compiles 0 --named full"),
])  # fmt: skip
def test_nothing_fits_is_exit_code_one(script, flags, capsys):
    assert script.main(flags.split()) == 1


@pytest.mark.parametrize(("script", "flags"), [
    (bench, "--model tiny --policy full --target h200"), (plan, "--model tiny --target h200"),
])  # fmt: skip
def test_a_missing_compiler_is_one_line_with_its_pip_line_before_the_work(script, flags, monkeypatch, capsys):
    monkeypatch.setattr("jremat.measure.targets._exists", lambda module: False)
    assert script.main(flags.split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "pip install --no-deps jax-cuda12-plugin" in err


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


@pytest.mark.parametrize(("name", "there"), [*itertools.product(("json", "out"), (True, False))])
def test_a_file_that_cannot_be_written_is_refused_by_its_flag(name, there, tmp_path):
    path = tmp_path if there else tmp_path / "no" / "rows.json"
    said = "expected a file, got a folder" if there else "no such folder"
    with pytest.raises(ValueError, match=f"{name}: .*{said}"):
        check_file(name, path)
    check_file(name, tmp_path / "rows.json")
    check_file(name, None)


@pytest.mark.parametrize("flags", ["--out {}/p.json", "--json {}/all.json", "--plot {}", "--plot {}/new/er"])
def test_a_folder_that_takes_no_file_is_refused_before_the_work(flags, tmp_path, monkeypatch, capsys):
    def refused(folder):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr("jremat.policy.files.probe", refused)  # root may write anywhere
    monkeypatch.setattr("scripts.plan.start_jax", lambda: pytest.fail("the work began"))
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
    monkeypatch.setattr("jremat.policy.files.probe", lambda folder: pytest.fail("nothing is put beside a device"))
    check_file("json", Path("/dev/null"))
