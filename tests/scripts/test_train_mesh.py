"""Training on a mesh: one loss curve on any mesh and with several processes, a sharded state, snapshots that move."""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

SMALL = (
    *(
        "--layers",
        "2",
        "--hidden",
        "32",
        "--heads",
        "4",
        "--seq",
        "16",
        "--max-seq",
        "16",
        "--batch",
        "8",
        "--dropout",
        "0.1",
    ),
    *("--steps", "12", "--eval-batches", "1", "--log-every", "1", "--snapshot-every", "4"),
)
# Of the arguments on one device the parameters are a third and the moments two: their share on a mesh.
MESHES = {
    "fsdp=8": ("full", 1 / 8),
    "data=2,fsdp=2,tensor=2,sequence": ("save_only_matmuls", 1 / 4),
    "data=2,zero=1,tensor=2,context=2": ("every_k:2", 1 / 3 / 2 + 2 / 3 / 4),
}


def losses(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [value for row in rows for name in ("loss", "grad_norm", "val_loss") if (value := row.get(name)) is not None]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one device."""
    from scripts.train import main

    out = tmp_path_factory.mktemp("alone") / "run"
    assert main([*SMALL, "--policy", "full", "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("mesh", MESHES)
def test_one_loss_curve_on_every_mesh_and_a_share_of_the_state(mesh: str, alone: Path, tmp_path: Path, train) -> None:
    policy, share = MESHES[mesh]
    code, text, err = train(*SMALL, "--policy", policy, "--mesh", mesh, "--out", tmp_path / "run")
    assert code == 0, err
    assert f"mesh    {mesh}: 8 devices" in text
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-5)
    whole, own = (json.loads((out / "summary.json").read_text()) for out in (alone, tmp_path / "run"))
    assert own["compiled_bytes"]["argument"] / whole["compiled_bytes"]["argument"] == pytest.approx(share, rel=0.08)


def test_a_snapshot_goes_on_on_another_mesh(alone: Path, tmp_path: Path, train) -> None:
    out = tmp_path / "run"
    for mesh, steps in (("fsdp=8", 4), ("fsdp=2,tensor=2", 12)):
        resume = ("--resume",) if out.exists() else (*SMALL, "--policy", "full", "--decay-steps", 12)
        code, _, err = train(*resume, "--mesh", mesh, "--steps", steps, "--out", out)
        assert code == 0, err
    rows = lambda out: map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    steps = lambda out: {row["step"]: row["loss"] for row in rows(out) if "loss" in row}
    assert steps(out) == pytest.approx(steps(alone), rel=1e-5)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("fsdp=16", "takes 16 devices, here are 8; XLA_FLAGS=--xla_force_host_platform_device_count=16"),
        ("fsdp=3", "fsdp: expected a divisor of batch=8, got 3; nearest mesh that does: data=1"),
        ("tensor=8", "tensor: expected a divisor of heads=4, got 8; nearest mesh that does: tensor=4"),
        ("context=3", "context: expected a divisor of seq=16, got 3"),
        ("pipeline=2", "mesh: pipeline is for estimates alone"),
        ("fdsp=8", "mesh: 'fdsp' is no axis; near: fsdp"),
        ("sequence=2", "mesh: expected sequence alone, got 'sequence=2'"),
        ("fsdp", "mesh: expected fsdp=NUMBER, got 'fsdp'"),
        ("fsdp=2,fsdp=4", "mesh: fsdp stands twice"),
    ],
)
def test_a_mesh_that_does_not_fit_is_one_line(mesh: str, message: str, tmp_path: Path, train) -> None:
    code, _, err = train(*SMALL, "--mesh", mesh, "--out", tmp_path / "run")
    assert code == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--processes 2", "they need --coordinator"),
        ("--coordinator localhost:1", "needs --processes and --process too"),
        ("--coordinator localhost:1 --processes 2 --process 2", "process: expected 0 to 1, got 2"),
    ],
)
def test_half_of_a_run_of_several_processes_is_refused(flags: str, message: str, train) -> None:
    code, _, err = train(*SMALL, *flags.split())
    assert code == 2 and message in err


def test_two_processes_are_stopped_together_and_one_outlives_the_other(alone, tmp_path, start, train, monkeypatch):
    """SIGTERM at one saves on both; SIGKILL of one ends the other in a line; then a single process goes on."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    out, steps = tmp_path / "run", lambda: sorted((tmp_path / "run" / "snapshots").glob("step_????????"))
    flags = [*SMALL, "--steps", "1000", "--decay-steps", "12", "--warmup-steps", "1", "--snapshot-every", "1"]

    def both(*more: str) -> list[subprocess.Popen[str]]:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        where = ("--mesh", "fsdp=8", "--coordinator", f"localhost:{port}", "--processes", "2", "--out", str(out))
        before = len(steps()) and steps()[-1].name
        pair = [start(*more, *where, "--process", str(i)) for i in (0, 1)]
        deadline = time.monotonic() + 240
        while not steps() or steps()[-1].name in (before, "step_00000001"):
            assert time.monotonic() < deadline and all(p.poll() is None for p in pair), pair[0].communicate()
            time.sleep(0.1)
        return pair

    first, second = both(*flags, "--policy", "full")
    second.send_signal(signal.SIGTERM)
    text, err = first.communicate(timeout=120)
    assert (first.returncode, second.wait(120)) == (143, 143), err
    assert f"saved as {steps()[-1]}" in text and not second.stdout.read().count("saved as")

    first, second = both("--resume")
    os.kill(second.pid, signal.SIGKILL)
    _, err = first.communicate(timeout=120)
    ours = [line for line in err.splitlines() if line.startswith("train: ")]
    assert first.returncode == 1 and len(ours) == 1 and "another process of this run has ended" in ours[0]

    monkeypatch.undo()
    last = int(steps()[-1].name[5:])
    code, _, err = train("--resume", "--mesh", "data=1", "--steps", last + 1, "--out", out)
    assert code == 0, err
    plain = tmp_path / "plain"
    assert train(*flags, "--steps", last + 1, "--policy", "full", "--out", plain)[0] == 0
    assert losses(out)[-2:] == pytest.approx(losses(plain)[-2:], rel=1e-5)
