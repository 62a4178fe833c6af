"""How a policy reaches the model: one policy through ``nn.scan`` and remat, a plan over layers through the executor."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jremat.estimator.config import TransformerConfig
from jremat.policy import LayerPlan, NeedsShapes, Policy, Segment
from jremat.transform.chain import stack as run_stack
from jremat.transform.remat import remat as remat_block
from models.sharding import Sharding
from models.transformer import Transformer, block_apply, layer_shapes


@dataclass(frozen=True)
class Remat:
    """A policy as the layers run it.

    Args:
        policy: of every layer, or a plan over them.
        stack: ``scan`` or ``chain``.
        requested: the spec that it comes from; another than the policy's own where the planner was asked.
    """

    policy: Policy | LayerPlan
    stack: str
    requested: str

    @property
    def name(self) -> str:
        """The spec that was requested, and what the planner answered where it was asked."""
        return self.requested if self.policy.spec == self.requested else f"{self.requested} = {self.policy.spec}"

    def model(self, config: TransformerConfig, sharding: Sharding | None = None) -> Transformer:
        """The transformer under this policy, spread over a mesh where ``sharding`` says so."""
        policy = self.policy
        if isinstance(policy, Policy):
            # Inside a scan XLA can't merge the recomputation with the forward; a scan of one layer is unrolled.
            alone = config.num_layers == 1
            apart = lambda block: remat_block(block, policy, prevent_cse=alone)
            return Transformer(config, remat=apart, sharding=sharding)
        return Transformer(
            config,
            stack=lambda block, params, carry: run_stack(block, policy, num_layers=config.num_layers)(params, carry),
            sharding=sharding,
        )


def remat(policy: Policy | LayerPlan, config: TransformerConfig, stack: str = "auto", requested: str = "") -> Remat:
    """A policy or plan as the layers run it.

    Args:
        policy: such as ``policies.get`` gives it.
        config: the model's.
        stack: ``auto`` takes the scan where one policy holds for all layers; ``scan`` and ``chain`` insist.
        requested: the spec that it comes from, where it isn't its own.

    Raises:
        ValueError: a plan that doesn't fit the layers, or that a scan can't run.
    """
    spec = requested or policy.spec
    if isinstance(policy, Policy):
        every = LayerPlan((Segment((policy,)),), label=policy.spec)
        every.resolve(config.num_layers)  # refuses a plan of another number of layers
        # A planned policy speaks of the values of the block as the executor runs it, not of the Flax module's.
        if stack == "scan" and policy.values:
            raise ValueError(f"stack: {spec!r} was planned for the executor of stacks; use --stack chain or auto")
        return Remat(policy, "scan", spec) if stack != "chain" and not policy.values else Remat(every, "chain", spec)
    uniform = policy.uniform(config.num_layers)  # also refuses a plan that doesn't fit
    planned = uniform is not None and bool(uniform.values)
    if stack == "chain" or (stack == "auto" and (uniform is None or planned)):
        return Remat(policy, "chain", spec)
    if planned:
        raise ValueError(f"stack: {spec!r} was planned for the executor of stacks; use --stack chain or auto")
    if uniform is None:
        raise ValueError(f"stack: a scan runs one policy for all layers, {spec!r} has several; use --stack chain")
    return Remat(uniform, "scan", spec)


def resolved(
    policy: Policy | LayerPlan | NeedsShapes,
    config: TransformerConfig,
    batch: int,
    seq: int,
    stack: str = "auto",
    target: str = "local",
    step: Callable[[Remat], Any] | None = None,
    block: Callable[..., Any] | None = None,
) -> Remat:
    """``remat``, of a request too, which the planner answers at these shapes.

    Args:
        policy, config, stack: as of ``remat``.
        batch, seq: shapes of what goes through the model at a time.
        target: the device that the planner plans for.
        step: the whole step under a remat and the shapes of its arguments; None: the layers alone count.
        block: one layer as the stack runs it; None: the model's own.

    Raises:
        ValueError: as of ``remat``, or a request that can't be met.
    """
    if not isinstance(policy, NeedsShapes):
        return remat(policy, config, stack)
    whole = None if step is None else lambda plan: step(remat(plan, config, stack))
    shapes, layer = layer_shapes(config, batch, seq), block or block_apply(config)
    request: Any = policy  # of jremat.plan
    plan = request.resolve(layer, *shapes, num_layers=config.num_layers, target=target, step=whole)
    return remat(plan, config, stack, requested=policy.spec)
