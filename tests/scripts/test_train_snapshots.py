"""Snapshots: whole or not there, the newest whole one found, nothing earlier lost."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from scripts.training import snapshots
from scripts.training.snapshots import SnapshotError, Writer, differences
from scripts.training.step import State

DESCRIPTION = {"seed": 0, "model": {"hidden": 16}}


def state(value: float) -> State:
    weights = {"kernel": jax.random.normal(jax.random.key(int(value)), (64, 64)), "bias": jnp.full(3, value)}
    return State(weights, optax.adamw(1e-3).init(weights), jnp.int32(value))


def newest(folder: Path):
    return snapshots.newest(folder, state(0), DESCRIPTION)


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
    assert same(found.state, state(4))


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
    assert found is not None and same(found.state, expected)


def change(file: Path, damage: str) -> None:
    content = file.read_bytes()
    half = len(content) // 2
    file.unlink()
    if damage != "gone":
        file.write_bytes(
            content[:half] + (b"" if damage == "cut" else bytes([content[half] ^ 1]) + content[half + 1 :])
        )


@pytest.mark.parametrize("damage", ["gone", "cut", "a bit"])
def test_damage_of_any_file_is_named_or_changes_nothing(tmp_path: Path, damage: str) -> None:
    write(tmp_path / "whole", 2, 4)
    harmless = []
    for file in sorted(p for p in (tmp_path / "whole" / "step_00000004").rglob("*") if p.is_file()):
        name = str(file.relative_to(tmp_path / "whole"))
        shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
        change(tmp_path / "damaged" / name, damage)
        found, warnings = newest(tmp_path / "damaged")
        assert found is not None and same(found.state, state(found.step))
        if found.step == 4:
            harmless.append(name)
        else:
            (warning,) = warnings
            assert re.search(r"step_00000004 is not whole \(.+\); passed over$", warning), warning
        shutil.rmtree(tmp_path / "damaged")
    arrays = tmp_path / "whole" / "step_00000004" / "state"
    largest = max((p for p in arrays.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    assert not any(Path(name).name == largest.name for name in harmless)


def metadata(change: Callable[[dict], object]) -> Callable[[Path], object]:
    return lambda file: file.write_text(json.dumps(change(json.loads(file.read_text()))))


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"\xfe\x00"),
        lambda file: file.write_bytes(b"[" * 100_000),
        lambda file: shutil.rmtree(file.parent),
        lambda file: shutil.rmtree(file.parents[1] / "state"),
        lambda file: (shutil.rmtree(file.parents[1]), file.parents[1].mkdir()),
        lambda file: (shutil.rmtree(file.parents[1]), file.parents[1].write_bytes(b"\xfe")),
        metadata(lambda run: None),
        metadata(lambda run: [run]),
        metadata(lambda run: run | {"step": 2}),
        metadata(lambda run: run | {"description": "text"}),
        metadata(lambda run: run | {"checksums": {}}),
        metadata(lambda run: run | {"checksums": run["checksums"] | {"more": 1}}),
        metadata(lambda run: run | {"checksums": dict.fromkeys(run["checksums"], 1)}),
        metadata(lambda run: {"step": 4}),
    ],
)
def test_a_damaged_snapshot_is_passed_over_and_put_aside(damage: Callable[[Path], object], tmp_path: Path) -> None:
    write(tmp_path, 2, 4)
    (tmp_path / "damaged_00000004").mkdir()  # of another time
    damage(tmp_path / "step_00000004" / "run" / "metadata")
    found, (warning,) = newest(tmp_path)
    assert found is not None and found.step == 2 and "step_00000004 is not whole" in warning
    Writer(tmp_path, 1, {}, found).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged_00000004", "damaged_00000004-2", "step_00000002"]


def test_bad_sectors_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operating system can't read, tensorstore reports in words of its own."""

    class Bad(ocp.Checkpointer):
        def restore(self, directory, *args, **kwargs):
            if directory.name == "step_00000004":
                raise ValueError("DATA_LOSS: Error reading: Input/output error [type.googleapis.com/...]")
            return super().restore(directory, *args, **kwargs)

    write(tmp_path, 2, 4)
    monkeypatch.setattr(ocp, "Checkpointer", Bad)
    found, warnings = newest(tmp_path)
    assert found is not None and found.step == 2
    assert warnings == [f"{tmp_path}/step_00000004 is not whole (Input/output error); passed over"]


def test_a_damaged_snapshot_costs_no_whole_one_its_place(tmp_path: Path) -> None:
    """With one kept, and the newest cut short: the one resumed from stays until a newer whole one stands."""
    write(tmp_path, 2, keep=1)
    write(tmp_path, 4, keep=2)
    (tmp_path / "step_00000004" / "run" / "metadata").unlink()
    resumed, _ = newest(tmp_path)
    writer = Writer(tmp_path, 1, DESCRIPTION, resumed)
    assert newest(tmp_path)[0] == resumed
    writer.save(state(3), 3)
    writer.wait()
    writer.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged_00000004", "step_00000003"]


def test_what_a_killed_writer_left_is_swept_up(tmp_path: Path) -> None:
    write(tmp_path, 2)
    shutil.copytree(tmp_path / "step_00000002", tmp_path / "step_00000004.orbax-checkpoint-tmp")
    assert newest(tmp_path)[0] == newest(tmp_path)[0] and newest(tmp_path)[1] == []
    write(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000002"]


@pytest.mark.parametrize("later", [False, True], ids=["as it starts", "in the background"])
def test_a_failed_write_leaves_nothing_and_names_the_last_good_one(tmp_path: Path, monkeypatch, later: bool) -> None:
    writer = write(tmp_path, 2)
    full = ValueError("RESOURCE_EXHAUSTED: write(16): No space left on device [type.googleapis.com/...]")

    def fail(manager, *args, **kwargs):
        (tmp_path / "step_00000004.orbax-checkpoint-tmp").mkdir(exist_ok=True)
        raise full

    writer = Writer(tmp_path, 1, DESCRIPTION, newest(tmp_path)[0])
    monkeypatch.setattr(ocp.CheckpointManager, "_finalize" if later else "save", fail)
    says = (
        r"^cannot write the snapshot of step 4 in .*: No space left on device; the last good snapshot is .*_00000002$"
    )
    with pytest.raises(SnapshotError, match=says):
        writer.save(state(4), 4)
        writer.wait()
    writer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000002"] or later


def test_a_state_of_other_shapes_is_no_such_snapshot(tmp_path: Path) -> None:
    write(tmp_path, 2)
    for like in ({"other": jnp.zeros(2)}, jax.tree.map(lambda x: jnp.zeros((*x.shape, 2), x.dtype), state(0))):
        found, (warning,) = snapshots.newest(tmp_path, like, DESCRIPTION)
        assert found is None and "is not whole" in warning


def test_another_run_is_answered_without_its_state(tmp_path: Path) -> None:
    write(tmp_path, 2)
    found, _ = snapshots.newest(tmp_path, state(0), DESCRIPTION | {"seed": 1})
    assert found is not None and found.state is None and found.description == DESCRIPTION


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
