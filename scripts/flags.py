"""What several scripts take: the same flags, with the same defaults, so that their figures stand side by side.

Where nothing is said, every script speaks of a step of eight sequences, of the model's context but 1024 tokens at most,
with attention that materialises its scores, computed in bfloat16: of GPT-2 in those that run nothing (estimate,
explain, plan), of a tiny model in those that run it here (train, bench). ``scripts/train.py`` alone takes 128 tokens
and float32, so that a run on any machine is over soon.
"""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from scripts.training.files import probe

MODEL, SMALL_MODEL = "gpt2", "tiny"
BATCH = 8
MOST_TOKENS = 1024
"""Of a sequence, where the model's context is longer and no length is asked for."""

Attention = Literal["dot", "blockwise", "cudnn"]
Dtype = Literal["float32", "bfloat16"]
Stack = Literal["auto", "scan", "chain"]
Files = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="(optional)")]


def check_file(name: str, path: Path | None) -> None:
    """Refuse a file that can't be written where it is wanted.

    Raises:
        ValueError: its folder isn't there or takes no file, or it is a folder itself.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{name}: the folder {folder} does not exist")
    if path.is_dir():
        raise ValueError(f"{name}: expected a file, got a folder: {path}")
    if not path.exists() or path.is_file():  # what is no regular file, e.g. /dev/stdout, is written to as it stands
        _check_takes_files(name, folder)


def check_folder(name: str, path: Path | None) -> None:
    """Refuse a folder that files can't be written in; one that isn't there is made when there is something to write.

    Raises:
        ValueError: it is a file, or below one, or takes no file.
    """
    if path is not None:
        there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
        if not there.is_dir():
            raise ValueError(f"{name}: expected a folder, got a file: {there}")
        _check_takes_files(name, there)


def _check_takes_files(name: str, folder: Path) -> None:
    try:
        probe(folder)
    except OSError as error:
        raise ValueError(f"{name}: cannot write in {folder}: {error.strerror}") from None
