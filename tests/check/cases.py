"""For every rule of the lint programs that have the fault and twins that haven't."""

from functools import partial

import jax
import jax.numpy as jnp

import jremat
import policies
from tests.check.programs import (
    CONTEXT,
    FULL,
    JAX,
    KEY,
    LAYERS,
    LONG,
    ONLY_CONTEXT,
    STAGES,
    TABLE,
    WS,
    Case,
    W,
    X,
    attending,
    bare_exp,
    big_then_small,
    by_name,
    carried,
    counting_ref,
    deep,
    dropped,
    dropped_out,
    every_second,
    flash,
    grouped,
    loss_of,
    materialised,
    mlp,
    named_outside,
    over_stages,
    printing,
    refused,
    remat_scan,
    routed,
    scan_inside,
    stack_of,
    twice,
    two_matmuls,
    unheard,
    unrolled,
    whole_exp,
    wide,
    with_inner_loops,
)

FAULTS: dict[str, list[Case]] = {
    "unknown-name": [
        Case(by_name("upp"), (X, W)),
        Case(mlp, (X, W), {"policy": policies.get("save:upp")}),
        Case(mlp, (X, W), {"policy": policies.get("offload:upp")}),
        Case(jax.checkpoint(mlp, policy=lambda prim, *_, **p: p.get("name") in ("upp",)), (X, W)),
        Case(partial(loss_of, lambda x, w: by_name("upp")(jnp.sin(x) @ w, w)), (X, W)),
    ],
    "dropped-tag": [Case(jax.checkpoint(dropped, policy=JAX.save_only_these_names("up")), (X, W))],
    "no-batch-dims": [
        Case(over_stages(JAX.dots_with_no_batch_dims_saveable, strict=False), STAGES),
        Case(jax.vmap(mlp), STAGES, {"policy": policies.get("dots_with_no_batch_dims_saveable")}),
    ],
    "policy-none": [Case(jax.checkpoint(mlp, policy=None), (X, W))],
    "counted-matmuls": [Case(jax.checkpoint(two_matmuls, policy=every_second()), (X, W))],
    "unheard-policy": [Case(unheard, (X, W), third=True)],
    "double-remat": [
        Case(jax.checkpoint(twice, policy=FULL), (X, W)),
        Case(jax.checkpoint(jax.checkpoint(mlp, policy=JAX.dots_saveable), policy=FULL), (X, W)),
        Case(stack_of(jax.checkpoint(twice, policy=FULL)), (WS, X)),
    ],
    "whole-loss": [
        Case(jax.checkpoint(lambda x, w: mlp(mlp(x, w), w).sum(), policy=FULL), (X, W)),
        Case(lambda x, w: mlp(mlp(x, w), w).sum(), (X, W), {"policy": policies.get("full")}),
    ],
    "bare-scan-body": [Case(jax.checkpoint(stack_of(wide)), (WS, X)), Case(scan_inside, (WS, X))],
    "cse-undone": [
        Case(unrolled(False), (WS, X)),
        Case(stack_of(jax.checkpoint(wide, prevent_cse=False), LAYERS), (WS, X)),
    ],
    "core-attn-fused": [
        Case(attending(flash(True)), (X, W), {"policy": policies.get("core_attn")}),
        Case(attending(jax.checkpoint(flash(True), policy=FULL)), (X, W)),
    ],
    "flash-name-outside": [
        Case(jax.checkpoint(named_outside, policy=ONLY_CONTEXT), (X, W)),
        Case(named_outside, (X, W), {"policy": policies.get("save:context")}),
    ],
    "saves-nothing": [
        Case(bare_exp, (X, W)),
        Case(jax.checkpoint(mlp, policy=lambda prim, *_, **params: params.get("name") != "up"), (X, W)),
    ],
    "dropout-mask": [Case(dropped_out(inside=False), (X, W, KEY))],
    "offload-carry": [Case(carried(at_the_end=True), (WS, X)), Case(carried(read_bare=True), (WS, X))],
    "side-effect": [Case(printing(inside=True), (X, W)), Case(refused, (X, W)), Case(counting_ref, (X, W))],
    "decision-rerun": [Case(routed(FULL), (X, W))],
    "group-size": [
        Case(grouped("every_k:8", 16), deep(16)),
        Case(lambda w, x: wide(x, w), (W, LONG), {"policy": policies.get("every_k:8"), "num_layers": 16}),
        remat_scan((2, 8)),
    ],
    "peak-rises": [Case(big_then_small(FULL), TABLE)],
    "replays-side-by-side": [Case(with_inner_loops(jax.checkpoint, blocks=4), (LONG,))],
}
"""By rule: programs that have the fault, in the forms in which users write it."""

CLEAN: dict[str, list[Case]] = {
    "unknown-name": [Case(by_name("up"), (X, W)), Case(mlp, (X, W), {"policy": policies.get("save:up,upp?")})],
    "dropped-tag": [Case(jax.checkpoint(mlp, policy=JAX.save_only_these_names("up")), (X, W))],
    "no-batch-dims": [
        Case(over_stages(policies.get("dots_with_no_batch_dims_saveable"), strict=True), STAGES),
        Case(jax.vmap(jax.checkpoint(mlp, policy=JAX.dots_with_no_batch_dims_saveable), (0, None)), (STAGES[0], W)),
    ],
    "policy-none": [Case(jax.checkpoint(mlp, policy=JAX.nothing_saveable), (X, W)), Case(mlp, (X, W))],
    "counted-matmuls": [Case(jax.checkpoint(two_matmuls, policy=JAX.save_only_these_names("first")), (X, W))],
    "unheard-policy": [Case(jremat.checkpoint(mlp, policies.get("save:up")), (X, W), third=True)],
    "double-remat": [Case(stack_of(jax.checkpoint(lambda x, w: jnp.tanh(wide(x, w)))), (WS, X))],
    "whole-loss": [Case(stack_of(jax.checkpoint(wide)), (WS, X))],
    "bare-scan-body": [Case(stack_of(jax.checkpoint(wide)), (WS, X))],
    "cse-undone": [Case(unrolled(True), (WS, X)), Case(stack_of(jax.checkpoint(wide, prevent_cse=False)), (WS, X))],
    "core-attn-fused": [
        Case(materialised, (X, W), {"policy": policies.get("but:attn_scores,attn_probs")}),
        Case(jax.checkpoint(attending(flash(True)), policy=CONTEXT), (X, W)),
    ],
    "flash-name-outside": [Case(jax.checkpoint(attending(flash(True)), policy=CONTEXT), (X, W))],
    "saves-nothing": [Case(whole_exp, (X, W)), Case(mlp, (X, W), {"policy": policies.get("but:up")})],
    "dropout-mask": [Case(dropped_out(inside=True), (X, W, KEY))],
    "offload-carry": [Case(carried(), (WS, X))],
    "side-effect": [Case(printing(inside=False), (X, W))],
    "decision-rerun": [Case(routed(JAX.save_only_these_names("router")), (X, W))],
    "group-size": [
        Case(grouped("every_k:2", 16), deep(16)),
        Case(lambda w, x: wide(x, w), (W, LONG), {"policy": policies.get("full"), "num_layers": 16}),
    ],
    "peak-rises": [Case(big_then_small(JAX.save_only_these_names("choice")), TABLE)],
    "replays-side-by-side": [
        Case(with_inner_loops(lambda block: block, blocks=4), (LONG,)),
        Case(unrolled(True), (WS, X)),
    ],
}
"""By rule: the same without the fault; no rule may fire on any of them."""
