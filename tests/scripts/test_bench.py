import io
import json
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from jremat.measure import devices, target
from jremat.measure.compile import place
from scripts import bench
from scripts.benchmark import pool, suite
from scripts.benchmark.build import build, flops_of, initial
from scripts.benchmark.config import Bench, Case, cases
from scripts.benchmark.pictures import draw
from scripts.benchmark.search import largest_that_fits
from scripts.benchmark.table import label, table

TINY = Case("tiny", "full", "cpu", 8, seq=32, layers=2, compute_dtype="float32", step="gradient", steps=2, warmup=1)


@settings(max_examples=200)
@given(
    fixed=st.integers(0, 1000), slope=st.integers(1, 50), bend=st.integers(0, 3), limit=st.integers(1, 5000),
    start=st.integers(1, 64), step=st.sampled_from([1, 2, 8]),
)  # fmt: skip
def test_the_search_finds_the_largest_batch(fixed, slope, bend, limit, start, step):
    """Against trying every batch; memory need not be quite linear."""
    peak = lambda batch: fixed + slope * batch + bend * (batch // 7) ** 2
    want = max((b for b in range(step, 6000, step) if peak(b) <= limit), default=0)
    assert largest_that_fits(peak, limit, start, step, probes=60) == want


def test_the_search_needs_few_compiles():
    tried = []
    # A 24 GiB state, 2.1 GiB a sequence, and 141 GiB.
    assert largest_that_fits(lambda b: (tried.append(b), 24_000 + 2_100 * b)[1], 141_000, 4) == 55
    assert len(tried) <= 4


def test_cases_are_every_combination_and_keys_tell_them_apart():
    chosen = list(cases(Bench(model=("tiny", "gpt2"), policies=("none", "full"), batch=(1, 2), seq=(64, 128))))
    assert len(chosen) == len({case.key for case in chosen}) == 16
    assert replace(chosen[0], profile="elsewhere").key == chosen[0].key
    assert replace(chosen[0], steps=11).key != chosen[0].key


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policies", "ful"], "ful"),
        (["--model", "gtp2"], "no size 'gtp2'; did you mean 'gpt2'"),
        (["--target", "h2000"], "target: 'h2000' is unknown; near: h200"),
        (["--batch", "0"], "batch: expected at least 1, got 0"),
        (["--margin", "2", "--largest-batch"], "margin: expected a share from 0 to 1, got 2.0"),
        (["--margin", "0.1"], "margin: only --largest-batch leaves a margin"),
        (["--profile", "x", "--target", "h200"], "profile: nothing runs on h200, which is not here"),
        (["--profile", "x", "--compile-only"], "profile: a step must run to be traced"),
        (["--json", "/no/such/folder/x.json"], "json: no such folder: /no/such/folder"),
        (["--bacth", "3"], "did you mean --batch"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(argv, message, capsys):
    assert bench.main(argv) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_a_file_of_something_else_is_not_overwritten(tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text('{"precious": 1}')
    assert bench.main(["--json", str(path)]) == 2
    assert "holds no rows of a benchmark" in capsys.readouterr().err
    assert path.read_text() == '{"precious": 1}'


def test_one_command_from_flags_to_rows_and_pictures(tmp_path, capsys):
    """Two cases, one of which can't be built: a row each, and a second run does only what is missing."""
    path = tmp_path / "bench.json"
    argv = ["--target", "cpu", "--model", "tiny", "--policies", "full", "block:9,full", "--batch", "2", "--seq", "32",
            "--layers", "2", "--step", "gradient", "--compute-dtype", "float32", "--steps", "2", "--warmup", "1",
            "--json", str(path), "--plot", str(tmp_path / "pictures")]  # fmt: skip
    assert bench.main(argv) == 0
    good, bad = json.loads(path.read_text())
    assert (good["status"], good["policy"], good["batch"], good["seq"]) == ("ok", "full", 2, 32)
    assert (
        good["peak_bytes"] == good["temp_bytes"] + good["argument_bytes"] + good["output_bytes"] - good["alias_bytes"]
    )
    assert {"recompute_flops", "model_flops", "compile_seconds", "host_bytes", "commit", "versions", "hardware"} <= set(
        good
    )
    assert good["config"]["num_layers"] == 2
    assert 0 < good["recompute_flops"] < good["model_flops"] / 3
    assert good["total_flops"] == good["counted_model_flops"] + good["recompute_flops"]
    assert good["tokens_per_second"] == pytest.approx(2 * 32 / good["step_seconds"])
    assert good["mfu_half"] < good["mfu_full"] < good["hfu"]
    assert bad["status"] == "failed"
    assert "layers" in bad["error"]
    assert list((tmp_path / "pictures").glob("*.svg"))
    capsys.readouterr()
    good["case_seconds"] = -1.0
    path.write_text(json.dumps([good, bad]))
    assert bench.main(argv) == 0
    assert "full b=2 s=32 on cpu: in the file already" in capsys.readouterr().out
    again = {row["policy"]: row for row in json.loads(path.read_text())}
    assert again["full"]["case_seconds"] == -1.0  # kept, not run again
    assert again["block:9,full"]["case_seconds"] > 0  # tried again


def test_a_case_that_crashes_or_hangs_is_a_row(monkeypatch, tmp_path):
    script = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(script))
    for body, status, error in (
        ("echo 'F1 x.cc] Check failed: y' >&2; kill -ABRT $$", "crashed", "exit -6: F1 x.cc] Check failed: y"),
        ("exec sleep 60", "timed_out", "took more than 0.5 s"),
    ):
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        row = pool.run(TINY, timeout_seconds=0.5 if status == "timed_out" else 30)
        assert (row["status"], row["error"], row["model"]) == (status, error, "tiny")


def test_rows_of_another_commit_are_measured_again(tmp_path):
    row = {"key": TINY.key, "status": "ok"}
    path = tmp_path / "rows.json"
    pool.Rows(path, {"commit": "a"}).add(row)
    assert pool.Rows(path, {"commit": "a"}).done(TINY)
    assert not pool.Rows(path, {"commit": "b"}).done(TINY)
    pool.Rows(path, {"commit": "b"}).add(row)
    assert len(json.loads(path.read_text())) == 1


def test_model_flops_in_closed_form_are_the_counted_ones():
    for model, attention in (("tiny", "dot"), ("tiny-llama", "dot")):
        case = replace(TINY, model=model, attention=attention)
        found = flops_of(build(case), case)
        assert found["counted_model_flops"] == found["model_flops"]
        assert found["recompute_flops"] > 0
        none = flops_of(build(replace(case, policy="none")), case)
        assert none["recompute_flops"] == 0
        assert none["total_flops"] == none["model_flops"]


@pytest.mark.parametrize("policy", ["full", "every_k:2"])
def test_eight_devices_share_the_state_and_compute_the_same(policy):
    values = []
    for name in ("cpu", "cpux8"):
        kind = target(name)
        here = devices(kind)
        built = build(replace(TINY, policy=policy, target=name))
        cut = jax.tree.map(lambda leaf, here=here: place(leaf, here).sharding, (built.state, built.tokens))
        args = jax.device_put(initial(built), cut)
        if kind.num_devices == 8:
            kernel = args[0]["blocks"]["mlp_up"]["kernel"]
            assert kernel.addressable_shards[0].data.size == kernel.size // 8
        with jax.set_mesh(cut[1].mesh) if kind.num_devices == 8 else jax.default_device(here[0]):
            values.append(jax.device_get(built.step(*args)))
    for one, eight in zip(*map(jax.tree.leaves, values), strict=True):
        np.testing.assert_allclose(one, eight, rtol=2e-4, atol=1e-5)


def test_a_batch_that_does_not_divide_the_devices_is_refused():
    with pytest.raises(ValueError, match="fsdp: expected a divisor of batch=3, got 8"):
        build(replace(TINY, batch=3, target="cpux8"))


def test_a_sequence_beyond_the_context_is_refused():
    with pytest.raises(ValueError, match="seq: tiny takes at most 256 tokens, got 512"):
        build(replace(TINY, seq=512))


def _rows():
    base = {"model": "m", "target": "h200", "batch": 2, "label": "compiled for h200, not run", "status": "ok",
            "model_flops": 100, "hbm_bytes": 150 << 30, "temp_bytes": 1 << 30, "compile_seconds": 1.0}  # fmt: skip
    for policy, peak, recompute in (("none", 90, 0), ("full", 30, 25)):
        for seq in (128, 256):
            yield base | {"policy": policy, "seq": seq, "peak_bytes": peak * seq << 22, "recompute_flops": recompute}
    yield base | {"policy": "broken", "seq": 128, "status": "crashed"}


def test_the_table_shows_what_there_is():
    rows = [row if row["status"] == "ok" else {k: v for k, v in row.items() if "_" not in k} for row in _rows()]
    assert {label(row) for row in rows} == {"compiled for h200, not run"}
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table(rows, "t"))
    said = console.export_text()
    assert "45.0 GiB" in said
    assert "25.0%" in said
    assert "crashed" in said
    assert "tokens/s" not in said  # nothing ran


def test_pictures_one_a_batch_and_sequence_and_one_by_sequence(tmp_path):
    rows = [row for row in _rows() if row["status"] == "ok"]
    names = {path.name for path in draw(rows, tmp_path)}
    stems = ("m-h200-b2-s128", "m-h200-b2-s256", "m-h200-b2-by-seq")
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    first = (tmp_path / "m-h200-b2-s128.svg").read_text()
    assert "none" in first  # matplotlib writes each text into a comment beside its outline
    assert "compiled for h200, not run" in first


def test_the_suite_is_one_list_at_two_sizes():
    whole, small = list(suite.gpu("whole")), list(suite.gpu("small"))
    assert [case.policy for case in whole] == [case.policy for case in small]
    assert [case.model for case in whole[:4]] == ["llama-1b"] * 4
    assert all(case.attention == "cudnn" and case.described == "h200" and case.steps == 10 for case in whole)
    assert all(case.target == "local" for case in whole + small)
