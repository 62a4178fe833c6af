"""Text and tokens: what is read, what is refused, and batches that are a function of the seed and the step."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.training.data import Batches, Corpus, open_corpus, standard_library


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three texts in an order that is not their names', an empty one, a hidden one and one that is no text."""
    for name, content in {
        "b.txt": b"bbbb",
        "a/z.py": b"zzz",
        "c.md": b"cc",
        "a/empty": b"",
        ".hidden": b"hhhhh",
        "picture.png": b"\x89PNG\0\0",
    }.items():
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "text"


def test_a_folder_is_its_texts_sorted_by_path(folder: Path) -> None:
    corpus = open_corpus(folder)
    assert bytes(corpus.read(0, 100).astype(np.uint8)) == b"zzzbbbbcc"
    assert corpus.num_tokens == 9 and corpus.skipped == 1


@given(start=st.integers(0, 9), count=st.integers(0, 12))
def test_a_read_crosses_files_as_a_slice_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, start: int, count: int
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    for name, content in {"a": b"01", "b": b"2", "c": b"345678"}.items():
        (folder / name).write_bytes(content)
    assert bytes(open_corpus(folder).read(start, count).astype(np.uint8)) == b"012345678"[start : start + count]


def test_a_bin_holds_little_endian_uint16(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(bytes([1, 0, 2, 1, 255, 255]))
    corpus = open_corpus(path)
    np.testing.assert_array_equal(corpus.read(0, 3), [1, 258, 65535])
    assert corpus.read(0, 3).dtype == np.int32 and corpus.max_token == 65535


def test_the_standard_library_is_this_pythons_source() -> None:
    corpus = standard_library()
    names = [path.as_posix() for path in corpus.files]
    assert names == sorted(names) and any(name.endswith("/dataclasses.py") for name in names)
    assert not any("site-packages" in name or "/test/" in name for name in names)
    assert corpus.num_tokens == sum(path.stat().st_size for path in corpus.files) > 5_000_000
    begin = next(p for p in corpus.files).read_bytes()[:200]
    assert bytes(corpus.read(0, 200).astype(np.uint8))[: len(begin)] == begin


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.txt", None, "no such file or folder"),
        ("empty.txt", b"", "is empty"),
        ("empty.bin", b"", "is empty"),
        ("odd.bin", b"123", "an even number of bytes"),
        ("nul.txt", b"a\0b", "expected text"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^data: .*{says}"):
        open_corpus(tmp_path / name)


def test_folders_and_pipes_without_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data: no text file in"):
        open_corpus(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="neither"):
        open_corpus(tmp_path / "pipe")


def corpus_of(tmp_path: Path, tokens: int) -> Corpus:
    path = tmp_path / f"{tokens}.bin"
    np.arange(tokens, dtype="<u2").tofile(path)
    return open_corpus(path)


def test_a_corpus_must_hold_a_sequence_to_train_on_and_one_to_evaluate(tmp_path: Path) -> None:
    Batches(corpus_of(tmp_path, 18), seq=8, seed=0).check(18)
    with pytest.raises(ValueError, match="has 17 tokens; sequences of 8 need 18"):
        Batches(corpus_of(tmp_path, 17), seq=8, seed=0).check(18)


def test_tokens_and_vocabulary_must_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has the token 99, beyond a vocabulary of 99"):
        Batches(corpus_of(tmp_path, 100), seq=8, seed=0).check(99)
    (tmp_path / "a.txt").write_text("a" * 100)
    with pytest.raises(ValueError, match="expected at least 256 for text as bytes, got 255"):
        Batches(open_corpus(tmp_path / "a.txt"), seq=8, seed=0).check(255)


@given(tokens=st.integers(18, 500), seed=st.integers(0, 2**31 - 1), step=st.integers(0, 2**31 - 1))
def test_training_never_reads_held_out_text(
    tmp_path_factory: pytest.TempPathFactory, tokens: int, seed: int, step: int
) -> None:
    batches = Batches(corpus_of(tmp_path_factory.mktemp("split"), tokens), seq=8, seed=seed)
    train, held_out = batches.train(step, 5), batches.held_out(5)
    assert train.shape == held_out.shape == (5, 9)
    assert train.max() < batches.train_tokens <= held_out.min()
    np.testing.assert_array_equal(np.diff(train), 1)  # each a run of consecutive tokens
    np.testing.assert_array_equal(np.diff(held_out), 1)
    assert held_out[-1, -1] == tokens - 1


def test_a_batch_is_a_function_of_seed_and_step(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, 5000)
    batch = lambda seed, step: Batches(corpus, 8, seed).train(step, 4)
    np.testing.assert_array_equal(batch(1, 7), batch(1, 7))
    assert (batch(1, 7) != batch(1, 8)).any() and (batch(1, 7) != batch(2, 7)).any()
    # A batch's first sequences don't depend on how many there are: it can be cut into micro-batches at will.
    np.testing.assert_array_equal(batch(1, 7)[:2], Batches(corpus, 8, 1).train(7, 2))
    # NumPy keeps Philox's stream the same over versions, so that these places stay.
    np.testing.assert_array_equal(batch(1, 7)[:, 0], [4399, 938, 195, 1994])


def test_every_place_of_the_training_text_is_drawn(tmp_path: Path) -> None:
    batches = Batches(corpus_of(tmp_path, 40), seq=8, seed=0)
    starts = np.concatenate([batches.train(step, 50)[:, 0] for step in range(10)])
    assert set(starts) == set(range(batches.train_tokens - 8))


def nanogpt(folder: Path, train: list[int], val: list[int], meta: bytes | None = None) -> Path:
    """The folder that a ``prepare.py`` of nanoGPT writes."""
    folder.mkdir(parents=True)
    np.array(train, "<u2").tofile(folder / "train.bin")
    np.array(val, "<u2").tofile(folder / "val.bin")
    (folder / "input.txt").write_text("text that the tokens were made of " * 100)
    if meta is not None:
        (folder / "meta.pkl").write_bytes(meta)
    return folder


def test_nanogpts_folder_is_its_tokens_and_val_bin_is_held_out(tmp_path: Path) -> None:
    corpus = open_corpus(nanogpt(tmp_path / "d", train=list(range(100)), val=list(range(100, 130))))
    batches = Batches(corpus, 8, 0)
    batches.check(256)
    assert (batches.train_tokens, batches.held_out_tokens) == (100, 30)
    assert max(int(batches.train(step, 8).max()) for step in range(50)) == 99
    held_out = batches.held_out(5)
    assert (held_out.min(), held_out.max()) == (100, 129)


@pytest.mark.parametrize(
    ("largest", "meta", "size"),
    [
        (60, b"cos\nsystem\n(S'exit 1'\ntR.", 61),  # as unpickled it would run a command
        (60, None, 256),  # the model's own
        (50256, None, 50304),  # GPT-2's 50257, padded
        (50256, b"", 50257),
        (65535, None, 65536),
    ],
)
def test_a_nanogpt_folder_decides_the_vocabulary(largest: int, meta: bytes | None, size: int, tmp_path: Path) -> None:
    corpus = open_corpus(nanogpt(tmp_path / "d", [0, largest] * 10, [1] * 20, meta))
    assert corpus.vocabulary(256) == size
    Batches(corpus, 8, 0).check(size)


def test_a_broken_nanogpt_folder_is_one_line(tmp_path: Path) -> None:
    good = {"train.bin": bytes(200), "val.bin": bytes(200)}
    broken = {
        "odd": (good | {"val.bin": bytes(201)}, "even number of bytes, got 201 in .*val.bin"),
        "empty": (good | {"train.bin": b""}, "train.bin is empty"),
        "short": (good | {"val.bin": bytes(16)}, "val.bin has 8 tokens; sequences of 8 need 9"),
        "no train.bin": ({"val.bin": bytes(200)}, "has val.bin and no train.bin"),
        "no val.bin": ({"train.bin": bytes(200)}, "has train.bin and no val.bin"),
        "unknown token": (good | {"val.bin": b"\xff" * 200}, "has the token 65535, beyond a vocabulary of 256"),
    }
    for name, (files, message) in broken.items():
        (folder := tmp_path / name).mkdir()
        for file, content in files.items():
            (folder / file).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            Batches(open_corpus(folder), 8, 0).check(256)
    (folder := tmp_path / "folders").mkdir()
    for file in good:
        (folder / file).mkdir()
    with pytest.raises(ValueError, match=r"no (train|val)\.bin"):
        open_corpus(folder)
