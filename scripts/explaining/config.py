"""The flags of an explanation of a model. Nothing here imports JAX."""

from dataclasses import dataclass, field

from jremat.command.output import Output
from scripts.flags import BATCH, MODEL, Batch, LossChunk, ModelName, OtherSpec, Seq, Spec, Stack
from scripts.training import config


@dataclass(frozen=True)
class Model(config.Model):
    """A named size, and what is changed of it."""

    model: ModelName = MODEL


@dataclass(frozen=True)
class Explain:
    """What a model's loss keeps, moves to the host and recomputes for its gradient, one row a value, and why.

    Nothing is compiled or run. `jremat explain package.module:function` does the same for a function of your own.
    """

    policy: Spec = "full"
    against: OtherSpec = None
    batch: Batch = BATCH
    seq: Seq = None
    loss_chunk: LossChunk = 0
    stack: Stack = "auto"
    model: Model = field(default_factory=Model)
    output: Output = field(default_factory=Output)

    def check(self) -> None:
        """Refuse what no model could take.

        Raises:
            ValueError: the first flag that is wrong.
        """
        if self.batch < 1:
            raise ValueError(f"batch: expected a whole number of at least 1, got {self.batch}")
        for name, value in (("seq", self.seq), ("loss_chunk", self.loss_chunk)):
            if value is not None and value < 0:
                raise ValueError(f"{name}: expected 0 or more, got {value}")
        self.output.check()
