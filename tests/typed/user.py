"""A user's program under a strict type checker; never run. Each ``reveal_type`` stands beside what it must be."""

from typing import reveal_type

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import jremat
import policies
from jremat import Policy


def mlp(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(jremat.tag(x @ w, "up"))


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class NnxBlock(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


x, w = jnp.ones((8, 8)), jnp.ones((8, 8))
save_up = policies.get("save:up")
policy: Policy = save_up
plan: jremat.LayerPlan = policies.get("every_k:4")
jax.checkpoint(mlp, policy=save_up)
nn.remat(Block, policy=save_up)
nn.remat(Block, policy=policy)

reveal_type(jremat.checkpoint(mlp, save_up))  # def (x: Array, w: Array) -> Array
reveal_type(jremat.remat(mlp, policy, static_argnames="w"))  # def (x: Array, w: Array) -> Array
reveal_type(jremat.remat(NnxBlock(), save_up))  # def (x: Array) -> Array
reveal_type(jremat.remat(NnxBlock, save_up)())  # NnxBlock
reveal_type(jremat.remat(Block, save_up))  # type[Block]
reveal_type(jremat.checkpoint(Block, policy=save_up))  # type[Block]
reveal_type(jremat.predicted_memory(mlp, x, w).peak_bytes)  # int
reveal_type(jremat.compiled_memory(mlp, x, w).peak_bytes)  # int
reveal_type(jremat.check_memory(mlp, x, w, target="h200").fits)  # bool
reveal_type(jremat.stack(layer, plan, num_layers=4))  # def (w: Array, x: Array) -> Array
reveal_type(jremat.stack(layer, policies.get("every_k:4"), num_layers=4))  # def (w: Array, x: Array) -> Array
reveal_type(policies.get("every_k:4").policies(3))  # tuple[Policy, ...]
reveal_type(policies.get("every_k:4").resolve(3))  # tuple[Segment, ...]
reveal_type(policies.get("sqrt").resolve(layer, w, x, num_layers=4))  # PolicyLike
reveal_type(policies.translate("megatron", "--recompute-activations").policy)  # PolicyLike
reveal_type(save_up.spec)  # str
reveal_type(Policy.save("a") | policies.get("save:b"))  # Policy
reveal_type(policies.names())  # tuple[str, ...]
reveal_type(policies.table()[0].spec)  # str
reveal_type(jremat.tag(x, "up"))  # Array

found = jremat.plan(layer, w, x, num_layers=4, hbm_bytes=2**20, target="cpu")
reveal_type(found.peak_bytes)  # int | None
reveal_type(jremat.stack(layer, found.policy, num_layers=4))  # def (w: Array, x: Array) -> Array
reveal_type(jremat.checkpoint(mlp, jremat.plan(mlp, x, w, hbm_bytes=2**20).policy))  # def (x: Array, w: Array) -> Array
reveal_type(jremat.residuals(mlp, x, w, policy=save_up).total_bytes)  # int
reveal_type(jremat.residuals(mlp, x, w, policy=save_up).kept[0].name)  # str | None
reveal_type(jremat.flops(mlp, x, w).count.recompute)  # int
reveal_type(jremat.lint(mlp, x, w, policy=save_up)[0].rule)  # str
reveal_type(jremat.replay(mlp, x, w, policy=save_up).equal)  # bool
reveal_type(jremat.explain(mlp, x, w, policy=save_up))  # Explanation


def by_kind(spec: str) -> jremat.Policy | jremat.LayerPlan:
    one = policies.get(spec)
    if isinstance(one, jremat.Request):
        return one.resolve(layer, w, x, num_layers=4)
    if isinstance(one, jremat.LayerPlan):
        return one
    return one


jremat.checkpoint(mlp, "save:up")  # error: call-overload
jremat.checkpoint(mlp, save_up)(x)  # error: call-arg
jremat.remat(3, save_up)  # error: call-overload
