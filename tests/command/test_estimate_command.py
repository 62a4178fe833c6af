"""``jremat estimate``: a function of one's own and a config.json, their formulas, and one line for a mistake."""

import json

import pytest

from jremat.command.estimate import main

BLOCK = """
import jax, jax.numpy as jnp

def block(p, x):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]

def branches(p, x):
    return block(p, x) * float(x.shape[1])
"""
ARGS = ["--args", "{'up': bf16[h,4*h], 'down': bf16[4*h,h]}", "bf16[b,s,h]", "--sizes", "b=2", "s=16", "h=8"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(BLOCK)
    return path


def test_a_block_of_ones_own(file, tmp_path, capsys):
    out = tmp_path / "found.json"
    assert main([f"{file}:block", *ARGS, "--layers", "3", "--policy", "full", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [(line["formula"], line["total_bytes"]) for line in found["kept"]] == [("2·L·b·h·s", 2 * 3 * 2 * 8 * 16)]
    assert found["peak_bytes"] == sum(line["device_bytes"] for line in found["lines"])
    shown = capsys.readouterr().out
    assert "2·L·b·h·s" in shown and "L = 3" in shown


def test_devices_are_divisors(file, tmp_path):
    out = tmp_path / "found.json"
    assert main([f"{file}:block", *ARGS, "--layers", "3", "--mesh", "data=2", "--json", str(out)]) == 0
    (line,) = json.loads(out.read_text())["kept"]
    assert 2 * line["device_bytes"] == line["total_bytes"]


def test_a_config(tmp_path, capsys):
    path = tmp_path / "config.json"
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 100}
    path.write_text(json.dumps({"model_type": "gpt2"} | sizes))
    out = tmp_path / "found.json"
    assert main([str(path), "--policy", "full", "--sizes", "b=2", "s=32", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert sum(line["total_bytes"] for line in found["kept"] if line["name"] == "block input") == 2 * 2 * 2 * 32 * 64
    assert "P = 108," in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--sizes", "b=2"], "got none for h, s"),
        (["--sizes", "b:2"], "expected a letter and its number, such as b=8, got 'b:2'"),
        (["--policy", "every_k:2"], "plan over layers"),
        (["--args", "f32[b,]]"], "expected an array such as f32[8,128]"),
        (["--mesh", "zero=1"], "with data=1 it would do nothing"),
    ],
)
def test_mistakes_are_one_line(file, change, message, capsys):
    assert main([f"{file}:block", *ARGS, *change]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_letter_that_the_code_needs_as_a_number_is_named(file, capsys):
    assert main([f"{file}:branches", *ARGS]) == 2
    assert "a size that the code computes with can't be a letter" in capsys.readouterr().err
    numbers = ["--args", "{'up': bf16[h,4*h], 'down': bf16[4*h,h]}", "bf16[b,16,h]", "--sizes", "b=2", "h=8"]
    assert main([f"{file}:branches", *numbers]) == 0
