"""A small run of the train script, here or in a process of its own."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.train import main

ROOT = Path(__file__).resolve().parents[2]

SMALL = (
    *("--layers", "2", "--hidden", "16", "--heads", "2", "--seq", "8", "--micro-batch", "2"),
    *("--steps", "6", "--snapshot-every", "2", "--eval-batches", "1", "--log-every", "1"),
)
"""A model of some thousand parameters, with dropout, and a snapshot every other step."""


@pytest.fixture(scope="session")
def small() -> tuple[str, ...]:
    return SMALL


@pytest.fixture
def train(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the script here: ``train(*argv)`` gives the exit code, stdout and stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(arg) for arg in argv])
        return (code, *capfd.readouterr())

    return run


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the script in a process of its own: ``start(*argv)``; it is gone when the test is."""
    processes: list[subprocess.Popen[str]] = []

    def run(*argv: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "train.py"), *map(str, argv)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()
