"""What scripts share: a start without noise, errors in one line, doctests."""

import doctest
import importlib
import os
import subprocess
import sys

import pytest

from jremat.command import line as cli
from jremat.command import start as startup


def test_noise_is_dropped_and_all_else_comes_through(capfd: pytest.CaptureFixture[str]) -> None:
    with startup._without_noise():
        os.write(2, b"I0000 00:00:17 8015 cudart_stub.cc:31] Could not find cuda drivers on your machine\n")
        os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n")
        os.write(2, b"something that matters\n")
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err.splitlines() == ["something that matters", "afterwards"]


def test_what_was_held_back_comes_through_when_the_start_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), startup._without_noise():
        os.write(2, b"the reason\n")
        raise RuntimeError
    assert capfd.readouterr().err == "the reason\n"


START = "from scripts.startup import start_jax; start_jax(); import jax; print(jax.default_backend())"


def test_jax_starts_in_silence() -> None:
    """With whatever plugins this environment has."""
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout.strip() in ("cpu", "gpu", "tpu")


def test_a_driver_is_left_to_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_has_nvidia_driver", lambda: True)
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
    startup.start_jax()
    assert "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ


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
