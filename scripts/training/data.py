"""Tokens from disk, never loaded whole, and the batch of a step as a function of the seed and the step alone."""

import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np

BYTES = 256
"""Tokens of a text: its bytes."""

_HELD_OUT = 10  # one token in ten, at the end, as nanoGPT's data/*/prepare.py splits
_GPT2 = 50304  # nanoGPT's vocabulary where a folder has no meta.pkl: GPT-2's, padded to a multiple of 64
_CHUNK = 1 << 24  # tokens looked at together when a file is checked
_SNIFFED = 8192  # bytes: a NUL among a file's first ones says that it is no text, as git and grep decide


@dataclass(frozen=True)
class Corpus:
    """Tokens in files, one after the other.

    Args:
        name: what people call it.
        files: paths, in order.
        lengths: tokens of each file.
        dtype: of one token on disk.
        skipped: files of a folder left out because they are no text.
        held_out: tokens at the end that are for evaluation; None: one in ten.
        pickled: whether a ``meta.pkl`` stands beside the tokens, nanoGPT's vocabulary of a character-level text. It is
            not read, since a pickle can run any code.
        fingerprint: the same for the same files of the same sizes, wherever they lie.
    """

    name: str
    files: tuple[Path, ...]
    lengths: tuple[int, ...]
    dtype: str
    skipped: int
    fingerprint: str
    held_out: int | None = None
    pickled: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def ends(self) -> np.ndarray:
        """Where each file ends in the row of all tokens, int64 [files]."""
        return np.fromiter(accumulate(self.lengths), np.int64, len(self.lengths))

    def read(self, start: int, count: int) -> np.ndarray:
        """``count`` tokens from ``start`` on, across files where they join, as int32 [count]."""
        parts = [np.asarray(part) for part in self._parts(start, count)]
        return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)

    def vocabulary(self, own: int) -> int:
        """Tokens that a model of these must know, where no flag says it.

        A nanoGPT folder with a vocabulary of its own has the largest token and those below it; one without was made
        by GPT-2's tokenizer, whose 50257 nanoGPT pads to 50304.

        Args:
            own: of the model's size; enough for any other corpus, or refused by ``Batches.check``.
        """
        if self.held_out is None:
            return own
        if self.pickled:
            return max(2, self.max_token + 1)
        return own if self.max_token < own else max(_GPT2, -(-(self.max_token + 1) // 64) * 64)

    @cached_property
    def max_token(self) -> int:
        """The largest token there is."""
        chunks = range(0, self.num_tokens, _CHUNK)
        return max(int(part.max()) for start in chunks for part in self._parts(start, _CHUNK))

    def _parts(self, start: int, count: int) -> Iterator[np.ndarray]:
        ends, stop = self.ends, min(start + count, self.num_tokens)
        index = int(np.searchsorted(ends, start, side="right"))
        while start < stop:
            begin = int(ends[index]) - self.lengths[index]
            end = min(stop, int(ends[index]))
            if end > start:
                tokens = np.memmap(self.files[index], self.dtype, mode="r")
                yield tokens[start - begin : end - begin]
            start, index = end, index + 1


def open_corpus(path: Path | None) -> Corpus:
    """The corpus at ``path``.

    Args:
        path: a file of text, a folder of them (all files in it that are text, sorted by name), a ``.bin`` of uint16
            tokens, nanoGPT's folder with a ``train.bin`` and a ``val.bin``, or None for the source of the running
            Python's standard library.

    Raises:
        ValueError: it is missing, empty or no text.
    """
    if path is None:
        return standard_library()
    if not path.exists():
        raise ValueError(f"data: no such file or folder: {path}")
    if path.is_dir() and any((path / name).exists() for name in _NANOGPT):
        return _nanogpt(path)
    if path.is_dir():
        return _folder(path, str(path), list(_files(path)))
    if not path.is_file():
        raise ValueError(f"data: expected a file or a folder, got neither: {path}")
    if path.suffix == ".bin":
        _check_tokens(path)
        return _corpus(str(path), path.parent, [path], "<u2", 0)
    if not _is_text(path):
        raise ValueError(f"data: expected text, got a file with NUL bytes: {path}; tokens stand in a .bin")
    return _corpus(str(path), path.parent, [path], "u1", 0)


_NANOGPT = ("train.bin", "val.bin")


def _nanogpt(folder: Path) -> Corpus:
    """The tokens that a ``prepare.py`` of nanoGPT wrote: all of val.bin is held out, and nothing else is read."""
    train, val = files = [folder / name for name in _NANOGPT]
    for file, other in ((train, val), (val, train)):
        if not file.is_file():
            raise ValueError(f"data: {folder} has {other.name} and no {file.name}; name {other} to hold out its end")
        _check_tokens(file)
        if not _size(file):
            raise ValueError(f"data: {file} is empty")
    corpus = _corpus(str(folder), folder, files, "<u2", 0)
    return replace(corpus, held_out=corpus.lengths[1], pickled=(folder / "meta.pkl").exists())


def _check_tokens(path: Path) -> None:
    if (size := _size(path)) % 2:
        raise ValueError(f"data: expected uint16 tokens, so an even number of bytes, got {size} in {path}")


def standard_library() -> Corpus:
    """The source text of the running Python's standard library: real text on every machine, without a download.

    Files sorted by their path; without the tests, which not every distribution ships, and without site-packages.
    """
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    kept = [p for p in _files(root) if p.suffix == ".py" and not left_out.intersection(p.relative_to(root).parts)]
    python = sysconfig.get_python_version()
    return _folder(root, f"the standard library of Python {python}", kept)


def _files(root: Path) -> Iterator[Path]:
    """Every file under ``root``; hidden files and folders are left out, links to folders not followed."""

    def refuse(error: OSError) -> None:
        raise ValueError(f"data: cannot read {error.filename}: {error.strerror}") from error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _folder(root: Path, name: str, found: list[Path]) -> Corpus:
    # By the path inside the folder, with one separator, so that the order is the same on every machine.
    found = sorted((p for p in found if p.is_file()), key=lambda p: p.relative_to(root).as_posix())
    text = [p for p in found if _is_text(p)]
    if not text:
        raise ValueError(f"data: no text file in {root}")
    return _corpus(name, root, text, "u1", len(found) - len(text))


def _corpus(name: str, root: Path, files: list[Path], dtype: str, skipped: int) -> Corpus:
    sizes = [(p, _size(p)) for p in files]
    kept = [(p, size) for p, size in sizes if size]  # an empty file can't be mapped, and holds nothing
    if not kept:
        raise ValueError(f"data: {name} is empty")
    width = np.dtype(dtype).itemsize
    inside = "\n".join(f"{p.relative_to(root).as_posix()} {size}" for p, size in kept)
    single = len(files) == 1
    crc = zlib.crc32((str(kept[0][1]) if single else inside).encode())  # one file may be renamed
    return Corpus(
        name=name,
        files=tuple(p for p, _ in kept),
        lengths=tuple(size // width for _, size in kept),
        dtype=dtype,
        skipped=skipped,
        fingerprint=f"{dtype}-{sum(size for _, size in kept) // width}-{crc:08x}",
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ValueError(f"data: cannot read {path}: {error.strerror}") from error


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(_SNIFFED)
    except OSError as error:
        raise ValueError(f"data: cannot read {path}: {error.strerror}") from error


@dataclass(frozen=True)
class Batches:
    """Sequences of a corpus for training and, from its held-out end, for evaluation.

    Args:
        corpus: the tokens.
        seq: tokens in a sequence; each comes with the one that follows it.
        seed: of the training sequences' places.
    """

    corpus: Corpus
    seq: int
    seed: int

    @property
    def train_tokens(self) -> int:
        return self.corpus.num_tokens - self.held_out_tokens

    @property
    def held_out_tokens(self) -> int:
        given = self.corpus.held_out
        return max(self.corpus.num_tokens // _HELD_OUT, self.seq + 1) if given is None else given

    def check(self, vocab_size: int) -> None:
        """Refuse a corpus that can't be trained on.

        Raises:
            ValueError: it is shorter than a sequence to train on and one to evaluate, or has tokens that the model
                doesn't know.
        """
        least = 2 * (self.seq + 1)
        if self.corpus.held_out is not None:
            for file, count in zip(self.corpus.files, self.corpus.lengths, strict=True):
                if count <= self.seq:
                    raise ValueError(f"data: {file} has {count} tokens; sequences of {self.seq} need {self.seq + 1}")
        if self.corpus.num_tokens < least:
            raise ValueError(
                f"data: {self.corpus.name} has {self.corpus.num_tokens} tokens; sequences of {self.seq} need {least}, "
                "one to train on and one to evaluate, each with the token that follows it"
            )
        if self.corpus.dtype == "u1":
            if vocab_size < BYTES:
                raise ValueError(f"vocab_size: expected at least {BYTES} for text as bytes, got {vocab_size}")
        elif (largest := self.corpus.max_token) >= vocab_size:
            raise ValueError(
                f"data: {self.corpus.name} has the token {largest}, beyond a vocabulary of {vocab_size}; "
                "pass its size as --vocab-size"
            )

    def train(self, step: int, count: int, rows: np.ndarray | None = None) -> np.ndarray:
        """The sequences of one step, int32 [count, seq + 1], or those of ``rows`` alone.

        Philox is a counter-based generator whose stream NumPy keeps the same over versions; its key is the seed and
        the step, so that no step depends on the one before.
        """
        raw = np.random.Philox(key=np.array([self.seed, step], np.uint64)).random_raw(count)  # uint64 [count]
        starts = raw % np.uint64(self.train_tokens - self.seq)
        return self._sequences(starts if rows is None else starts[rows])

    def held_out(self, count: int, rows: np.ndarray | None = None) -> np.ndarray:
        """``count`` sequences of the held-out end, evenly spaced, int32 [count, seq + 1]; the same in every run.

        Of ``rows`` alone where these are given.
        """
        last = self.held_out_tokens - self.seq - 1
        starts = self.train_tokens + np.linspace(0, last, count).astype(np.int64)
        return self._sequences(starts if rows is None else starts[rows])

    def _sequences(self, starts: np.ndarray) -> np.ndarray:
        return np.stack([self.corpus.read(int(start), self.seq + 1) for start in starts])
