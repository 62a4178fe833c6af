"""Every code block in the README and in docs/ runs, and prints what it is said to print."""

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(page.read_text()) if kind == language]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name)
def test_python_blocks_run_in_one_session(page):
    source = "\n".join(blocks(page, "python"))
    exec(compile(source, name(page), "exec"), {"__name__": "page"})


def commands(page: Path) -> list[tuple[str, str]]:
    """(command, expected output) of every ``$ `` line in console blocks."""
    found = []
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


@pytest.mark.parametrize("command, expected", [c for p in PAGES for c in commands(p)])
def test_commands_print_what_the_page_shows(command, expected, tmp_path):
    program, *arguments = shlex.split(command)
    assert program == "python", "pages show commands of this project alone"
    arguments = [str(tmp_path / Path(a).name) if a.startswith("runs/") else a for a in arguments]
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    expected = re.sub(r"runs/\S+", "...", expected)
    same = doctest.OutputChecker().check_output(expected, done.stdout, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert same, done.stdout


def test_every_fenced_block_is_of_a_kind_that_is_run_or_plainly_text():
    kinds = {kind for page in PAGES for kind, _ in FENCE.findall(page.read_text())}
    assert kinds <= {"python", "console", ""}
