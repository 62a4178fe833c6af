"""The comparison as a user runs it: its table, its JSON, its exit codes."""

import importlib.util
import json
import re

import pytest

from jremat.estimator.config import TransformerConfig
from jremat.policy import VOCABULARY
from scripts import compare_torch
from scripts.compare.rows import check, differences, failed, gradient_error, kept_check

TINY = ["--hidden", "32", "--heads", "2", "--seq", "16", "--layers", "2", "--vocab-size", "32", "--steps", "1"]
SMALL = TransformerConfig(
    vocab_size=16, num_layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, mlp_hidden=32, max_seq=8, norm="rmsnorm",
    mlp="swiglu", positions="rope", bias=False,
)  # fmt: skip
HAS_TORCH = importlib.util.find_spec("torch") is not None
with_torch = pytest.mark.skipif(not HAS_TORCH, reason="PyTorch is not installed: pip install torch==2.13.0")


@with_torch
def test_both_sides_of_two_policies_agree_and_each_difference_is_explained(tmp_path, capsys, monkeypatch):
    from scripts.compare import torch_side

    few = torch_side.own_ways
    monkeypatch.setattr(torch_side, "own_ways", lambda config: few(config)[1:2])  # the reentrant checkpoint alone
    file = tmp_path / "rows.json"
    argv = [*TINY, "--policies", "full", "sac:mm,addmm", "revolve:2", "--budgets", "0.5", "--json", str(file)]
    assert compare_torch.main(argv) == 0
    said = json.loads(file.read_text())
    full, sac, revolve, reentrant, budget, frequency = said["rows"]
    assert said["failed"] == []
    assert {"jax", "torch"} <= said["versions"].keys()
    unit = 4 * 2 * 16 * 32
    assert full["checks"]["kept_bytes"]["jax"] == full["checks"]["kept_bytes"]["pytorch"] == 2 * unit
    assert full["differences"] == []
    assert full["recomputed_matmuls"] == {"jax": 14, "pytorch": 14}
    assert reentrant["recomputed_matmuls"] == {"jax": 14, "pytorch": 16}
    assert sac["differences"] == [
        {
            "tensor": "mlp_out",
            "jax": 0,
            "pytorch": 2 * unit,
            "why": "PyTorch keeps it as it is listed, though the backward never reads it",
        }
    ]
    assert all(found["holds"] for row in (full, sac) for found in row["checks"].values())
    assert full["checks"]["dropout"]["jax_another_seed"] > 0.01
    assert "not expressible in PyTorch: a binomial schedule" in revolve["status"]
    kept = budget["checks"]["kept_bytes"]
    assert (budget["policy"], kept["jax"], kept["pytorch"]) == ("budget:0.5", 16 * unit, 16 * unit)
    assert budget["recomputed_matmuls"]["jax"] <= budget["recomputed_matmuls"]["pytorch"]
    assert all(found["holds"] for found in budget["checks"].values())
    assert budget["peak_bytes"]["jax"] > 0 and budget["overhead"].keys() >= {"jax", "pytorch"}
    assert {row["tensor"] for row in budget["differences"]} <= {*VOCABULARY, "(add)"}  # the stream has no name
    assert frequency["checks"]["frequency"]["holds"]
    assert full["overhead"].keys() >= {"jax", "pytorch"}
    out = " ".join(capsys.readouterr().out.split())
    assert "mlp_out" in out
    assert re.search(r"sac:mm,addmm: SAC \[[\w, ]+\] \(\d+ s\)", out)  # brackets are no markup
    assert "budget: PyTorch's is a share of what its default partition keeps beyond the inputs" in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--policies", "dots_savable"], "did you mean 'dots_saveable'"),
        (["--heads", "3"], "heads: expected a divisor of hidden=256, got 3"),
        (["--budgets", "1.5"], "budgets: expected shares from 0 to 1, got 1.5"),
        (["--json", "/nowhere/at/all.json"], "no such folder: /nowhere/at"),
        (["--stps", "3"], "did you mean --steps"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_two(argv, said, capsys):
    if not HAS_TORCH and argv[0] == "--policies":
        said = "PyTorch is not installed"
    assert compare_torch.main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err


@with_torch
def test_a_gpu_that_is_not_there_is_told_before_anything_runs(monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compare_torch.main(["--device", "cuda"]) == 2
    assert "device: expected an NVIDIA GPU for cuda" in capsys.readouterr().err


@with_torch
def test_the_gpus_part_ends_with_its_minutes_and_says_so(monkeypatch):
    from scripts.compare import torch_cuda

    monkeypatch.setattr(torch_cuda, "_jax", lambda seconds: iter(()))
    monkeypatch.setattr(torch_cuda, "get", lambda name: SMALL)
    monkeypatch.setattr(torch_cuda.Transformer, "cuda", lambda model: model)
    monkeypatch.setattr(torch_cuda.torch, "randint", lambda *args, device: None)
    rows = torch_cuda.rows(minutes=0)
    assert [row["status"] for row in rows] == ["no time left"] * 2 * len(torch_cuda.POLICIES)


@with_torch
def test_the_gpus_part_rehearsed_on_this_machine(monkeypatch):
    """Every policy, eager and handed to the compiler, timed; the GPU's clock and counters stood in for."""
    import torch

    from scripts.compare import torch_cuda

    randint, handed = torch.randint, []
    monkeypatch.setattr(torch_cuda, "_jax", lambda seconds: iter(()))
    monkeypatch.setattr(torch_cuda, "get", lambda name: SMALL)
    monkeypatch.setattr(torch_cuda, "SEQ", 8)
    monkeypatch.setattr(torch_cuda, "STEPS", 1)
    monkeypatch.setattr(torch_cuda.Transformer, "cuda", lambda model: model)
    monkeypatch.setattr(torch, "randint", lambda high, size, device: randint(high, size))
    monkeypatch.setattr(torch, "compile", lambda f: handed.append(f) or f)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    rows = torch_cuda.rows(minutes=5)
    assert len(handed) == len(torch_cuda.POLICIES)
    assert [row["policy"] for row in rows] == [spec for spec in torch_cuda.POLICIES for _ in range(2)]
    assert all(row["status"].endswith(" tokens/s, peak 3.0 GiB") for row in rows)
    assert all(row["tokens_per_second"] == pytest.approx(4 * 8 / row["step_seconds"]) for row in rows)


@with_torch
def test_the_gpus_part_speaks_the_benchs_language(monkeypatch):
    """Its command line is read by the bench's own parser, and its rows written by the bench's own writer."""
    from jremat.terminal.command_line import parse
    from scripts.bench import cases
    from scripts.benchmark.config import Bench
    from scripts.benchmark.pool import Rows
    from scripts.compare import torch_cuda

    def run(command, **_):
        bench = parse(Bench, "bench", command[2:])
        bench.check()
        rows = Rows(bench.json, {})
        speed = {"step_seconds": 0.5, "tokens_per_second": 32_768.0, "peak_bytes": 2**31}
        for case, found in zip(cases(bench), ({"status": "ok", **speed}, {"status": "failed", "error": "no kernel"})):
            rows.add({"key": case.key, "policy": case.policy, **found})

    monkeypatch.setattr(torch_cuda.subprocess, "run", run)
    ours = list(torch_cuda._jax(60))
    assert [row["policy"] for row in ours] == list(torch_cuda.POLICIES)
    assert [row["status"] for row in ours[:3]] == ["32,768 tokens/s, peak 2.0 GiB", "no kernel", "not run"]


@with_torch
def test_an_overhead_that_noise_hides_is_not_told_apart():
    from scripts.compare.timing import Pairs, _row

    quiet, slower = Pairs((1.0,) * 5, (1.2, 1.2, 1.3, 1.3, 1.2)), Pairs((2.0,) * 5, (3.0, 3.0, 3.1, 3.2, 3.0))
    noisy = Pairs((1.0, 3.0, 1.0, 1.0, 2.0), (1.5, 3.0, 1.1, 4.0, 2.0))
    assert _row(quiet, slower)["overhead"]["holds"]
    assert _row(quiet, slower)["overhead"]["told_apart"]
    assert not _row(slower, quiet)["overhead"]["holds"]
    assert not _row(quiet, noisy)["overhead"]["told_apart"]


def test_without_pytorch_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert compare_torch.main([]) == 2
    assert capsys.readouterr().err == f"compare_torch: error: PyTorch is not installed; {compare_torch.PIP}\n"


def test_a_hard_row_that_does_not_hold_fails_and_a_reported_one_does_not():
    row = {"policy": "full", "pytorch": "checkpoint", "checks": {"kept_bytes": kept_check("full", 3, 2)}}
    assert failed([row]) == ["full, checkpoint: kept_bytes"]
    assert failed([{**row, "checks": {"overhead": check(False, hard=False)}}]) == []
    assert kept_check("none", 110, 100)["holds"]
    assert not kept_check("none", 111, 100)["holds"]


def test_one_leaf_that_is_off_is_found_whatever_the_others_do():
    reference = {"a": [1e3], "b": [1e-1], "zero": [0.0]}
    assert gradient_error(reference, reference) == 0
    assert gradient_error({**reference, "b": [1.1e-1]}, reference) > 1e-5 * 10
    assert gradient_error({**reference, "zero": [1e-7]}, reference) < 1e-5


def test_differences_say_what_jax_makes_again():
    rows = differences({"query": 8, "x": 4}, {"query": 4, "mlp_norm": 2}, {"mlp_norm": 2}, listed=True)
    whys = {row["tensor"]: row["why"] for row in rows}
    assert whys["query"] == whys["x"] == "JAX keeps it; PyTorch recomputes it"
    assert whys["mlp_norm"] == "PyTorch keeps it; JAX recomputes it from what it keeps"
