"""A reader that stops reading, as ``head`` does, is no error."""

import pytest

import jremat.__main__ as jremat_command
import scripts.explain
from jremat.command import explain


def _stopped(*_):
    raise BrokenPipeError


def test_jremat_explain_ends_quietly_when_nobody_reads_on(monkeypatch, capsys):
    monkeypatch.setattr(explain, "present", _stopped)
    monkeypatch.setattr(jremat_command, "quiet_pipe", lambda: 141)  # it closes the process's own output
    assert jremat_command.main(["explain", "jax.numpy:sin", "--args", "f32[8]"]) == 141
    assert capsys.readouterr().err == ""


def test_the_script_leaves_it_to_its_last_lines(monkeypatch, capsys):
    monkeypatch.setattr(scripts.explain, "present", _stopped)
    with pytest.raises(BrokenPipeError):
        scripts.explain.main(["--model", "tiny", "--batch", "1", "--seq", "8"])
    assert capsys.readouterr().err == ""
