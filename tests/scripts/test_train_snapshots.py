"""Snapshots: whole or not there, the newest whole one found, nothing earlier lost."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from scripts.training.snapshots import SnapshotError, Writer, differences, newest, restore
from scripts.training.step import State

DESCRIPTION = {"seed": 0, "model": {"hidden": 16}}


def state(value: float) -> State:
    weights = {"kernel": jax.random.normal(jax.random.key(int(value)), (64, 64)), "bias": jnp.full(3, value)}
    return State(weights, optax.adamw(1e-3).init(weights), jnp.int32(value))


def write(folder: Path, *steps: int, keep: int = 3) -> Writer:
    writer = Writer(folder, keep, DESCRIPTION, newest(folder)[0] if folder.exists() else None)
    for step in steps:
        writer.save(state(step), step)
    writer.wait()
    writer.close()
    return writer


def same(a: State, b: State) -> bool:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()) and x.dtype == y.dtype, a, b))


def test_a_state_comes_back_to_the_bit(tmp_path: Path) -> None:
    writer = write(tmp_path, 4)
    found, warnings = newest(tmp_path)
    assert found is not None and (found.step, found.path, warnings) == (4, writer.last, [])
    assert found.description == DESCRIPTION
    assert same(restore(found, state(0)), state(4))


def test_the_newest_are_kept(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4, 5, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000004", "step_00000005"]


def test_what_the_next_step_takes_over_is_saved_as_it_was(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 3, DESCRIPTION, None)
    before = state(1)
    expected = jax.tree.map(np.array, before)
    writer.save(before, 1)
    after = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)(before)
    jax.block_until_ready(after)
    writer.wait()
    writer.close()
    found, _ = newest(tmp_path)
    assert found is not None and same(restore(found, state(0)), expected)


def files_of(snapshot: Path) -> list[Path]:
    return sorted((p for p in snapshot.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def cut_the_largest(snapshot: Path) -> None:
    largest = files_of(snapshot)[-1]
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def flip_a_bit(snapshot: Path) -> None:
    largest = files_of(snapshot)[-1]
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def lose_the_manifest(snapshot: Path) -> None:
    (snapshot / "manifest.json").unlink()


def cut_the_manifest(snapshot: Path) -> None:
    manifest = snapshot / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])


def take_anothers_manifest(snapshot: Path) -> None:
    manifest = snapshot / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"step": 1}))


def lose_a_file(snapshot: Path) -> None:
    files_of(snapshot / "state")[0].unlink()


def lose_everything(snapshot: Path) -> None:
    shutil.rmtree(snapshot / "state")


@pytest.mark.parametrize(
    "damage",
    [
        cut_the_largest,
        flip_a_bit,
        lose_the_manifest,
        cut_the_manifest,
        take_anothers_manifest,
        lose_a_file,
        lose_everything,
    ],
)
def test_a_snapshot_that_is_not_whole_is_passed_over(tmp_path: Path, damage) -> None:
    write(tmp_path, 2, 4)
    damage(tmp_path / "step_00000004")
    found, warnings = newest(tmp_path)
    assert found is not None and found.step == 2 and same(restore(found, state(0)), state(2))
    assert len(warnings) == 1 and "step_00000004 is not whole" in warnings[0] and "passed over" in warnings[0]


def test_a_damaged_snapshot_costs_no_whole_one_its_place(tmp_path: Path) -> None:
    """With one kept, and the newest cut short: the one resumed from stays until a newer whole one stands."""
    write(tmp_path, 2, keep=1)
    write(tmp_path, 4, keep=2)
    cut_the_largest(tmp_path / "step_00000004")
    resumed, _ = newest(tmp_path)
    writer = Writer(tmp_path, 1, DESCRIPTION, resumed)
    assert newest(tmp_path)[0] == resumed
    writer.save(state(3), 3)
    writer.wait()
    writer.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged_00000004", "step_00000003"]


def test_what_a_killed_writer_left_is_swept_up(tmp_path: Path) -> None:
    write(tmp_path, 2)
    shutil.copytree(tmp_path / "step_00000002", tmp_path / "partial_00000004")
    assert newest(tmp_path)[0] == newest(tmp_path)[0] and newest(tmp_path)[1] == []
    write(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000002"]


def test_a_failed_write_leaves_nothing_and_names_the_last_good_one(tmp_path: Path, monkeypatch) -> None:
    writer = write(tmp_path, 2)

    class Full(ocp.Checkpointer):
        def save(self, directory, *args, **kwargs):
            directory.mkdir(parents=True)
            (directory / "some").write_text("bytes")
            raise ValueError("RESOURCE_EXHAUSTED: write(16): No space left on device [type.googleapis.com/...]")

    monkeypatch.setattr(ocp, "Checkpointer", Full)
    writer = Writer(tmp_path, 1, DESCRIPTION, newest(tmp_path)[0])
    writer.save(state(4), 4)
    says = (
        r"^cannot write the snapshot of step 4 in .*: No space left on device; the last good snapshot is .*_00000002$"
    )
    with pytest.raises(SnapshotError, match=says):
        writer.wait()
    writer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000002"]


def test_a_state_of_other_shapes_is_no_such_snapshot(tmp_path: Path) -> None:
    write(tmp_path, 2)
    found, _ = newest(tmp_path)
    assert found is not None
    with pytest.raises(SnapshotError, match="cannot read the snapshot"):
        restore(found, {"other": jnp.zeros(2)})


def test_an_empty_folder_has_no_snapshot(tmp_path: Path) -> None:
    assert newest(tmp_path) == (None, [])
    assert newest(tmp_path / "missing") == (None, [])


def test_differences_name_what_differs() -> None:
    assert differences(DESCRIPTION, DESCRIPTION) == []
    other = {"seed": 1, "model": {"hidden": 16, "heads": 2}}
    assert differences(DESCRIPTION, other) == [
        "model.heads: the snapshot has none, this run 2",
        "seed: the snapshot has 0, this run 1",
    ]
