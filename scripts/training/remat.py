"""How a policy reaches the model: one policy through the scan, a plan through the chain."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jremat
import policies
from jremat.estimate.config import TransformerConfig
from jremat.plan.request import Request
from jremat.policy import LayerPlan, Policy, Segment
from jremat.transform import chain
from models.transformer import Carry, Transformer, block_apply, init_params


@dataclass(frozen=True)
class Remat:
    """A policy as the stack runs it.

    Args:
        spec: as the user wrote it.
        plan: the policy of all layers, or a plan over them.
        stack: ``scan`` or ``chain``.
    """

    spec: str
    plan: Policy | LayerPlan
    stack: str

    @property
    def name(self) -> str:
        """The spec, and what it came to where it was a wish."""
        return self.spec if self.plan.spec == self.spec else f"{self.spec} = {self.plan.spec}"

    def model(self, config: TransformerConfig) -> Transformer:
        """The transformer under this policy."""
        if isinstance(self.plan, Policy):
            policy = self.plan
            # Inside a scan XLA can't merge the replay with the forward; a scan of one layer is unrolled.
            alone = config.num_layers == 1
            return Transformer(config, remat=lambda block: jremat.remat(block, policy, prevent_cse=alone))
        plan = self.plan
        return Transformer(
            config,
            stack=lambda block, params, carry: chain.stack(block, plan, num_layers=config.num_layers)(params, carry),
        )


def remat(
    spec: str,
    stack: str,
    config: TransformerConfig,
    micro_batch: int,
    seq: int,
    target: str = "local",
    step: Callable[[Remat], Any] | None = None,
    block: Callable[..., Any] | None = None,
) -> Remat:
    """What the layers run under.

    Args:
        spec: a policy's.
        stack: ``auto`` takes the scan where one policy holds for all layers; ``scan`` and ``chain`` insist.
        config: the model's.
        micro_batch, seq: shapes of what goes through the model at a time, for a spec that needs them.
        target: the device that a spec that needs its memory plans for.
        step: the whole step under a remat and the shapes of its arguments, for a spec that needs its memory; None: the
            layers alone count.
        block: one layer as the stack runs it; None: the model's own.

    Raises:
        ValueError: an unknown spec; a plan that doesn't fit the layers, or that a scan can't run.
    """
    policy = policies.get(spec)
    if isinstance(policy, Request):
        whole = None if step is None else lambda plan: step(run_as(spec, plan, stack, config))
        shapes = layer_shapes(config, micro_batch, seq)
        run = block or block_apply(config)
        policy = policy.resolve(run, *shapes, num_layers=config.num_layers, target=target, step=whole)
    return run_as(spec, policy, stack, config)


def plans(spec: str) -> bool:
    """Whether the planner is asked, ``auto``, ``budget`` or ``overhead``, which takes its time.

    Raises:
        ValueError: an unknown spec.
    """
    policy = policies.get(spec)
    return isinstance(policy, Request) and policy.kind != "sqrt"


def run_as(spec: str, policy: Policy | LayerPlan, stack: str, config: TransformerConfig) -> Remat:
    """A policy or plan as the stack runs it.

    Args:
        spec, stack, config: as of ``remat``.
        policy: that the spec came to.
    """
    if isinstance(policy, Policy):
        every = LayerPlan((Segment((policy,)),), label=policy.spec)
        every.resolve(config.num_layers)  # refuses a plan of another number of layers
        # A planned policy speaks of the values of the block as the executor runs it, not of the Flax module's.
        if stack == "scan" and policy.values:
            raise ValueError(f"stack: {spec!r} was planned for the executor of stacks; use --stack chain or auto")
        if stack != "chain" and not policy.values:
            return Remat(spec, policy, "scan")
        return Remat(spec, every, "chain")
    uniform = policy.uniform(config.num_layers)  # also refuses a plan that doesn't fit
    if stack == "chain" or (stack == "auto" and uniform is None):
        return Remat(spec, policy, "chain")
    if uniform is None:
        raise ValueError(f"stack: a scan runs one policy for all layers, {spec!r} has several; use --stack chain")
    return Remat(spec, uniform, "scan")


def layer_shapes(config: TransformerConfig, micro_batch: int, seq: int) -> tuple[Any, Any]:
    """One layer's parameters and its carry, as shapes."""

    def make() -> tuple[Any, Carry]:
        params = init_params(config, jax.random.key(0))["blocks"]
        x = jnp.zeros((micro_batch, seq, config.hidden), config.compute_dtype)
        key = jax.random.key(0) if config.dropout else None
        return jax.tree.map(lambda leaf: leaf[0], params), Carry(x, jnp.int32(0), key, jnp.arange(seq))

    return jax.eval_shape(make)
