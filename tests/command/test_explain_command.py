"""``jremat explain``: a function of one's own, described or handed over; one line for every mistake."""

import html
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from jremat.__main__ import main
from jremat.terminal.text import printable

ROOT = Path(__file__).parents[2]
MODULE = """
import jax, jax.numpy as jnp
from jremat import tag

def mlp(x, w, v):
    return jnp.sin(tag(x @ w, "up")) @ v

def handed():
    return mlp, (jnp.ones((8, 4)), jnp.ones((4, 16)), jnp.ones((16, 4)))

def scaled(x, w, times, mode="sin"):
    return getattr(jnp, mode)(x @ w) * [1.0, 2.0][times]

def with_names():
    return scaled, (jnp.ones((8, 4)), jnp.ones((4, 4)), 1), {"mode": "cos"}

def layer(w, x):
    return x + jnp.sin(tag(x @ w, "up"))

def nothing():
    return 3

def breaks():
    raise RuntimeError("no data")

number = 3
"""
RAISES = 1 + next(k for k, line in enumerate(MODULE.splitlines()) if "raise" in line)
SHAPES = ("--args", "f32[8,4]", "f32[4,16]", "f32[16,4]")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine_for_explain.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("mine_for_explain", None)


def explained(folder, *argv: str) -> dict:
    path = folder / "out.json"
    assert main(["explain", *argv, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize("place", ["mine_for_explain:mlp", "mine_for_explain.py:mlp"])
def test_a_function_by_module_and_by_file(folder, place, capsys):
    found = explained(folder, place, *SHAPES, "--policy", "save:up", "--against", "full")
    assert found["kept_bytes"] == 4 * 8 * 16 and found["recompute_flops"] == 0
    assert found["against"]["kept_bytes"] == 0 and found["against"]["recompute_flops"] == 2 * 8 * 4 * 16
    assert found["timeline"]["peak_bytes"] == max(p["alive_bytes"] for p in found["timeline"]["points"])
    out, err = capsys.readouterr()
    assert "named up" in out and "what changes from save:up to full" in out and err == ""


def test_a_function_that_hands_over_its_function_and_arguments(folder):
    described = explained(folder, "mine_for_explain:mlp", *SHAPES)
    handed = explained(folder, "mine_for_explain:handed")
    assert handed["rows"] == described["rows"] and handed["kept_bytes"] > 0
    named = explained(folder, "mine_for_explain:with_names")
    assert {row["value"] for row in named["rows"] if row["fate"] == "kept"} >= {"sin"}  # the derivative of cos


TAGS = [
    "mlp[up]",
    "[/b]",
    "[red]",
    "<script>alert(1)</script>",
    "$x_1$",
    ":smile:",
    "\x1b[31mred",
    "a\nb",
    "幅",
    "n" * 120,
]


@pytest.mark.parametrize("tag", TAGS)
def test_a_users_tag_is_text_in_every_table_and_page(tag, folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    (folder / "[b]mine.py").write_text(
        "import jax, jax.numpy as jnp\nfrom jax.ad_checkpoint import checkpoint_name\n"
        f"def f():\n    g = lambda x: jnp.sin(x) * checkpoint_name(x * x, {tag!r})\n    return g, (jnp.ones((8, 4)),)\n"
    )
    assert main(["explain", "[b]mine.py:f", "--html", "[b].html", "--against", "full", "--lint"]) == 0
    out, err = capsys.readouterr()
    shown = printable(tag)
    assert err == "" and shown in "".join(out.replace("\n", "").split()) and "[b]mine.py:f" in out
    assert max(map(cell_len, out.splitlines())) <= 80 and "\x1b" not in out
    page = (folder / "[b].html").read_text()
    assert html.escape(shown) in page and "<script>alert" not in page and "\x1b" not in page


def test_a_mistake_that_names_a_users_text_is_one_plain_line(folder, capsys):
    assert main(["explain", "mine_for_explain:handed", "--policy", "[/b]\x1b[31m\n"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "[/b]" in err and "\x1b" not in err


def test_words_and_numbers_stay_as_they_are(folder):
    found = explained(folder, "mine_for_explain:scaled", "--args", "f32[8,4]", "f32[4,4]", "1", "mode='cos'")
    assert {row["shape"].__len__() for row in found["rows"] if row["fate"] == "input"} == {2}


def test_layers_make_a_stack_of_it(folder, capsys):
    argv = (
        "mine_for_explain:layer",
        "--args",
        "f32[4,4]",
        "f32[8,4]",
        "--layers",
        "6",
        "--policy",
        "mix:4*full,2*none",
    )
    found = explained(folder, *argv)
    layers = {row["layers"] for row in found["rows"] if row["fate"] == "kept"}
    assert {"0-3", "4-5"} <= layers and "segment by segment" in capsys.readouterr().out


def test_findings_are_shown_and_written(folder, capsys):
    (folder / "mine_for_explain.py").write_text(
        MODULE + "def twice():\n    f, args = handed()\n    return jax.checkpoint(jax.checkpoint(f)), args\n"
    )
    found = explained(folder, "mine_for_explain:twice", "--lint")
    assert found["findings"] and all(f["cure"] and f["place"] for f in found["findings"])
    assert found["findings"][0]["message"] in " ".join(capsys.readouterr().out.split())
    assert explained(folder, "mine_for_explain:handed", "--lint")["findings"] == []


def test_a_page_is_written(folder):
    assert main(["explain", "mine_for_explain:handed", "--policy", "full", "--html", "page.html"]) == 0
    page = (folder / "page.html").read_text()
    assert page.startswith("<!doctype html>") and "mine_for_explain:handed" in page


REFUSED = {
    "no command": (("explian", "x"), "did you mean 'explain'?"),
    "no place": (("explain", "mine_for_explain"), "expected package.module:function"),
    "no module": (("explain", "nowhere_at_all:f"), "no module 'nowhere_at_all'"),
    "no file": (("explain", "nowhere.py:f"), "no file nowhere.py"),
    "no function": (("explain", "mine_for_explain:mpl"), "did you mean 'mlp'?"),
    "a number": (("explain", "mine_for_explain:number"), "expected a function"),
    "no arguments": (("explain", "mine_for_explain:mlp"), "takes x, w, v; describe them"),
    "something else returned": (("explain", "mine_for_explain:nothing"), "to return (f, args)"),
    "an error of its own": (
        ("explain", "mine_for_explain:breaks"),
        f"no data, mine_for_explain.py:{RAISES} (breaks)",
    ),
    "shapes that don't fit": (("explain", "mine_for_explain:layer", "--args", "f32[3,3]", "f32[8,4]"), "TypeError"),
    "unknown policy": (("explain", "mine_for_explain:handed", "--policy", "fulll"), "did you mean 'full'?"),
    "a name that no value bears": (("explain", "mine_for_explain:handed", "--policy", "save:upp"), "did you mean 'up'"),
    "a plan without layers": (("explain", "mine_for_explain:handed", "--policy", "every_k:2"), "--layers N"),
    "negative layers": (("explain", "mine_for_explain:handed", "--layers", "-1"), "layers: expected 0 or more"),
    "a page nowhere": (("explain", "mine_for_explain:handed", "--html", "nowhere/x.html"), "no such folder"),
    "unknown flag": (("explain", "mine_for_explain:handed", "--polcy", "full"), "did you mean --policy"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_get_one_line_and_write_nothing(case, folder, capsys):
    argv, said = REFUSED[case]
    before = sorted(path.name for path in folder.iterdir())
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err
    assert sorted(p.name for p in folder.iterdir() if p.name != "__pycache__") == before


def test_help_and_version(capsys):
    assert main([]) == 0 and main(["--version"]) == 0
    out = capsys.readouterr().out
    assert "jremat explain FUNCTION" in out and "jremat " in out


def test_it_is_quiet_as_a_process(folder):
    command = [sys.executable, "-m", "jremat", "explain", "mine_for_explain:handed", "--policy", "full"]
    import os

    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=True)
    assert done.stderr == "" and "recomputed" in done.stdout


def test_complex_arrays_are_explained(folder, capsys):
    kept = [
        explained(folder, "mine_for_explain:mlp", "--args", *(f"{dtype}[{n}]" for n in ("8,4", "4,16", "16,4")))
        for dtype in ("f32", "c64")
    ]
    assert {row["dtype"] for row in kept[1]["rows"] if row["fate"] == "kept"} == {"complex64"}
    assert kept[1]["kept_bytes"] == 2 * kept[0]["kept_bytes"] > 0
