"""Outputs that are closed, full or no longer read, and a Ctrl-C: one line at most, and an exit code that says it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jremat.__main__ as jremat_command
import scripts.explain
from jremat.command import explain

ROOT = Path(__file__).parents[2]
ESTIMATE = (str(ROOT / "scripts" / "estimate.py"),)
COMMAND = ("-m", "jremat", "explain", "jax.numpy:sin", "--args", "f32[8]")
ZOO = ("-m", "policies", "full")


def shell(argv: tuple[str, ...], redirected: str, **env: str) -> subprocess.CompletedProcess[str]:
    line = f'exec "$0" "$@" {redirected}'
    return subprocess.run(
        ["/bin/sh", "-c", line, sys.executable, *argv],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | env, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("argv", [COMMAND, ZOO], ids=["jremat", "policies"])
def test_closed_streams_end_nothing(argv):
    done = shell(argv, ">&- 2>&- <&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_mistake_is_told_on_stderr_though_stdout_is_closed():
    done = shell(("-m", "jremat", "explan"), ">&-")
    assert done.returncode == 2 and done.stderr.startswith("jremat: error: no command 'explan'")


def test_a_mistake_is_no_output_though_stderr_is_closed_or_full():
    for redirected in ("2>&-", "2>/dev/full"):
        done = shell(("-m", "jremat", "explan"), redirected)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.parametrize(
    "argv, unbuffered",
    [(COMMAND, ""), (ESTIMATE, ""), ((*ESTIMATE, "--help"), "1"), (ZOO, ""), (ZOO, "1")],
    ids=["jremat", "estimate", "help", "policies", "policies, unbuffered"],
)
def test_a_full_disk_under_standard_output_is_told_by_its_name(argv, unbuffered):
    done = shell(argv, ">/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.endswith("error: cannot write standard output: No space left on device")


@pytest.mark.parametrize("argv", [(*ESTIMATE, "--help"), ZOO])
def test_a_reader_that_stops_is_no_error(argv):
    process = subprocess.Popen(
        [sys.executable, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 141


def test_letters_that_the_output_does_not_know_end_nothing():
    line = "from jremat.terminal.command_line import run; run(lambda: print('a×b') or 0, 'p')"
    done = shell(("-c", line), "", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr) == (0, "a?b\n", "")


INTERRUPTED = """
import os, runpy, signal, sys, time, tyro
def interrupted(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
tyro.cli = interrupted
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("name", ["bench", "compare_torch", "estimate", "explain", "plan", "train"])
def test_ctrl_c_is_one_line(name):
    done = shell(("-c", INTERRUPTED, str(ROOT / "scripts" / f"{name}.py")), "")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{name}: error: stopped\n")


@pytest.mark.parametrize("name", ["policies", "policies.dictionaries"])
def test_ctrl_c_in_the_zoos_commands_is_one_line(name, tmp_path):
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "from-pytorch.md").read_text())
    line = f"""
import os, runpy, signal, time
import policies.registry as registry
def interrupted(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
registry.table = interrupted
import sys
sys.argv = [{name!r}, *{[str(page)] if name != "policies" else []!r}]
runpy.run_module({name!r}, run_name="__main__")
"""
    done = shell(("-c", line), "")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{name}: error: stopped\n")


def test_ctrl_c_while_jremat_explain_traces_is_one_line(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\ndef f(x):\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(30)\n"
    )
    done = shell(("-m", "jremat", "explain", f"{tmp_path}/slow.py:f", "--args", "f32[8]"), "")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "jremat explain: error: stopped\n")


LOADING = """
import os, signal, sys
from jremat.terminal.command_line import run, uninterrupted
def main():
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        print("loaded")
    print("never")
    return 0
run(main, "p")
"""


def test_ctrl_c_while_native_code_loads_comes_afterwards():
    done = shell(("-c", LOADING), "")
    assert (done.returncode, done.stdout, done.stderr) == (130, "loaded\n", "p: error: stopped\n")


DEAF = """
import os, signal, time
from jremat.terminal.command_line import run
def _xla_gc_callback():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)
    except BaseException:
        pass
def main():
    _xla_gc_callback()
    time.sleep(30)
    return 0
run(main, "p")
"""


def test_ctrl_c_is_not_lost_in_a_callback_that_drops_it():
    done = shell(("-c", DEAF), "")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "p: error: stopped\n")


def _stopped(*_):
    raise BrokenPipeError


def test_jremat_explain_ends_quietly_when_nobody_reads_on(monkeypatch, capsys):
    monkeypatch.setattr(explain, "present", _stopped)
    assert jremat_command.main(["explain", "jax.numpy:sin", "--args", "f32[8]"]) == 141
    assert capsys.readouterr().err == ""


def test_the_script_leaves_it_to_its_last_lines(monkeypatch, capsys):
    monkeypatch.setattr(scripts.explain, "present", _stopped)
    with pytest.raises(BrokenPipeError):
        scripts.explain.main(["--model", "tiny", "--batch", "1", "--seq", "8"])
    assert capsys.readouterr().err == ""
