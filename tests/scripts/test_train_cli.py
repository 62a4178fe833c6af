"""The command line, run in this process: what is refused, what is written, and that a resumed run is the same run."""

import io
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from jremat.terminal.command_line import parse
from scripts.training.config import Run
from scripts.training.files import default_out
from scripts.training.progress import Reporter

# flags, what the one line must say
REFUSED = {
    "unknown flag": ("--polcy full", "did you mean --policy or --process?"),
    "no number": ("--steps ten", "--steps"),
    "no value": ("--steps", "--steps"),
    "unknown policy": ("--policy dots_savable", "did you mean 'dots_saveable'?"),
    "a name that no value bears": ("--policy save:mlp_upp", "'mlp_upp'"),
    "a plan in a scan": ("--policy every_k:2 --stack scan", "use --stack chain"),
    "a plan for more layers": ("--policy block:7", "names 7 layers, the stack has 2"),
    "unknown stack": ("--stack scann", "--stack"),
    "unknown model": ("--model gpt", "no size 'gpt'"),
    "unknown attention": ("--attention flash", "--attention"),
    "cudnn without a GPU": ("--attention cudnn --compute-dtype bfloat16", "cudnn needs an NVIDIA GPU"),
    "zero layers": ("--layers 0", "layers: expected at least 1, got 0"),
    "negative width": ("--hidden -8", "hidden: expected at least 1, got -8"),
    "heads that don't divide": ("--heads 3", "heads: expected a divisor of hidden=16, got 3"),
    "kv heads that don't divide": ("--heads 4 --kv-heads 3", "kv_heads: expected a divisor of heads=4, got 3"),
    "dropout of one": ("--dropout 1", "dropout: expected a rate of at least 0 and below 1"),
    "no steps": ("--steps 0", "steps: expected at least 1, got 0"),
    "too many steps": ("--steps 9999999999", "steps: expected at most"),
    "negative seed": ("--seed -1", "seed: expected at least 0"),
    "no sequence": ("--seq 0", "seq: expected at least 1"),
    "a sequence beyond the model's": ("--seq 257", "seq: expected at most 256"),
    "no batch": ("--micro-batch 0", "micro_batch: expected at least 1"),
    "nothing to accumulate": ("--accumulate 0", "accumulate: expected at least 1"),
    "no evaluation": ("--eval-batches 0", "eval_batches: expected at least 1"),
    "a small vocabulary": ("--vocab-size 255", "vocab_size: expected at least 256"),
    "no learning rate": ("--learning-rate 0", "learning_rate: expected a positive number"),
    "a learning rate that is no number": ("--learning-rate nan", "learning_rate: expected a positive number"),
    "negative decay": ("--weight-decay -1", "weight_decay: expected a number of at least 0"),
    "beta of one": ("--beta2 1", "beta2: expected a number of at least 0 and below 1"),
    "a last rate above the top": ("--final-rate 2", "final_rate: expected a share from 0 to 1"),
    "no clip": ("--clip 0", "clip: expected a positive number"),
    "a warm-up as long as the run": ("--warmup-steps 6", "warmup_steps: expected fewer than the 6 steps"),
    "no snapshots kept": ("--keep 0", "keep: expected at least 1"),
    "no snapshots": ("--snapshot-every 0", "snapshot_every: expected at least 1"),
    "resume what": ("--resume", "resume: needs --out DIR"),
    "resume nothing": ("--resume --out nowhere", "resume: no such run: nowhere"),
    "resume a folder of something else": ("--resume --out other", "resume: other holds no run"),
    "a run that is there": ("--out full", "full holds a run already"),
    "out is a file": ("--out text.txt", "expected a folder, got a file"),
    "out below a file": ("--out text.txt/run", "out: cannot write"),
    "missing data": ("--data missing.txt", "data: no such file or folder: missing.txt"),
    "empty data": ("--data empty.txt", "is empty"),
    "an empty folder": ("--data nothing", "no text file in nothing"),
    "a text shorter than a sequence": ("--data short.txt", "has 17 tokens; sequences of 8 need 18"),
    "tokens beyond the vocabulary": ("--data large.bin", "has the token 256, beyond a vocabulary of 256"),
    "half a token": ("--data odd.bin", "an even number of bytes"),
    "no context": ("--max-seq 0", "max_seq: expected at least 1, got 0"),
    "a sequence beyond a shortened context": ("--max-seq 7", "seq: expected at most 7"),
    "half a token of nanoGPT's": ("--data nano", "an even number of bytes, got 2001 in nano/val.bin"),
    "json is a folder": ("--json nothing", "json: expected a file, got a folder"),
    "json in no folder": ("--json nowhere/out.json", "json: no such folder"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the flags above name."""
    (tmp_path / "text.txt").write_text("words " * 1000)
    (tmp_path / "short.txt").write_text("x" * 17)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "odd.bin").write_bytes(bytes(2001))
    np.full(1000, 256, "<u2").tofile(tmp_path / "large.bin")
    (tmp_path / "nano").mkdir()
    (tmp_path / "nano" / "train.bin").write_bytes(bytes(2000))
    (tmp_path / "nano" / "val.bin").write_bytes(bytes(2001))
    (tmp_path / "nothing").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listing(folder: Path) -> dict[str, bytes | None]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_exit_2_and_nothing_written(case: str, here: Path, small, train) -> None:
    flags, says = REFUSED[case]
    before = listing(here)
    code, out, err = train(*small, *flags.split())
    assert code == 2 and out == ""
    assert err.startswith("train: error: ") and err.count("\n") == 1 and says in err, err
    assert listing(here) == before


def test_a_disk_without_room_for_a_snapshot_is_refused(here: Path, small, train, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 100, 100))
    before = listing(here)
    code, _, err = train(*small)
    assert code == 2 and re.fullmatch(r"train: error: out: a snapshot needs [\d.]+ KiB, .* has 100 B free\n", err)
    assert listing(here) == before


def test_help_names_every_flag_and_wraps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(Run, "train", ["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for flag in ("--policy", "--steps", "--micro-batch", "--accumulate", "--resume", "--json", "--out", "--data"):
        assert flag in text
    assert "{None}" not in text and "--no-resume" not in text


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, small) -> Path:
    """The uninterrupted run, six steps, a snapshot every other one."""
    from scripts.train import main

    out = tmp_path_factory.mktemp("reference") / "run"
    assert main([*small, "--out", str(out), "--json", str(out.with_suffix(".json"))]) == 0
    return out


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def curve(out: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows(out) if "loss" in row]


def test_the_summary_says_what_was_done(reference: Path) -> None:
    summary = json.loads(reference.with_suffix(".json").read_text())
    assert summary == json.loads((reference / "summary.json").read_text())
    assert (summary["policy"], summary["steps"], summary["tokens_per_step"]) == ("dots_saveable", 6, 16)
    assert summary["final_loss"] == rows(reference)[-2]["loss"]
    assert summary["val_loss"] == rows(reference)[-1]["val_loss"]
    assert summary["tokens_per_second"] == 16 / summary["step_seconds"]
    peak = summary["peak_flops_per_second"]
    assert math.isclose(summary["mfu"], summary["model_flops_per_step"] / summary["step_seconds"] / peak)
    assert "measured on this cpu" in summary["peak_flops_source"]
    parts = summary["compiled_bytes"]
    assert summary["compiled_peak_bytes"] == parts["temp"] + parts["argument"] + parts["output"] - parts["alias"]
    assert parts["alias"] > 3 * 4 * summary["num_params"]  # the state is donated: parameters and Adam's two moments
    # By hand: 2 layers of 4·16² + 8·16² weights and a head of 256·16; attention 12·L·h·s a token.
    assert summary["model_flops_per_step"] == 16 * (6 * (2 * 12 * 16**2 + 256 * 16) + 12 * 2 * 16 * 8)
    assert summary["model_flops_per_step_half_causal"] == summary["model_flops_per_step"] - 16 * 6 * 2 * 16 * 8
    assert summary["recompute_flops_per_step"] == 0 and summary["hfu"] == summary["mfu"]  # every matmul is kept


def test_everything_stands_under_out(reference: Path) -> None:
    assert sorted(p.name for p in reference.iterdir()) == ["metrics.jsonl", "run.json", "snapshots", "summary.json"]
    assert sorted(p.name for p in (reference / "snapshots").iterdir()) == [f"step_0000000{n}" for n in (2, 4, 6)]
    assert [row["step"] for row in rows(reference)] == [1, 2, 3, 4, 5, 6, 6]


def interrupted(reference: Path, out: Path, step: int) -> None:
    """The run as a kill after ``step`` left it: later snapshots not there yet, metrics further on, a line cut short."""
    shutil.copytree(reference, out)
    (out / "summary.json").unlink()
    for snapshot in (out / "snapshots").iterdir():
        if int(snapshot.name[5:]) > step:
            shutil.rmtree(snapshot)
    text = "".join(json.dumps(row) + "\n" for row in rows(reference) if row["step"] <= min(step + 1, 5))
    (out / "metrics.jsonl").write_text(text + '{"step": 6, "lo')


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(reference: Path, tmp_path: Path, small, train) -> None:
    out = tmp_path / "run"
    interrupted(reference, out, 4)
    code, _, err = train(*small, "--out", out, "--resume", "--json", tmp_path / "a.json")
    assert (code, err) == (0, "")
    assert curve(out) == curve(reference)
    theirs, mine = (json.loads((d / "summary.json").read_text()) for d in (reference, out))
    assert (mine["final_loss"], mine["val_loss"]) == (theirs["final_loss"], theirs["val_loss"])


def test_a_truncated_newest_snapshot_is_passed_over(reference: Path, tmp_path: Path, small, train) -> None:
    out = tmp_path / "run"
    interrupted(reference, out, 4)
    for file in (out / "snapshots" / "step_00000004").rglob("d/*"):  # some hold nothing that is read back
        file.write_bytes(file.read_bytes()[:-1])
    code, _, err = train(*small, "--out", out, "--resume")
    assert code == 0
    assert re.fullmatch(r"train: warning: \S+/step_00000004 is not whole \(.+\); passed over\n", err)
    assert curve(out) == curve(reference)


def test_a_run_without_a_whole_snapshot_starts_anew(reference: Path, tmp_path: Path, small, train) -> None:
    out = tmp_path / "run"
    interrupted(reference, out, 0)
    code, _, err = train(*small, "--out", out, "--resume")
    assert code == 0 and "no whole snapshot in" in err and "starting from the first step" in err
    assert curve(out) == curve(reference)


def test_a_done_run_is_summed_up_again(reference: Path, tmp_path: Path, small, train) -> None:
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    code, _, _ = train(*small, "--out", out, "--resume")
    mine, theirs = (json.loads((d / "summary.json").read_text()) for d in (out, reference))
    assert code == 0 and mine["final_loss"] == theirs["final_loss"] and mine["val_loss"] == theirs["val_loss"]
    assert mine["tokens_per_second"] is None and curve(out) == curve(reference)


def test_the_policy_may_change_and_steps_be_added(reference: Path, tmp_path: Path, small, train) -> None:
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    more = ("--policy", "full", "--steps", 8, "--decay-steps", 6)
    code, _, err = train(*small, *more, "--out", out, "--resume")
    assert (code, err) == (0, "")
    assert curve(out)[:6] == curve(reference) and [step for step, *_ in curve(out)] == list(range(1, 9))
    mine, theirs = (json.loads((d / "summary.json").read_text()) for d in (out, reference))
    # By hand: each of 2 layers' forward matmuls again, but for its last one, which no gradient reads.
    assert mine["recompute_flops_per_step"] == 2 * (2 * 16 * (12 - 4) * 16**2 + 4 * 16 * 8 * 16)
    assert mine["compiled_peak_bytes"] < theirs["compiled_peak_bytes"]


def test_resume_and_out_alone_go_on_with_the_runs_own_flags(reference: Path, tmp_path: Path, train) -> None:
    out = tmp_path / "run"
    interrupted(reference, out, 4)
    code, text, err = train("--resume", "--out", out, "--steps", 8, "--log-every", 3)
    assert (code, err) == (0, "")
    assert "after step 4 of 8; changed: steps 8 (was 6), log_every 3 (was 1)" in " ".join(text.split())
    assert curve(out)[:6] == curve(reference) and [step for step, *_ in curve(out)] == list(range(1, 9))
    before, now = (json.loads((d / "run.json").read_text()) for d in (reference, out))
    assert now["description"] == before["description"] and now["flags"]["steps"] == 8


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda flags: flags["model"].update(hidden="wide"), "flags.model.hidden: expected int | None, got 'wide'"),
        (lambda flags: flags["text"].update(seq=True), "flags.text.seq: expected int, got True"),
        (lambda flags: flags.update(steps=0), "steps: expected at least 1, got 0"),
        (lambda flags: flags.update(stack=["scan"]), "flags.stack: expected"),
        (lambda flags: flags.update(polcy="full"), "got 'polcy'"),
        (lambda flags: flags.clear(), "is another run"),
    ],
)
def test_own_flags_that_cannot_be_read_must_be_given(reference, tmp_path, train, damage, says: str) -> None:
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    content = json.loads((out / "run.json").read_text())
    damage(content["flags"])
    (out / "run.json").write_text(json.dumps(content))
    before = listing(out)
    code, text, err = train("--resume", "--out", out)
    assert (code, text) == (2, "") and err.count("\n") == 1 and says in err, err
    assert listing(out) == before


def test_a_nanogpt_folder_trains_as_it_is_in_a_longer_context(here: Path, small, train) -> None:
    (here / "nano" / "meta.pkl").write_bytes(b"cos\nmkdir\n(S'unpickled'\ntR.")  # as a pickle it makes a folder
    for name in ("train.bin", "val.bin"):
        (np.arange(600, dtype="<u2") % 65).tofile(here / "nano" / name)
    context = ("--max-seq", 300, "--seq", 290, "--steps", 1, "--layers", 1, "--micro-batch", 1)
    code, text, err = train(*small, *context, "--data", "nano", "--out", "run")
    assert code == 0 and not (here / "unpickled").exists(), err
    assert "65, the largest token is 64; meta.pkl is not read" in text
    model = json.loads((here / "run" / "run.json").read_text())["description"]["model"]
    assert (model["vocab_size"], model["max_seq"]) == (65, 300)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--hidden 32", "model.hidden: the snapshot has 16, this run 32"),
        ("--learning-rate 0.5", "optimizer.learning_rate: the snapshot has 0.001, this run 0.5"),
        ("--max-seq 512", "model.max_seq: the snapshot has 256, this run 512"),
        ("--seed 1", "seed: the snapshot has 0, this run 1"),
        ("--micro-batch 4", "batch: the snapshot has 2, this run 4"),
        ("--steps 8 --decay-steps 8", "optimizer.decay_steps: the snapshot has 6, this run 8"),
        ("--steps 4 --decay-steps 6", "steps: the snapshot"),
        (f"--data {__file__}", "data: the snapshot has"),
    ],
)
def test_a_snapshot_of_another_run_is_refused(reference: Path, small, train, flags: str, says: str) -> None:
    before = listing(reference)
    code, _, err = train(*small, *flags.split(), "--out", reference, "--resume")
    assert code == 2 and says in err and err.count("\n") == 1
    assert listing(reference) == before


def test_a_loss_that_is_no_number_stops_the_run(reference: Path, tmp_path: Path, small, train) -> None:
    out = tmp_path / "run"
    code, _, err = train(
        *small, "--learning-rate", "1e30", "--snapshot-every", 1, "--out", out, "--json", tmp_path / "a"
    )
    assert code == 1 and err.count("\n") == 1
    found = re.search(r"step (\d+): the loss is nan, .*; the last good snapshot is (\S+)\n", err)
    assert found and Path(found[2]) == out / "snapshots" / f"step_{int(found[1]) - 1:08d}"
    assert Path(found[2]).is_dir() and not (out / "summary.json").exists() and not (tmp_path / "a").exists()


def test_default_folders_are_numbered(here: Path, small, train) -> None:
    for name in ("tiny-dots_saveable", "tiny-dots_saveable-2"):
        code, out, err = train(*small, "--data", "text.txt")
        assert (code, err) == (0, "") and f"files   runs/{name}\n" in out
        assert (here / "runs" / name / "summary.json").exists()


def test_a_folders_name_survives_any_spec() -> None:
    assert default_out("tiny", "mix:2*save:a+b,rest*full").name == "tiny-mix_2_save_a_b_rest_full"


def test_a_terminal_has_a_live_bar() -> None:
    console = Console(force_terminal=True, width=120, record=True, file=io.StringIO())
    with Reporter(console, 0, 4, 3 * 2**20, 1) as reporter:
        reporter.step({"step": 2, "loss": 5.0, "tokens_per_second": 1234.5, "mfu": 0.25})
    text = console.export_text()
    assert "step 2/4" in text and "loss 5.0000  1,234 tokens/s  MFU 25.0%  peak 3.0 MiB" in text


def test_a_plan_made_for_the_step_with_dropout_is_none_of_the_evaluations(tmp_path, small, train) -> None:
    code, _, err = train(*small, "--policy", "budget:0.4", "--steps", "1", "--out", tmp_path / "run")
    assert (code, err) == (0, "train: planning budget:0.4 …\n")
    assert math.isfinite(json.loads((tmp_path / "run" / "summary.json").read_text())["val_loss"])
