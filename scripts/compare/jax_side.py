"""The Flax model under one policy: what it keeps, does again, needs at its peak, and the step itself."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

import jremat
import policies
from jremat.estimator.config import TransformerConfig
from jremat.graph import Graph
from jremat.measure import Memory, program
from jremat.planner.read_block import read_block
from jremat.planner.roofline import matmul_flops
from jremat.policy import LayerPlan, Policy
from jremat.transform.chain import stack
from jremat.transform.scan import scan_stack
from models.remat import remat, resolved
from models.transformer import Carry, block_apply, init_params, layer_shapes, mean_loss


@dataclass(frozen=True)
class Size:
    """A model and its batch."""

    config: TransformerConfig
    batch: int
    seq: int

    @cached_property
    def params(self) -> Any:
        """Shapes of the parameters."""
        return jax.eval_shape(lambda: init_params(self.config, jax.random.key(0)))

    @property
    def tokens(self) -> jax.ShapeDtypeStruct:
        """Of a batch, and of its targets."""
        return jax.ShapeDtypeStruct((self.batch, self.seq), jnp.int32)


def plan_of(spec: str, size: Size) -> Policy | LayerPlan:
    """What a spec comes to at these shapes.

    Raises:
        ValueError: an unknown spec, or one that can't be resolved.
    """
    return resolved(policies.get(spec), size.config, size.batch, size.seq, target="cpu").policy


def step(plan: Policy | LayerPlan, config: TransformerConfig) -> Callable[..., Any]:
    """``step(params, tokens, targets, key)`` to the loss and its gradient; key None: no dropout."""
    model = remat(plan, config).model(config)

    def gradient(params: Any, tokens: Any, targets: Any, key: Any = None) -> Any:
        return jax.value_and_grad(lambda p: mean_loss(model, p, tokens, targets, key))(params)

    return gradient


def compiled(plan: Policy | LayerPlan, size: Size) -> tuple[Memory, Callable[..., Any]]:
    """The step's memory as compiled for the CPU, and the compiled step."""
    return program(step(plan, size.config), size.params, size.tokens, size.tokens, target="cpu", num_buffers=0)


@dataclass(frozen=True)
class Stack:
    """What the stack of blocks alone keeps and does again, its input counted.

    Args:
        kept: bytes by tensor; untagged ones by the op that made them, in brackets.
        forward_flops, recomputed_flops: of matmuls.
        recomputed_matmuls: how many, those inside a fused attention in plain JAX too.
    """

    kept: dict[str, int]
    forward_flops: int
    recomputed_flops: int
    recomputed_matmuls: int

    @property
    def kept_bytes(self) -> int:
        """All of it."""
        return sum(self.kept.values())


def measured_stack(plan: Policy | LayerPlan, size: Size) -> Stack:
    """Counted on the program; nothing is run."""
    config = size.config
    layer = block_apply(config)
    one, carry = layer_shapes(config, size.batch, size.seq)
    runner = scan_stack if isinstance(plan, Policy) else stack

    def run(params: Any, carry: Carry) -> Any:
        return runner(layer, plan, num_layers=config.num_layers)(params, carry._replace(x=carry.x + 0)).x

    def gradient(params: Any, carry: Carry) -> Any:
        loss = lambda params, x: jnp.square(run(params, carry._replace(x=x))).sum()
        return jax.value_and_grad(loss, (0, 1))(params, carry.x)

    params = size.params["blocks"]
    tagged = _tagged(jremat.trace(layer, one, carry))
    kept: dict[str, int] = {}
    for row in jremat.residuals(run, params, carry).kept:
        if row.dtype == "int32" and row.name is None:
            continue  # the layer's number in the carry, which PyTorch's loop holds in Python
        place = row.mark.rpartition(".")[2] if row.mark else ""
        loop = "block_in" if row.primitive == "scan" else f"({row.primitive})"  # what a loop hands to itself
        name = row.name or tagged.get(place, loop)
        name = "attn_out" if name == "attn_fused" else name  # the same value, from a fused kernel
        kept[name] = kept.get(name, 0) + row.bytes
    counted = jremat.flops(gradient, params, carry)
    return Stack(kept, counted.model // 3, counted.recompute, counted.count.recompute)


def share_keeping(kept_bytes: int, size: Size) -> float:
    """The share B under which ``budget:B`` lets the layers keep so many bytes, their inputs counted; at most 1."""
    layer, shapes = block_apply(size.config), layer_shapes(size.config, size.batch, size.seq)
    problem = read_block(layer, *shapes, cost=matmul_flops, fetched=1).problem
    least, most = (problem.outcome(marks).kept_bytes for marks in ((), problem.marks))
    x = shapes[1].x
    allowed = kept_bytes / size.config.num_layers - x.size * x.dtype.itemsize
    return min(1.0, max(0.0, (allowed - least) / (most - least)))


def _tagged(graph: Graph) -> dict[str, str]:
    """For each matmul, the first tag on the way from it: it is kept before its bias is added and it is tagged."""
    found: dict[str, str] = {}
    for op in reversed(graph.ops):
        names = [graph.values[output].name or found.get(output) for output in op.outputs]
        for given in op.inputs:
            if names and names[0] and given not in graph.inputs:
                found[given] = names[0]
    return {value: name for value, name in found.items() if graph.values[value].primitive == "dot_general"}
