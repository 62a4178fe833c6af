"""A small stack of blocks with tags, and what the tests measure of it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jremat.policy.names import tag

LAYERS, BATCH, SEQ, HIDDEN = 16, 2, 128, 128
POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "keep_up": jax.checkpoint_policies.save_only_these_names("mlp_up"),
    "offload_up": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["mlp_up"], offload_src="device",
        offload_dst="pinned_host",
    ),
}  # fmt: skip
UP_BYTES = LAYERS * BATCH * SEQ * 4 * HIDDEN * 2  # what keeping mlp_up keeps, in bf16


def block(params: Any, x: jax.Array) -> jax.Array:
    """A pre-activation MLP block: x [b, s, h] -> [b, s, h]."""
    up = tag(x @ params["up"], "mlp_up")
    return x + jnp.tanh(up) @ params["down"]


def step(policy: str) -> Any:
    """Value and gradient of the stack under a policy, jitted."""
    body = jax.checkpoint(block, policy=POLICIES[policy], prevent_cse=False)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, p: (body(p, x), None), x, params)
        return x.astype(jnp.float32).mean()

    return jax.jit(jax.value_and_grad(loss))


@functools.cache
def shapes() -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """Arguments of ``step``: parameters and the stack's input, no sharding."""
    at = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
    params = {"up": at(LAYERS, HIDDEN, 4 * HIDDEN), "down": at(LAYERS, 4 * HIDDEN, HIDDEN)}
    return params, at(BATCH, SEQ, HIDDEN)
