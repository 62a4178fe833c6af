"""A file is written whole, or the old one stays as it was."""

import os
import resource
import stat

import pytest

from jremat.policy.files import write_whole


@pytest.fixture
def little_room():
    """The system lets no file grow beyond 1000 bytes, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_leaves_the_old_file_whole(tmp_path, little_room):
    path = tmp_path / "plan.json"
    write_whole(path, "old")
    with pytest.raises(OSError, match="too large") as caught:
        write_whole(path, "x" * 5000)
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_an_interruption_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    write_whole(path, "old")

    def stopped(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_new_file_is_as_open_makes_it_and_an_old_one_keeps_its_mode(tmp_path):
    plain, path = tmp_path / "plain", tmp_path / "plan.json"
    plain.write_text("")
    write_whole(path, "one")
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o640)
    write_whole(path, "two")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.read_text() == "two"


def test_bytes_are_written_as_they_are(tmp_path):
    write_whole(tmp_path / "picture.png", b"\x89PNG\r\n\x00")
    assert (tmp_path / "picture.png").read_bytes() == b"\x89PNG\r\n\x00"


def test_a_link_stays_one(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "there" / "plan.json")
    write_whole(link, "é")
    assert link.is_symlink()
    assert (tmp_path / "there" / "plan.json").read_text(encoding="utf-8") == "é"


def test_a_folder_that_is_not_there_and_a_device_name_the_path_given(tmp_path):
    for path in (tmp_path / "no" / "plan.json", "/dev/full"):
        with pytest.raises(OSError, match=r"No such file|No space left") as caught:
            write_whole(path, "x")
        assert caught.value.filename == str(path)
