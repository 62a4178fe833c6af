"""A child process with a limit on its time, and what to say of one that failed."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_logged(command: Sequence[str], environment: Mapping[str, str], log: Path, timeout_seconds: float) -> int | None:
    """Run a process, what it prints going into a file; its exit code, or None where it was stopped for its time."""
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            return process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def last_error(log: Path) -> str:
    """The line that says most of what a crashed process printed: a check that failed, an error, or the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if "Check failed" in line or line.startswith("F0") or "Error" in line]
    return (telling or lines or ["it printed nothing"])[-1][:300]
