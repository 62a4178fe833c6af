"""A run's own files after a bad disk or a stray edit: repaired with a warning, the original kept, or refused."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from scripts.training.files import Files, read_description, rewind, write_description

STEPS = 20
ROWS = [json.dumps({"step": n, "loss": 5.0 / n}).encode() + b"\n" for n in range(1, STEPS + 1)]
ROWS.insert(10, json.dumps({"step": 10, "val_loss": 1.5}).encode() + b"\n")
WHOLE = b"".join(ROWS)
NO_ROW = {
    "bytes": b"\xfe\x00\x9c",
    "text": b"garbage",
    "a list": b"[1]",
    "a number": b"3",
    "null": b"null",
    "no step": b'{"loss": 1.0}',
    "no loss": b'{"step": 15}',
    "a step that is text": b'{"step": "15", "loss": 1.0}',
    "a step that is no integer": b'{"step": 15.0, "loss": 1.0}',
    "a step before the first": b'{"step": 0, "loss": 1.0}',
    "a step that is true": b'{"step": true, "loss": 1.0}',
    "a loss that is text": b'{"step": 15, "loss": "1.0"}',
    "a loss that is not finite": b'{"step": 15, "loss": NaN}',
    "a loss beyond a float": b'{"step": 15, "loss": 1' + b"0" * 400 + b"}",
    "too many digits": b'{"step": ' + b"9" * 5000 + b', "loss": 1.0}',
    "too deep": b"[" * 100_000,
}


def steps(raw: bytes) -> list[int]:
    return [json.loads(line)["step"] for line in raw.splitlines()]


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def backups(path: Path) -> list[bytes]:
    return [aside.read_bytes() for aside in sorted(path.parent.glob(f"{path.name}.damaged*"))]


@pytest.mark.parametrize("damage", NO_ROW)
def test_a_line_that_is_no_row_costs_itself_alone(damage: str, metrics: Path) -> None:
    """In the middle, in place of step 15's row, which is line 16."""
    raw = b"".join([*ROWS[:15], NO_ROW[damage] + b"\n", *ROWS[16:]])
    metrics.write_bytes(raw)
    rows, warnings = rewind(metrics, STEPS)
    assert metrics.read_bytes() == b"".join(ROWS[:15] + ROWS[16:])
    assert [row["step"] for row in rows] == steps(metrics.read_bytes())
    assert backups(metrics) == [raw]
    assert warnings == [
        f"{metrics}: lines that are no metrics (16) are left out; the file as it was is kept as {metrics}.damaged",
        f"{metrics} has no loss of 1 of the 20 steps so far: 15",
    ]


@pytest.mark.parametrize("damage", NO_ROW)
def test_a_file_without_a_row_is_kept_aside(damage: str, metrics: Path) -> None:
    metrics.write_bytes(NO_ROW[damage])
    rows, warnings = rewind(metrics, STEPS)
    assert rows == [] and metrics.read_bytes() == b"" and backups(metrics) == [NO_ROW[damage]]
    assert len(warnings) == 2 and warnings[1].endswith("20 of the 20 steps so far: 1-20")


@pytest.mark.parametrize(
    ("raw", "lost"),
    [
        (None, "1-20"),
        (b"", "1-20"),
        (b"\n\n", "1-20"),
        (b"".join(ROWS[:6]), "7-20"),
        (b"".join(ROWS[:6]) + ROWS[6][:9], "7-20"),
        (b"".join(ROWS[3:5] + ROWS[8:]), "1-3, 6-8"),
    ],
    ids=["missing", "empty", "blank", "cut between lines", "cut in a line", "lines gone"],
)
def test_steps_without_a_row_are_named(raw: bytes | None, lost: str, metrics: Path) -> None:
    if raw is not None:
        metrics.write_bytes(raw)
    _, warnings = rewind(metrics, STEPS)
    assert warnings[-1].endswith(f"steps so far: {lost}"), warnings


@pytest.mark.parametrize(
    "raw",
    [
        WHOLE,
        WHOLE + b'{"step": 21, "lo',
        WHOLE + b'{"step": 21, "loss": 1.0}\n{"step": 22, "loss": 1.0}\n',
        WHOLE[:-1],
        WHOLE.replace(b"\n", b"\n\n"),
    ],
    ids=["whole", "cut short by a kill", "further on than the snapshot", "no newline at the end", "blank lines"],
)
def test_what_a_kill_leaves_is_no_fault(raw: bytes, metrics: Path) -> None:
    metrics.write_bytes(raw)
    rows, warnings = rewind(metrics, STEPS)
    assert (warnings, backups(metrics)) == ([], [])
    assert metrics.read_bytes() == WHOLE and len(rows) == len(ROWS)


def test_a_run_that_starts_anew_keeps_the_metrics_it_had(metrics: Path) -> None:
    for number in (1, 2):
        metrics.write_bytes(WHOLE[number:])  # the second one must not take the first one's place
        _, warnings = rewind(metrics, 0)
        assert metrics.read_bytes() == b"" and len(warnings) == 1
    assert backups(metrics) == [WHOLE[1:], WHOLE[2:]]
    metrics.write_bytes(b"")
    assert rewind(metrics, 0) == ([], []) and len(backups(metrics)) == 2


def test_metrics_are_as_they_were_where_no_copy_can_be_kept(metrics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    metrics.write_bytes(b"garbage\n" + WHOLE)
    monkeypatch.setattr("scripts.training.files.write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        rewind(metrics, STEPS)
    assert metrics.read_bytes() == b"garbage\n" + WHOLE


NO_DESCRIPTION = {
    "empty": b"",
    "bytes": b"\xfe\x00",
    "cut": b'{"description": {"seed"',
    "a list": b"[]",
    "null": b"null",
    "text": b'"description"',
    "no description": b'{"policy": "full"}',
    "a description that is a list": b'{"description": [1]}',
    "too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("damage", NO_DESCRIPTION)
def test_a_damaged_description_is_kept_aside_and_written_anew(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(NO_DESCRIPTION[damage])
    with pytest.raises(ValueError, match=r"run\.json holds no description of a run"):
        read_description(path)
    (warning,) = write_description(path, {"description": {"seed": 0}}, resumed=True)
    assert str(path) in warning and f"{path}.damaged" in warning
    assert read_description(path) == {"seed": 0} and backups(path) == [NO_DESCRIPTION[damage]]
    assert write_description(path, {"description": {"seed": 0}}, resumed=True) == []


def test_a_missing_description_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    (warning,) = write_description(path, {"description": {}}, resumed=True)
    assert "is missing" in warning and read_description(path) == {}
    path.unlink()
    assert write_description(path, {"description": {}}, resumed=False) == []


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "summary.json", "snapshots"])
def test_a_folder_for_a_file_or_the_reverse_is_refused(name: str, tmp_path: Path, small, train) -> None:
    out = tmp_path / "run"
    (out / "snapshots").mkdir(parents=True)
    (out / "metrics.jsonl").write_bytes(WHOLE)
    if name == "snapshots":
        shutil.rmtree(out / name)
        (out / name).touch()
    else:
        (out / name).unlink(missing_ok=True)
        (out / name).mkdir()
    before = sorted(out.rglob("*"))
    code, said, err = train(*small, "--out", out, "--resume")
    kinds = ("a folder", "a file") if name == "snapshots" else ("a file", "a folder")
    assert (code, said, err) == (2, "", f"train: error: out: expected {kinds[0]}, got {kinds[1]}: {out / name}\n")
    assert sorted(out.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "method"), [("snapshots", "iterdir"), ("metrics.jsonl", "open"), ("run.json", "open")]
)
def test_a_file_that_may_not_be_read_is_one_line(
    name: str, method: str, tmp_path: Path, small, train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by the operating system's error, since root may read everything; before anything is compiled or written."""
    out = tmp_path / "run"
    (out / "snapshots").mkdir(parents=True)
    (out / "metrics.jsonl").write_bytes(WHOLE)
    (out / "run.json").write_bytes(b"{}")
    before = sorted(out.rglob("*"))
    allowed = getattr(Path, method)

    def refuse(path: Path, *args, **kwargs):
        if path == out / name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return allowed(path, *args, **kwargs)

    monkeypatch.setattr(Path, method, refuse)
    result = train(*small, "--out", out, "--resume")
    monkeypatch.undo()
    assert result == (2, "", f"train: error: cannot read or write {out / name}: Permission denied\n")
    assert sorted(out.rglob("*")) == before and (out / "metrics.jsonl").read_bytes() == WHOLE


def test_a_run_goes_on_over_damage_in_every_file(tmp_path: Path, small, train) -> None:
    out = tmp_path / "run"
    assert train(*small, "--out", out)[0] == 0
    files = Files(out)
    whole = files.metrics.read_bytes().splitlines(keepends=True)
    files.metrics.write_bytes(b"".join([*whole[:1], b"[1]\n", *whole[2:]]))
    files.description.write_bytes(b"[]")
    files.summary.write_bytes(b"\xfe")
    (files.snapshots / "step_00000006" / "run" / "metadata").write_bytes(b"[]")
    code, _, err = train(*small, "--out", out, "--resume")
    assert code == 0 and "Traceback" not in err
    said = err.splitlines()
    assert all(line.startswith("train: warning: ") for line in said), said
    assert all(name in err for name in ("metrics.jsonl", "run.json", "step_00000006")), said
    losses = [(row["step"], row["loss"]) for row in map(json.loads, files.metrics.open()) if "loss" in row]
    assert losses == [
        (row["step"], row["loss"]) for row in map(json.loads, whole) if row["step"] != 2 and "loss" in row
    ]
    assert backups(files.description) == [b"[]"] and len(backups(files.metrics)) == 1
    assert json.loads(files.summary.read_text())["final_loss"] == losses[-1][1]

    files.metrics.unlink()  # a run that is done, without the loss that its summary wants
    code, said, err = train(*small, "--out", out, "--resume")
    assert code == 0 and "has no loss of 6 of the 6 steps so far: 1-6" in err and "Traceback" not in err
    assert "final loss" in said and json.loads(files.summary.read_text())["final_loss"] is None
