"""What a user's type checker sees of the public functions: mypy --strict on a program that uses them all."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
USER = Path(__file__).parent / "typed" / "user.py"


def test_a_strict_user_sees_every_type_and_no_error(tmp_path):
    flags = ("--strict", "--warn-unreachable", "--follow-imports=silent", "--config-file=", f"--cache-dir={tmp_path}")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, USER.name],
        cwd=USER.parent,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    found: dict[int, str] = {}
    for line, kind, said in re.findall(r"^user\.py:(\d+): (error|note): (.*)$", done.stdout, re.MULTILINE):
        shown = re.search(r'Revealed type is "(.*)"', said)
        code = re.search(r"\[([\w-]+)\]$", said)
        if kind == "error" or shown:
            found[int(line)] = f"error: {code and code[1]}" if kind == "error" else _short(shown[1])
    lines = USER.read_text().splitlines()
    wanted = {
        k: line.split("  # ")[1]
        for k, line in enumerate(lines, 1)
        if line.startswith("reveal_type") or "# error" in line
    }
    assert len(wanted) > 30
    assert found == wanted, done.stdout + done.stderr


def _short(shown: str) -> str:
    """A revealed type without the modules of its classes."""
    return re.sub(r"\b[a-z_][\w.]*\.(?=[A-Za-z_])", "", shown).replace("def [P, R] ", "def ")


def test_both_packages_ship_their_marks():
    """PEP 561: without the file in the wheel a type checker reads nothing of an installed package."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("jremat", "policies"):
        assert (ROOT / package / "py.typed").exists()
        assert "py.typed" in data[package]
