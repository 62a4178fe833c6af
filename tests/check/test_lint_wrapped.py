"""Every rule about a block finds the same fault however the block is wrapped: by JAX, by ours in a scan, in a stack."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jremat
import policies
from jremat import tag
from jremat.check import RULES
from jremat.transform.scan import scan_stack
from tests.check.programs import (
    FULL,
    JAX,
    LAYERS,
    ONLY_CONTEXT,
    WS,
    H,
    X,
    attending,
    bare_exp,
    dropped,
    dropped_out,
    every_second,
    flash,
    mlp,
    named_outside,
    printing,
    routed,
    twice,
    two_matmuls,
)


def only_experts(x, w):
    one = jnp.einsum("ebh,ehk->ebk", x.reshape(2, 4, H), jnp.stack([w, w]))
    return jnp.einsum("ebh,ehk->ebk", jnp.sin(one), jnp.stack([w, w])).reshape(8, H)


def handed_on(x, w):
    return tag(x + jnp.sin(jnp.sin(x) @ w), "carry")


def masked(x, w):
    return dropped_out(inside=False)(x, w, jax.random.key(0))


OFFLOAD = JAX.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["carry"],
    offload_src="device",
    offload_dst="pinned_host",
)

# By rule: the block, JAX's policy that is the fault and ours; none where the fault stands inside the block.
UNDER_A_POLICY: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "double-remat": (twice, FULL, "full"),
    "flash-name-outside": (named_outside, ONLY_CONTEXT, "save:context"),
    "offload-carry": (handed_on, OFFLOAD, "offload:carry"),
    "decision-rerun": (lambda x, w: routed(JAX.everything_saveable)(x, w), None, "full"),
}
# What jremat.checkpoint and the stack refuse, so that the lint finds it only where they are told to be lenient.
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "unknown-name": (mlp, "save:upp"),
    "no-batch-dims": (only_experts, "dots_with_no_batch_dims_saveable"),
    "core-attn-fused": (attending(flash(True)), "core_attn"),
}
INSIDE: dict[str, Callable[..., Any]] = {
    "policy-none": jax.checkpoint(mlp, policy=None),
    "counted-matmuls": jax.checkpoint(two_matmuls, policy=every_second()),
    "double-remat": jax.checkpoint(twice, policy=FULL),
    "core-attn-fused": attending(jax.checkpoint(flash(True), policy=FULL)),
    "saves-nothing": bare_exp,
    "dropout-mask": masked,
    "side-effect": printing(inside=True),
    "decision-rerun": routed(FULL),
    "unknown-name": jax.checkpoint(mlp, policy=JAX.save_only_these_names("upp")),
    "no-batch-dims": jax.checkpoint(only_experts, policy=JAX.dots_with_no_batch_dims_saveable),
}
ELSEWHERE = {
    # Faults of a whole program, which no block has: their programs, the executor's among them, stand in cases.py.
    *("whole-loss", "bare-scan-body", "cse-undone", "group-size", "peak-rises", "replays-side-by-side"),
    "dropped-tag",  # no fault under ours, which keeps the value all the same; see below
    "unheard-policy",  # of plain callables under jax_remat3: ours are heard
}


def scanned(block: Callable[..., Any]) -> Callable[..., Any]:
    return lambda ws, x: lax.scan(lambda x, w: (block(x, w), None), x, ws)[0].sum()


def stacked(block: Callable[..., Any], spec: str, make: Any = jremat.stack) -> Callable[..., Any]:
    run = make(lambda w, x: block(x, w), policies.get(spec), num_layers=LAYERS)
    return lambda ws, x: run(ws, x).sum()


def rules_of(f: Callable[..., Any]) -> set[str]:
    found = jremat.lint(f, WS, X)
    for finding in found:
        assert "jremat." not in finding.message and ".py:" in finding.place
        assert finding.cost_bytes > 0 or finding.cost_flops > 0
    return {finding.rule for finding in found}


def test_every_rule_is_here_or_belongs_to_a_whole_program():
    assert {rule.slug for rule in RULES} == {*UNDER_A_POLICY, *INSIDE, *ELSEWHERE}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("slug", UNDER_A_POLICY)
def test_a_fault_of_a_policy(slug):
    block, of_jax, spec = UNDER_A_POLICY[slug]
    if of_jax is not None:
        assert slug in rules_of(scanned(jax.checkpoint(block, policy=of_jax)))
    assert slug in rules_of(scanned(jremat.checkpoint(block, policies.get(spec))))
    for plan in (spec, f"every_k:3,{spec}", f"mix:2*none,rest*{spec}"):
        assert slug in rules_of(stacked(block, plan)), plan
    assert slug in rules_of(stacked(block, spec, scan_stack))


def test_a_dropped_tag_is_a_fault_under_plain_remat_alone():
    plain, one = jax.checkpoint(dropped, policy=JAX.save_only_these_names("up")), jax.eval_shape(lambda ws: ws[0], WS)
    assert rules_of(scanned(plain)) == {"dropped-tag"}
    assert jremat.residuals(plain, X, one).total_bytes == 0
    for ours in (scanned(jremat.checkpoint(dropped, policies.get("save:up"))), stacked(dropped, "save:up")):
        assert rules_of(ours) == set()
    assert jremat.residuals(dropped, X, one, policy=policies.get("save:up")).total_bytes == 4 * X.size


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("slug", INSIDE)
def test_a_fault_inside_of_a_block(slug):
    block = INSIDE[slug]
    assert slug in rules_of(scanned(block))
    for plan in ("none", "mix:2*every_k:2,rest*none"):
        assert slug in rules_of(stacked(block, plan)), plan
    assert slug in rules_of(stacked(block, "none", scan_stack))


@pytest.mark.filterwarnings("ignore")
def test_costs_and_lines_are_those_of_the_plain_remat():
    plain = jremat.lint(scanned(jax.checkpoint(handed_on, policy=OFFLOAD)), WS, X)
    ours = jremat.lint(scanned(jremat.checkpoint(handed_on, policies.get("offload:carry"))), WS, X)
    in_stack = jremat.lint(stacked(handed_on, "offload:carry"), WS, X)
    assert [(f.place, f.cost_bytes) for f in plain] == [(f.place, f.cost_bytes) for f in ours]
    assert [(f.place, f.cost_bytes) for f in plain] == [(f.place, f.cost_bytes) for f in in_stack]
    assert plain[0].cost_bytes == LAYERS * 8 * H * 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("slug", REFUSED)
def test_a_fault_that_is_refused_unless_lenient(slug):
    block, spec = REFUSED[slug]
    policy = policies.get(spec)
    assert rules_of(scanned(jremat.checkpoint(block, policy, strict=False))) == {slug}
    one = jax.ShapeDtypeStruct((H, H), jnp.float32)
    found = jremat.lint(lambda w, x: block(x, w), one, X, policy=policy, num_layers=LAYERS)
    assert {finding.rule for finding in found} == {slug}
    for refused in (scanned(jremat.checkpoint(block, policy)), stacked(block, spec)):
        with pytest.raises(ValueError, match=r"no value bears|matches nothing"):
            jremat.lint(refused, WS, X)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spec", ["none", "full", "save:up", "every_k:3", "revolve:2", "mix:2*full,rest*save:up"])
def test_a_stack_without_a_fault_has_no_finding(spec):
    assert rules_of(stacked(lambda x, w: x + mlp(x, w), spec)) == set()
