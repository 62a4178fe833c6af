"""What several scripts take: the same flags, with the same defaults, so that their figures stand side by side.

Where nothing is said, every script speaks of a step of eight sequences, of the model's context but 1024 tokens at most,
with attention that materialises its scores, computed in bfloat16: of GPT-2 in those that run nothing (estimate,
explain, plan), of a tiny model in those that run it here (train, bench). ``scripts/train.py`` alone takes 128 tokens
and float32, so that a run on any machine is over soon.
"""

from pathlib import Path
from typing import Annotated, Literal

import tyro

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
        ValueError: its folder isn't there, or it is a folder itself.
    """
    if path and not path.absolute().parent.is_dir():
        raise ValueError(f"{name}: the folder {path.absolute().parent} does not exist")
    if path and path.is_dir():
        raise ValueError(f"{name}: expected a file, got a folder: {path}")
