"""The script in a process of its own: killed, interrupted, and on a disk that is full."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

TIMEOUT = 240.0  # seconds; a run of these takes about 10 where the machine has nothing else to do


def until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.0005)


def curve(out: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in lines if "loss" in row]


@pytest.fixture(scope="module")
def flags(small: tuple[str, ...]) -> tuple[object, ...]:
    # The schedule ends at step 6, so that the program is the one that the other tests compile.
    return (*small, "--steps", 70, "--decay-steps", 6, "--snapshot-every", 1, "--keep", 2, "--log-every", 100)


@pytest.fixture(scope="module")
def reference(flags: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run."""
    from scripts.train import main

    out = tmp_path_factory.mktemp("reference") / "run"
    assert main([*map(str, flags), "--snapshot-every", "100", "--out", str(out)]) == 0
    return out


def test_kills_at_any_moment_lose_nothing(reference: Path, flags, start, tmp_path: Path) -> None:
    """SIGKILL in the middle of a save, twice, then after some steps: to the bit the uninterrupted run's curve."""
    out = tmp_path / "run"
    snapshots = out / "snapshots"
    reached = 0

    def whole() -> int:
        return max((int(p.name[5:]) for p in snapshots.glob("step_????????")), default=0)

    def saving() -> bool:
        return whole() > reached + 4 and any(snapshots.glob("*.orbax-checkpoint-tmp*"))

    def stepping() -> bool:
        return whole() > reached + 8

    for moment in (saving, saving, stepping):
        process = start(*flags, "--out", out, *(["--resume"] if out.exists() else []))
        until(moment, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert whole() > reached, "nothing earlier is lost, and something was gained"
        reached = whole()
    assert reached < 70
    process = start(*flags, "--out", out, "--resume")
    _, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, err) == (0, "")
    assert curve(out) == curve(reference)
    assert sorted(p.name for p in snapshots.iterdir()) == ["step_00000069", "step_00000070"]


def test_ctrl_c_saves_and_exits_130(reference: Path, flags, start, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(*flags, "--snapshot-every", 1000, "--out", out)
    until(lambda: (out / "metrics.jsonl").exists() and len(curve_so_far(out)) > 5, process)
    process.send_signal(signal.SIGINT)
    said, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, err) == (130, "")
    (saved,) = (out / "snapshots").iterdir()
    step = int(saved.name[5:])
    assert f"stopped after step {step}, saved as {saved}" in said and "--resume" in said
    assert curve(out) == curve(reference)[:step] and not (out / "summary.json").exists()


def curve_so_far(out: Path) -> list[str]:
    return (out / "metrics.jsonl").read_text().splitlines()


def test_ctrl_c_while_starting_is_quiet(flags, start, tmp_path: Path) -> None:
    process = start(*flags, "--out", tmp_path / "run")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    said, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode in (130, -signal.SIGINT) and "Traceback" not in said + err
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="limits another process by Linux's prlimit")
def test_a_disk_that_fills_up_is_one_line_and_nothing_half_written(flags, start, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the snapshot's data hits it, as it would a full disk."""
    out = tmp_path / "run"
    # A curve of 120 steps is 27 kB; of a snapshot's 140 the largest file has 96 to 127, as tensorstore splits them.
    process = start(*flags, "--steps", 120, "--snapshot-every", 120, "--out", out, "--json", tmp_path / "a.json")
    until((out / "run.json").exists, process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (40_000, 40_000))
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2, err
    assert err.startswith("train: error: cannot write the snapshot of step 120 in ") and err.count("\n") == 1, err
    assert "File too large" in err and "there is no snapshot before it" in err
    assert list((out / "snapshots").iterdir()) == []
    assert not (tmp_path / "a.json").exists() and not (out / "summary.json").exists()


def test_stderr_is_empty_and_an_error_is_one_line(start) -> None:
    """In a process of its own, where JAX's plugins and their libraries would speak up."""
    process = start("--policy", "dots_savable")
    said, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, said) == (2, "")
    assert err == "train: error: policy: no spec 'dots_savable'; did you mean 'dots_saveable'?\n"


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small disk: Linux, as root")
def test_a_disk_that_is_really_full(flags, start, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"may not mount: {mounted.stderr.decode().strip()}")
    try:
        process = start(*flags, "--out", disk / "run")
        _, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 2 and err.count("\n") == 1 and "No space left on device" in err, err
        assert not list((disk / "run" / "snapshots").glob("*tmp*"))
    finally:
        subprocess.run(["umount", disk], check=True)
