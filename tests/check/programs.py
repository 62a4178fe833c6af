"""Small programs, with a fault or without, for the lint."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import io_callback

import jremat
import policies
from jremat import tag

JAX = jax.checkpoint_policies
FULL = JAX.nothing_saveable
H = 16
X = jax.ShapeDtypeStruct((8, H), jnp.float32)
W = jax.ShapeDtypeStruct((H, H), jnp.float32)
LAYERS = 6
WS = jax.ShapeDtypeStruct((LAYERS, H, H), jnp.float32)


@dataclass(frozen=True)
class Case:
    """A call of the lint.

    Args:
        f: the function.
        args: its arguments.
        options: of the lint.
        third: whether jax_remat3 is on.
    """

    f: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    third: bool = False

    def lint(self) -> tuple[jremat.Finding, ...]:
        before = jax.config.jax_remat3
        jax.config.update("jax_remat3", self.third)
        try:
            return jremat.lint(self.f, *self.args, **self.options)
        finally:
            jax.config.update("jax_remat3", before)


def mlp(x, w):
    return jnp.sin(tag(x @ w, "up")) @ w


def loss_of(block, x, w):
    return block(x, w).sum()


def by_name(name):
    return jax.checkpoint(mlp, policy=JAX.save_only_these_names(name))


def dropped(x, w):
    up = x @ w
    tag(up, "up")  # the result is what bears the name
    return jnp.sin(up) @ w


def over_stages(policy, strict):
    inside = jremat.checkpoint(mlp, policy) if strict else jax.checkpoint(mlp, policy=policy)
    return jax.vmap(inside)


STAGES = (jax.ShapeDtypeStruct((3, 8, H), jnp.float32), jax.ShapeDtypeStruct((3, H, H), jnp.float32))


def every_second():
    """A policy with a counter, as torchtitan's is."""
    seen = {"mm": 0}

    def policy(prim, *_, **__):
        if prim.name == "dot_general":
            seen["mm"] += 1
        return prim.name == "dot_general" and seen["mm"] % 2 == 1

    return policy


def two_matmuls(x, w):
    return jnp.sin(jnp.cos(tag(x @ w, "first")) @ w) @ w


def unheard(x, w):  # which of its two remats jax.checkpoint takes is settled when it is called
    return jax.checkpoint(mlp, policy=lambda prim, *_, **__: prim.name in ("sin", "cos"))(x, w)


# -- placement ---------------------------------------------------------------------------------------------------


def twice(x, w):
    return jnp.tanh(jax.checkpoint(lambda x, w: jnp.tanh(mlp(x, w)) @ w, policy=FULL)(x, w)) + x


def stack_of(body, unroll=1):
    def run(ws, x):
        return lax.scan(lambda x, w: (body(x, w), None), x, ws, unroll=unroll)[0].sum()

    return run


def wide(x, w):
    """A block that keeps several times its input."""
    h = jnp.sin(jnp.concatenate([x @ w] * 4, -1))
    return x + jnp.cos(h * h)[:, :H] @ w


def unrolled(prevent_cse):
    def run(ws, x):
        for i in range(LAYERS):
            x = jax.checkpoint(wide, prevent_cse=prevent_cse)(x, ws[i])
        return x.sum()

    return run


# -- kernels -----------------------------------------------------------------------------------------------------


def flash(tagged):
    """A fused attention in miniature: keeps its output and its rows' log-sum-exp, makes its scores again."""

    @jax.custom_vjp
    def attention(q, k, v):
        return forward(q, k, v)[0]

    def forward(q, k, v):
        scores = q @ k.T
        lse = jax.nn.logsumexp(scores, -1, keepdims=True)
        out = jnp.exp(scores - lse) @ v
        if tagged:
            out, lse = tag(out, "context"), tag(lse, "lse")
        return out, (q, k, v, out, lse)

    def backward(kept, dout):
        q, k, v, out, lse = kept
        p = jnp.exp(q @ k.T - lse)
        dp = p * (dout @ v.T - (out * dout).sum(-1, keepdims=True))
        return dp @ k, dp.T @ q, p.T @ dout

    attention.defvjp(forward, backward)
    return attention


def attending(kernel):
    def block(x, w):
        q, k, v = x @ w, jnp.sin(x) @ w, jnp.cos(x) @ w
        return jnp.sin(kernel(q, k, v) @ w) @ w

    return block


def materialised(x, w):
    q, k, v = x @ w, jnp.sin(x) @ w, jnp.cos(x) @ w
    probs = tag(jax.nn.softmax(tag(q @ k.T, "attn_scores")), "attn_probs")
    return jnp.sin(probs @ v @ w) @ w


def named_outside(x, w):
    return attending(lambda q, k, v: tag(flash(False)(q, k, v), "context"))(x, w)


CONTEXT = JAX.save_only_these_names("context", "lse")
ONLY_CONTEXT = JAX.save_only_these_names("context")


# -- what is kept ------------------------------------------------------------------------------------------------


def bare_exp(x, w):
    return jax.checkpoint(jnp.exp)(x @ w) @ w


def whole_exp(x, w):
    return jax.checkpoint(lambda x, w: jnp.exp(x @ w) @ w)(x, w)


def dropped_out(inside):
    def f(x, w, key):
        def block(x, w, given):
            mask = jax.random.bernoulli(given, 0.9, x.shape) if inside else given
            return jnp.sin(jnp.where(mask, jnp.sin(x @ w), 0.0)) @ w

        given = key if inside else jax.random.bernoulli(key, 0.9, x.shape)
        return jax.checkpoint(block)(x, w, given)

    return f


KEY = jax.eval_shape(lambda: jax.random.key(0))


def carried(at_the_end=False, read_bare=False):
    def block(x, w):
        named = x if at_the_end else tag(x, "carry")
        out = named + jnp.sin(jnp.sin(x if read_bare else named) @ w)
        return tag(out, "carry") if at_the_end else jnp.cos(named) + out

    policy = JAX.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["carry"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return stack_of(jax.checkpoint(block, policy=policy))


# -- reruns ------------------------------------------------------------------------------------------------------


def printing(inside):
    def f(x, w):
        def block(x, w):
            up = x @ w
            if inside:
                jax.debug.callback(lambda _: None, up)
            return jnp.sin(up) @ w, up

        out, up = jax.checkpoint(block)(x, w)
        if not inside:
            jax.debug.callback(lambda _: None, up)
        return out

    return f


def refused(x, w):
    def block(x, w):
        up = x @ w
        io_callback(lambda _: None, None, lax.stop_gradient(up))
        return jnp.sin(up) @ w

    return jax.checkpoint(block)(x, w)


COUNTER = jax.new_ref(jnp.zeros(()))


def counting_ref(x, w):
    def block(x, w):
        COUNTER[...] += 1.0
        return jnp.sin(x @ w) @ w

    return jax.checkpoint(block)(x, w)


def routed(policy):
    def block(x, w):
        gate, place = lax.top_k(tag(x @ w, "router"), 2)
        return jnp.sin(jnp.take_along_axis(jnp.sin(x), place, 1) * gate) @ w[:2]

    return jax.checkpoint(block, policy=policy)


# -- peaks -------------------------------------------------------------------------------------------------------


def big_then_small(policy):
    """The scores are large, the choice from them is small, and while they are recomputed a large gradient waits."""

    def choose(x, table, row):
        place = (x @ table.T > 0).astype(jnp.int32).sum(-1, keepdims=True)
        return tag(place, "choice") * row

    def loss(x, table, row, head):
        chosen = jax.checkpoint(choose, policy=policy)(x, table, row)
        return jnp.sin(jnp.sin(chosen) @ head).sum()

    return loss


TABLE = (
    jax.ShapeDtypeStruct((1024, H), jnp.float32),
    jax.ShapeDtypeStruct((16384, H), jnp.float32),
    jax.ShapeDtypeStruct((8192,), jnp.float32),
    jax.ShapeDtypeStruct((8192, H), jnp.float32),
)


def grouped(plan, layers):
    def run(ws, x):
        return jremat.stack(lambda w, x: wide(x, w), policies.get(plan), num_layers=layers)(ws, x).sum()

    return run


def deep(layers):
    return jax.ShapeDtypeStruct((layers, H, H), jnp.float32), LONG


LONG = jax.ShapeDtypeStruct((2**16, H), jnp.float32)  # 4 MiB: what is small a compiler recomputes for nothing


def scan_inside(ws, x):
    return jnp.sin(jax.checkpoint(lambda ws, x: lax.scan(lambda x, w: (wide(x, w), None), x, ws)[0])(ws, x)).sum()


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return wide(x, self.param("w", nn.initializers.ones, (H, H)))


def remat_scan(lengths):
    stack = nn.remat_scan(Layer, lengths=lengths)()
    variables = jax.eval_shape(stack.init, jax.random.key(0), LONG)
    return Case(lambda v, x: stack.apply(v, x).sum(), (variables, LONG))


def with_inner_loops(remat, blocks):
    """Blocks that are loops themselves, one after the other, unrolled."""

    def block(x):
        return lax.scan(lambda c, _: (c + jnp.sin(jnp.cos(c)), None), x, None, length=20)[0]

    def loss(x):
        for _ in range(blocks):
            x = remat(block)(x)
        return x.sum()

    return loss
