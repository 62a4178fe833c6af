"""A small run of the train script, and one cache for what it compiles."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
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


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # by all workers of one session
    return shared / "compiled"


@pytest.fixture(scope="session", autouse=True)
def compiled_once(cache: Path) -> Iterator[None]:
    """The same program isn't compiled twice, neither here nor in a process started by a test."""
    before = {name: getattr(jax.config, name) for name in _CACHING}
    for name, value in _CACHING.items():
        jax.config.update(name, value if value is not None else str(cache))
    yield
    for name, value in before.items():
        jax.config.update(name, value)


_CACHING = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.1,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture
def train(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the script here: ``train(*argv)`` gives the exit code, stdout and stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(arg) for arg in argv])
        return (code, *capfd.readouterr())

    return run


@pytest.fixture
def start(cache: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the script in a process of its own: ``start(*argv)``; it is gone when the test is."""
    processes: list[subprocess.Popen[str]] = []

    def run(*argv: object) -> subprocess.Popen[str]:
        caching = {name.upper(): str(cache if value is None else value) for name, value in _CACHING.items()}
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "train.py"), *map(str, argv)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | caching,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()
