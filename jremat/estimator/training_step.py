"""A training step of a decoder to estimate, as data."""

from dataclasses import dataclass, field
from typing import Literal

from jremat.estimator.config import TransformerConfig
from jremat.estimator.ledger import Optimizer
from jremat.estimator.parallel import Parallel
from jremat.policy.layers import LayerPlan
from jremat.policy.policy import Policy
from jremat.policy.whole_number import whole_number


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A training step of a decoder; the fields are the arguments of ``jremat.estimate``."""

    config: TransformerConfig
    policy: Policy | LayerPlan
    batch: int
    seq: int
    chunk: int | None = None
    optimizer: Optimizer = "adamw"
    master_weights: bool = False
    accumulate: int = 1
    parallel: Parallel = field(default_factory=Parallel)
    stack: Literal["auto", "scan", "chain"] = "auto"

    def check(self) -> None:
        """Refuse what no step can have.

        Raises:
            ValueError: the first field that is out of range, or that another one contradicts.
        """
        for name, value in (("batch", self.batch), ("seq", self.seq)):
            whole_number(name, value)
        if self.chunk is not None:
            whole_number("chunk", self.chunk)
        if self.config.positions == "learned" and self.seq > self.config.max_seq:
            raise ValueError(
                f"seq: expected at most max_seq={self.config.max_seq}, which has a row a position, got {self.seq}"
            )
        if self.master_weights and self.config.param_dtype == "float32":
            raise ValueError("master_weights: the weights are float32 themselves; it would only double them")
        if self.stack not in ("auto", "scan", "chain"):
            raise ValueError(f"stack: expected 'auto', 'scan' or 'chain', got {self.stack!r}")
        self.parallel.check(self.config, self.batch, self.seq)
