"""The command line of the estimator: figures, tables, pictures, and one line for what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import policies
from jremat.estimator.transformer import estimate
from models.config import get
from scripts.estimate import main

ROOT = Path(__file__).parents[2]

REFUSED = {
    "unknown flag": ("--polcy full", "did you mean --policy"),
    "unknown policy": ("--policy dots_savable", "did you mean 'dots_saveable'?"),
    "a request": ("--policy auto", "needs the planner"),
    "a name that no value bears": ("--policy save:mlp_upp", "did you mean 'mlp_up'"),
    "no effect under this attention": ("--policy selective --attention blockwise", "which no value bears"),
    "a plan for more layers": ("--policy block:13", "names 13 layers, the stack has 12"),
    "one of several": ("--policies full nonee", "no spec 'nonee'"),
    "unknown model": ("--model gpt", "no size 'gpt'"),
    "unknown attention": ("--attention flash", "--attention"),
    "no batch": ("--batch 0", "batch: expected a whole number of at least 1"),
    "negative layers": ("--layers -1", "layers: expected 0 or more"),
    "beyond the context": ("--seq 1025", "seq: expected at most the model's context, 1024"),
    "dropout of one": ("--dropout 1", "dropout: expected a rate"),
    "cudnn in float32": ("--attention cudnn --compute-dtype float32", "compute_dtype: expected 'bfloat16'"),
    "no divisor": ("--mesh data=3", "data: expected a divisor of batch=8, got 3"),
    "more stages than layers": ("--mesh pipeline=24", "pipeline: expected at most num_layers=12"),
    "zero without replicas": ("--mesh zero=1", "would do nothing"),
    "master weights of float32": ("--master-weights", "master_weights: the weights are float32"),
    "no unit": ("--hbm 80", "hbm: expected a number and a unit"),
    "no config": ("--config nowhere.json", "cannot read nowhere.json"),
    "json nowhere": ("--json nowhere/out.json", "json: no such folder"),
    "a textbook of another MLP": ("--model llama-1b --textbook", "the paper counts a GELU MLP of 4h"),
    "a scan of a plan": ("--policy every_k:2 --stack scan", "a scan runs one policy"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_get_one_line_and_write_nothing(case, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags, said = REFUSED[case]
    assert main(flags.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("estimate: error: ") and said in err
    assert not list(tmp_path.iterdir())


def figures(tmp_path, flags: str) -> dict:
    """The figures in --json; the exit code says whether something fits."""
    path = tmp_path / "out.json"
    code = main([*flags.split(), "--json", str(path)])
    found = json.loads(path.read_text())
    fits = found["hbm_bytes"] is None or any(row["peak_bytes"] <= found["hbm_bytes"] for row in found["ledgers"])
    assert code == (0 if fits else 1)
    return found


def test_one_policy_is_the_ledger(tmp_path, capsys):
    found = figures(tmp_path, "--model gpt2 --policy save_only_matmuls --batch 4 --seq 512 --hbm h200")
    (row,) = found["ledgers"]
    config = get("gpt2").to_dict() | {"compute_dtype": "bfloat16"}
    ledger = estimate(type(get("gpt2"))(**config), policies.get("save_only_matmuls"), batch=4, seq=512)
    assert row["peak_bytes"] == ledger.peak_bytes and row["assumptions"]
    assert [line["name"] for line in row["lines"]] == [line.name for line in ledger.lines]
    out = capsys.readouterr().out
    for word in (
        "optimizer moments",
        "2·L·b·f·s",
        "kept by the layers",
        "in the update",
        "peak",
        "assumes: ",
        "jax 0.10.2",
        "fits in 139.8 GiB: yes",
    ):
        assert word in out


def test_a_line_a_policy_and_what_would_make_it_fit(tmp_path, capsys, monkeypatch):
    specs = ("none", "full", "selective", "save_only_matmuls", "every_k:4", "alternate:2", "megatron:moe")
    monkeypatch.setattr("scripts.estimating.config.zoo", lambda: tuple(map(policies.get, specs)))
    found = figures(tmp_path, "--model llama3-8b --batch 1 --seq 8192 --hbm 80GiB --policies all")
    assert [row["policy"] for row in found["ledgers"]] == [*specs[:-1]] and len(found["refused"]) == 1
    peaks = {row["policy"]: row["peak_bytes"] for row in found["ledgers"]}
    assert peaks["full"] < peaks["save_only_matmuls"] < peaks["selective"] < peaks["none"]
    assert min(peaks.values()) > 80 * 2**30  # 16 bytes for each of 8 billion parameters
    assert found["ways_to_fit"] and all(way["peak_bytes"] <= 80 * 2**30 for way in found["ways_to_fit"])
    out = capsys.readouterr().out
    assert "what would make" in out and "--mesh fsdp=" in out and "megatron:moe" in out


def test_where_a_policy_fits_no_change_is_proposed(tmp_path):
    found = figures(tmp_path, "--model gpt2 --hbm 3GiB --policies none full --attention blockwise")
    fits = {row["policy"]: row["peak_bytes"] <= 3 * 2**30 for row in found["ledgers"]}
    assert fits == {"none": False, "full": True} and found["ways_to_fit"] == []


def test_a_config_file_and_what_of_it_is_left_out(tmp_path, capsys):
    path = tmp_path / "config.json"
    fields = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128, "vocab_size": 100, "glitter": 1}
    path.write_text(json.dumps({"model_type": "gpt2"} | fields))
    found = figures(tmp_path, f"--config {path} --batch 2")
    assert found["config"]["hidden"] == 64 and found["seq"] == 128
    assert "warning: 'glitter' is unknown" in capsys.readouterr().err


def test_the_sweep_draws_memory_against_the_sequence(tmp_path):
    flags = f"--model gpt2 --batch 2 --sweep seq --hbm 8GiB --policies none full --out {tmp_path / 'pictures'}"
    assert main(flags.split()) == 0
    png, svg = (tmp_path / "pictures" / f"memory-by-seq.{kind}" for kind in ("png", "svg"))
    assert png.read_bytes().startswith(b"\x89PNG") and len(png.read_bytes()) > 10_000
    assert "<svg" in svg.read_text()


def test_degrees_reach_the_ledger(tmp_path):
    alone = figures(tmp_path, "--model llama-1b --batch 8")["ledgers"][0]
    flags = "--model llama-1b --batch 8 --mesh fsdp=4,tensor=2,sequence,pipeline=2"
    spread = figures(tmp_path, flags)["ledgers"][0]
    assert spread["devices"] == 16
    assert 12 < alone["state_bytes"] / spread["state_bytes"] <= 16
    assert spread["kept_bytes"] == alone["kept_bytes"] + 4 * 1024  # each stage has its positions


def test_a_reader_who_has_had_enough_is_no_error():
    command = f"{sys.executable} scripts/estimate.py --policies none full --attention blockwise | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("gpt2: ") and done.stderr == ""


def test_a_mistake_is_told_without_loading_jax():
    code = (
        "import sys; from scripts.estimate import main; "
        "assert main(['--model', 'llama3-7b']) == main(['--seq', '-1']) == 2; print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"] and "no size 'llama3-7b'" in done.stderr


def test_the_textbooks_count_stands_beside_the_programs(capsys):
    assert main(["--model", "gpt2", "--textbook"]) == 0
    out = capsys.readouterr().out
    for word in ("textbook", "softmax's dropout mask", "recomputed from its key", "114", "Korthikanti", "36 bsh"):
        assert word in out, word
