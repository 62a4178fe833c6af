"""How a training step is spread over devices, and what of an array or a parameter one device then holds."""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from jremat.estimator.config import TransformerConfig
from jremat.policy.whole_number import whole_number

_SPLIT_BY_TENSOR = frozenset({"n", "m", "f", "v"})


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Degrees of parallelism; the devices are their product.

    Args:
        data: replicas that each take a share of the batch.
        fsdp: devices of a replica that each take a share of its batch and hold a shard of its weights, gradients and
            optimizer state: ZeRO-3 (Rajbhandari et al. 2020, arXiv 1910.02054).
        zero: what the replicas shard among themselves instead of holding it whole each (the same paper): 0 nothing,
            1 the optimizer's state, 2 the gradients too. What ZeRO calls 3 is ``fsdp``.
        tensor: devices that split heads, MLP width and vocabulary (Shoeybi et al. 2019, arXiv 1909.08053).
        sequence: whether these split the sequence where heads and width aren't split: norms, dropout, the residual
            stream (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).
        context: devices that split the sequence everywhere, attention's queries included.
        pipeline: stages under the 1F1B schedule; layers that they don't divide stand on the first.
        interleave: chunks of layers a stage; above 1 the interleaved schedule (Narayanan et al. 2021, section 2.2).

    >>> Parallel(data=2, tensor=4).devices
    8
    """

    data: int = 1
    fsdp: int = 1
    zero: Literal[0, 1, 2] = 0
    tensor: int = 1
    sequence: bool = False
    context: int = 1
    pipeline: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.name not in ("zero", "sequence")):
            whole_number(name, getattr(self, name))
        if self.zero not in (0, 1, 2) or isinstance(self.zero, bool):
            raise ValueError(f"zero: expected 0, 1 or 2 (fsdp is ZeRO-3), got {self.zero!r}")
        if not isinstance(self.sequence, bool):
            raise ValueError(f"sequence: expected True or False, got {self.sequence!r}")
        if self.zero and self.data == 1:
            raise ValueError(f"zero: zero={self.zero} shards among data replicas; with data=1 it would do nothing")
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence: it splits among the tensor devices; with tensor=1 it would do nothing")
        if self.interleave > 1 and self.pipeline == 1:
            raise ValueError("interleave: chunks of a pipeline's stage; with pipeline=1 it would do nothing")

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.data * self.fsdp * self.tensor * self.context * self.pipeline

    @property
    def batch_shards(self) -> int:
        """Devices that each take a share of the batch."""
        return self.data * self.fsdp

    def __str__(self) -> str:
        """The text that ``read_mesh`` reads.

        >>> str(Parallel(data=2, tensor=4, sequence=True)), str(Parallel())
        ('data=2,tensor=4,sequence', 'data=1')
        """
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return ",".join(name if value is True else f"{name}={value}" for name, value in given.items()) or "data=1"

    @property
    def chunks(self) -> int:
        """Chunks of layers over all stages."""
        return self.pipeline * self.interleave

    def check(self, config: TransformerConfig, batch: int, seq: int) -> None:
        """Refuse degrees that don't divide what they split.

        Raises:
            ValueError: the first such degree.
        """
        if self.chunks > config.num_layers:
            raise ValueError(
                f"pipeline: expected at most num_layers={config.num_layers} chunks of layers, got {self.chunks}"
            )
        if config.heads % self.tensor:
            raise ValueError(f"tensor: expected a divisor of heads={config.heads}, got {self.tensor}")
        self.check_sizes({"b": batch, "m": config.kv_heads, "f": config.mlp_hidden, "s": seq})

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """The same of sizes by their letter.

        Raises:
            ValueError: the first degree that doesn't divide its size, or that has none to divide.
        """
        names = {"b": "batch", "s": "seq", "m": "kv_heads", "f": "mlp_hidden", "n": "heads"}
        by_batch = "data" if self.fsdp == 1 else "fsdp" if self.data == 1 else "data × fsdp"
        parts = (
            (by_batch, self.batch_shards, "b"), ("tensor", self.tensor, "n"), ("tensor", self.tensor, "m"),
            ("tensor", self.tensor, "f"), ("context", self.context, "s"),
            ("sequence", self.tensor * self.context if self.sequence else 1, "s"),
        )  # fmt: skip
        for name, degree, letter in parts:
            if sizes.get(letter, degree) % degree:
                raise ValueError(f"{name}: expected a divisor of {names[letter]}={sizes[letter]}, got {degree}")
        for name, degree, letters in (
            (by_batch, self.batch_shards, "b"),
            ("tensor", self.tensor, "nmf"),
            ("context", self.context, "s"),
        ):
            if degree > 1 and not set(letters) & sizes.keys():
                raise ValueError(f"{name}: no size is called {' or '.join(letters)}, which is what it splits")

    def layers_on(self, stage: int, num_layers: int) -> int:
        """Layers of a stage; where the chunks don't divide them, the first chunks have one more.

        >>> [Parallel(pipeline=8).layers_on(stage, 28) for stage in range(8)]
        [4, 4, 4, 4, 3, 3, 3, 3]
        """
        each, more = divmod(num_layers, self.chunks)
        return sum(each + (chunk < more) for chunk in range(stage, self.chunks, self.pipeline))

    def shares(self, numbers: Mapping[str, int]) -> Mapping[str, int]:
        """The sizes that one device has of whole axes: its part of the batch, of heads, MLP width and vocabulary.

        >>> Parallel(data=2, tensor=4).shares({"b": 8, "m": 4, "f": 64, "h": 16})
        {'b': 4, 'm': 1, 'f': 16, 'h': 16}
        """
        by = {"b": self.batch_shards, **dict.fromkeys(_SPLIT_BY_TENSOR, self.tensor)}
        return {name: -(-size // by.get(name, 1)) for name, size in numbers.items()}

    def split(self, letters: Collection[str]) -> int:
        """Devices that share the sequence of an array with these axes; of scores [.., s, s] the queries are split.

        >>> Parallel(tensor=8, sequence=True).split("bsh"), Parallel(tensor=8, sequence=True).split("bsf")
        (8, 1)
        """
        if "s" not in letters:
            return 1
        whole = not _SPLIT_BY_TENSOR & set(letters)
        return self.context * (self.tensor if self.sequence and whole else 1)

    def shards(self, role: str) -> int:
        """Devices that hold a shard each of buffers of this role (``jremat.estimator.timeline.Role``).

        >>> parallel = Parallel(data=2, fsdp=4, zero=1)
        >>> parallel.shards("weights"), parallel.shards("optimizer state")
        (4, 8)
        """
        if role not in ("weights", "casts", "gradients", "optimizer state"):
            return 1
        return self.fsdp * (self.data if self.zero >= {"gradients": 2, "optimizer state": 1}.get(role, 3) else 1)

    def copies_in_flight(self, stage: int) -> float:
        """Micro-batches whose activations ``stage`` holds at once, in units of all its layers."""
        return self.in_flight(stage) / self.interleave

    def in_flight(self, stage: int) -> int:
        """Chunks whose activations ``stage`` holds at once, given enough micro-batches.

        1F1B: stage i holds p - i micro-batches. Interleaved: its warm-up of 2 (p - i - 1) + (m - 1) p chunks and one
        more, which on the first stage is the paper's factor 1 + (p - 1) / (p m).

        Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2; Korthikanti et al. 2022, section 4.2.3.

        >>> Parallel(pipeline=8, interleave=3).in_flight(0), round(3 * 8 * (1 + 7 / 24))
        (31, 31)
        """
        later = self.pipeline - stage - 1
        return later + 1 if self.interleave == 1 else 2 * later + (self.interleave - 1) * self.pipeline + 1


def read_mesh(text: str) -> Parallel:
    """How a step is spread over devices, from the text of a flag.

    Args:
        text: axes and their degrees, such as ``fsdp=8`` or ``data=2,fsdp=2,tensor=2,sequence``; names as of
            ``Parallel``.

    Raises:
        ValueError: a name that is none of these (near ones are listed), twice, or without a number.

    >>> read_mesh("data=2,tensor=4,sequence").devices
    8
    >>> read_mesh("fdsp=8")
    Traceback (most recent call last):
    ...
    ValueError: mesh: 'fdsp' is no axis; near: fsdp; axes are data, fsdp, zero, tensor, sequence, context, pipeline, \
interleave
    """
    names, found = [f.name for f in fields(Parallel)], dict[str, Any]()
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"near: {near[0]}; " if near else ""
            raise ValueError(f"mesh: {name!r} is no axis; {hint}axes are {', '.join(names)}")
        if name in found:
            raise ValueError(f"mesh: {name} stands twice in {text!r}")
        if name == "sequence" and not equals:
            found[name] = True
        elif number.isascii() and number.isdecimal() and name != "sequence":
            found[name] = int(number)
        else:
            expected = "sequence alone" if name == "sequence" else f"{name}=NUMBER"
            raise ValueError(f"mesh: expected {expected}, got {part.strip()!r}")
    try:
        return Parallel(**found)
    except ValueError as error:
        raise ValueError(f"mesh: {error}") from None
