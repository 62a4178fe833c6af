"""What an explanation of a model is told. Nothing here imports JAX."""

from dataclasses import dataclass, field

from jremat.command.output import Output
from scripts.flags import BATCH, MODEL, Dtype, Stack
from scripts.training import config


@dataclass(frozen=True)
class Model(config.Model):
    """A named size, and what is changed of it."""

    model: str = MODEL
    """A size of models/config.py: gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama-1b, llama3-8b, llama3-70b, …"""
    compute_dtype: Dtype = "bfloat16"
    """Of activations and matmuls; parameters and the optimizer's state are float32."""


@dataclass(frozen=True)
class Explain:
    """What a model's loss keeps, moves to the host and makes again for its gradient, one row a value, and why.

    Nothing is compiled or run. `jremat explain package.module:function` does the same for a function of your own.
    """

    policy: str = "full"
    """What each layer keeps, or a plan over layers; `python -m policies` lists the specs."""
    against: str = ""
    """A second policy: what changes from the first to it."""
    batch: int = BATCH
    """Sequences that go through the model at a time."""
    seq: int = 0
    """Tokens in a sequence; 0 takes the model's context, 1024 at most."""
    loss_chunk: int = 0
    """Positions whose logits are alive at a time; 0 keeps them all."""
    stack: Stack = "auto"
    """What runs the layers: a scan for one policy, the executor for a plan; or either by name."""
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
            if value < 0:
                raise ValueError(f"{name}: expected 0 or more, got {value}")
        self.output.check()
