"""What scripts share: a start without noise, errors in one line, doctests."""

import doctest
import importlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from jremat import quiet_cuda
from jremat.terminal import command_line as cli

ROOT = Path(__file__).parents[2]


def test_noise_is_dropped_and_all_else_comes_through(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet_cuda.dropped_noise():
        os.write(2, b"I0000 00:00:17 8015 cudart_stub.cc:31] Could not find cuda drivers on your machine\n")
        os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n")
        os.write(2, b"something that matters\n")
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err.splitlines() == ["something that matters", "afterwards"]


def test_what_was_held_back_comes_through_when_the_start_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), quiet_cuda.dropped_noise():
        os.write(2, b"the reason\n")
        raise RuntimeError
    assert capfd.readouterr().err == "the reason\n"


PLUGIN = """
import os
os.write(2, b"cudart_stub.cc: no driver\\n")
def initialize():
    os.write(2, b"cudart_stub.cc: no driver\\n")
    if not os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
        raise RuntimeError("Unable to load CUDA. Is it installed?")
    os.write(2, b"something that matters\\n")
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A folder with a CUDA plugin that complains, and no wish for a GPU."""
    (tmp_path / "xla_cuda12.py").write_text(PLUGIN)
    for name in ("JAX_PLATFORMS", quiet_cuda.SWITCH):
        monkeypatch.delenv(name, raising=False)
    return [str(tmp_path)]


def test_a_plugin_without_a_driver_starts_in_silence_and_leaves_no_trace(plugin, monkeypatch, capfd) -> None:
    monkeypatch.setattr(quiet_cuda, "has_nvidia_driver", lambda: False)
    spec = quiet_cuda.QuietFinder.find_spec("jax_plugins.xla_cuda12", plugin)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.initialize()
    assert capfd.readouterr().err == "something that matters\n"
    assert quiet_cuda.SWITCH not in os.environ


def test_a_driver_and_a_wish_for_a_gpu_leave_the_plugin_alone(plugin, monkeypatch) -> None:
    find = lambda name="jax_plugins.xla_cuda12": quiet_cuda.QuietFinder.find_spec(name, plugin)
    monkeypatch.setattr(quiet_cuda, "has_nvidia_driver", lambda: False)
    assert find() is not None and find("xla_cuda12") is None
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert find() is None
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(quiet_cuda, "has_nvidia_driver", lambda: True)
    assert find() is None


@pytest.mark.parametrize("first", ["import jax", "import jremat, jax", "import jax, jremat"])
def test_jax_starts_in_silence_in_the_environment_that_make_builds(first, tmp_path) -> None:
    """With whatever plugins this environment has: its packages under another one, which the Makefile made quiet."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", purelib], capture_output=True, text=True, check=True).stdout.strip()
    (Path(site) / "packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    (tmp_path / "venv" / ".ready").touch()
    quiet = ["make", f"VENV={tmp_path / 'venv'}", str(tmp_path / "venv" / ".quiet")]
    subprocess.run(quiet, cwd=ROOT, capture_output=True, check=True)
    done = subprocess.run(
        [python, "-c", f"{first}; print(jax.default_backend())"],
        capture_output=True, text=True, cwd=tmp_path, check=True,
    )  # fmt: skip
    assert done.stderr == "" and done.stdout.strip() in ("cpu", "gpu", "tpu")


def test_a_failure_is_one_line_whatever_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.fail("train", "first\n  second\tthird ", 2) == 2
    assert capsys.readouterr().err == "train: error: first second third\n"


@pytest.mark.parametrize(
    "name",
    ["scripts.training.cost", "scripts.training.progress", "scripts.training.snapshots"],
)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed
