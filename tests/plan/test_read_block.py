"""A block as the planner reads it, beside JAX itself: bytes kept, matmuls run again, gradients, and forced keeps."""

import functools
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jremat
import policies
from jremat.estimator.hardware import chip
from jremat.planner.block import Budget, best
from jremat.planner.read_block import read_block
from jremat.planner.roofline import Roofline, matmul_flops
from jremat.planner.stack import mixed
from jremat.policy import FULL, NONE, Policy
from jremat.transform.groups import gradient_step
from models.transformer import Block, Carry, block_apply
from tests.models.families import compiled
from tests.plan.blocks import complex_args, complex_carry, looped, mlp, mlp_args, tanh_mlp
from tests.transform.blocks import case
from tests.transform.jax_count import jax_kept_bytes

NAMES = ("gpt-dot", "gpt-blockwise", "llama-dot")
SHARES = (0, 0.03, 0.15, 0.4, 0.7, 1)
"""Of the bytes that keeping all takes."""


@functools.cache
def zoo(name):
    """A small block of the zoo; GPT's materialised attention with dropout, and bare without."""
    family, attention, *bare = name.split("-")
    found = case(family, attention)
    return replace(found, config=replace(found.config, dropout=0.0)) if bare else found


@functools.cache
def planned(name, names_only=False):
    block = zoo(name)
    cost = Roofline(chip("h200"))
    return read_block(
        block.function(), *block.args(), cost=cost, names_only=names_only, host_link_bytes_per_second=5e10
    )


def choices(name, names_only=False):
    block = planned(name, names_only)
    most = block.problem.outcome(block.problem.marks).kept_bytes
    found = [best(block.problem, Budget(int(share * most))) for share in SHARES]
    return [(outcome, block.policy(outcome)) for outcome in found]


def gradient(f, policy):
    rematted = jremat.checkpoint(f, policy)
    return jax.value_and_grad(lambda params, x: rematted(params, x).astype(jnp.float32).sum(), (0, 1))


def one_block_policies():
    """Those of the zoo, each once, and some more by name; the planner doesn't compress."""
    specs = (*policies.names(), "but:mlp_act", "save:attn_fused?,attn_lse?,mlp_up")
    found = {p.canonical_spec: p for p in map(policies.get, specs) if isinstance(p, Policy) and not p.compresses}
    return [found[spec] for spec in sorted(found)]


def half_a_kernel(case_, block, outcome):
    """FLOPs that JAX 0.12 doesn't run again where of a fused kernel's results the log-sum-exp alone is wanted: it looks
    into the loop and drops the context's matmuls. 0.10 runs the kernel whole, and so the planner charges it."""
    kept = {block.problem.nodes[place].name for place in outcome.held}
    if jax.__version_info__ < (0, 12) or case_.config.attention != "blockwise":
        return 0
    return (
        2 * case_.batch * case_.seq**2 * case_.config.hidden
        if {"attn_fused", "attn_lse"} & kept == {"attn_fused"}
        else 0
    )


@pytest.mark.parametrize("name", ("gpt-dot", "llama-blockwise"))
def test_bytes_and_matmuls_of_the_zoos_policies_are_jaxs(name):
    block, f, args = planned(name), zoo(name).function(), zoo(name).args()
    seen = 0
    for policy in one_block_policies():
        try:
            outcome = block.outcome(policy)
        except ValueError:  # it speaks of what this block hasn't got, and jremat.residuals refuses it too
            with pytest.raises(ValueError):
                jremat.residuals(f, *args, policy=policy)
            continue
        kept = jremat.residuals(f, *args, policy=policy)
        assert (outcome.total_bytes, outcome.host_bytes) == (kept.total_bytes, kept.host_bytes), policy
        counted = jremat.flops(gradient(f, policy), *args).recompute
        assert outcome.recompute_flops == counted + half_a_kernel(zoo(name), block, outcome), policy
        seen += 1
    assert seen > 15


@pytest.mark.parametrize("name", NAMES)
def test_jaxs_own_count_of_a_plans_kept_bytes_is_the_plans(name):
    f, args = zoo(name).function(), zoo(name).args()
    for outcome, policy in choices(name):
        assert jax_kept_bytes(jremat.checkpoint(f, policy), *args) == outcome.kept_bytes, policy
        assert jremat.flops(gradient(f, policy), *args).recompute == outcome.recompute_flops, policy


@pytest.mark.parametrize("name", NAMES)
def test_no_named_policy_is_faster_at_no_more_bytes(name):
    block = planned(name)
    for policy in one_block_policies():
        try:
            outcome = block.outcome(policy)
        except ValueError:
            continue
        exact = best(block.problem, Budget(outcome.kept_bytes, outcome.host_bytes))
        assert exact.recompute_seconds <= outcome.recompute_seconds * (1 + 1e-9), policy


def largest_error(found, wanted):
    """Of all leaves, relative to the largest value of each."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), 1e-30)) for a, b in pairs)


def test_gradients_under_a_plan_are_nones_with_dropout_on():
    f, args = zoo("gpt-dot").function(), zoo("gpt-dot").args()
    assert zoo("gpt-dot").config.dropout
    wanted = compiled(gradient(f, NONE))(*args)
    for _, policy in choices("gpt-dot")[::2]:
        assert largest_error(compiled(gradient(f, policy))(*args), wanted) <= 1e-6, policy


L = 3


@pytest.fixture(scope="module")
def layers():
    """Of GPT's block with dropout: the block as the stack runs it, one layer's parameters, L layers', the carry."""
    params, x = zoo("gpt-dot").args()
    grow = lambda leaf: jnp.stack([leaf * (1 + 0.01 * i) for i in range(L)])
    carry = Carry(x, jnp.int32(0), jax.random.key(3), jnp.arange(x.shape[1]))
    return block_apply(replace(zoo("gpt-dot").config, num_layers=L)), params, jax.tree.map(grow, params), carry


@pytest.fixture(scope="module")
def read(layers):
    """One layer, as ``jremat.plan`` reads it."""
    block, params, _, carry = layers
    return read_block(block, params, carry, cost=Roofline(chip("h200")), fetched=1)


class TestInAStack:
    def policies(self, read):
        most = read.problem.outcome(read.problem.marks).kept_bytes
        found = [read.policy(best(read.problem, Budget(int(share * most)))) for share in (0.3, 0.7)]
        assert all(policy.values for policy in found), "both keep values that bear no name, so the fingerprint counts"
        return found

    def test_a_mix_of_two_plans_keeps_what_they_say_and_has_nones_gradients(self, layers, read):
        block, _, stacked, carry = layers
        low, high = self.policies(read)
        run = lambda plan: jremat.stack(block, plan, num_layers=L)
        loss = lambda plan: jax.value_and_grad(
            lambda params, x: run(plan)(params, carry._replace(x=x)).x.astype(jnp.float32).sum(), (0, 1)
        )
        plan = mixed([(2, low), (1, high)])
        kept = lambda plan: jremat.residuals(lambda p, x: run(plan)(p, carry._replace(x=x)).x, stacked, carry.x)
        over_full = kept(plan).total_bytes - kept(FULL).total_bytes
        numbers = L * 4  # full keeps each layer's number, for the dropout keys that these plans keep themselves
        assert over_full + numbers == 2 * read.outcome(low).kept_bytes + read.outcome(high).kept_bytes
        recomputed = jremat.flops(loss(plan), stacked, carry.x).recompute
        assert recomputed == 2 * read.outcome(low).recompute_flops + read.outcome(high).recompute_flops
        wanted = compiled(loss(NONE))(stacked, carry.x)
        assert largest_error(compiled(loss(plan))(stacked, carry.x), wanted) <= 1e-6

    def test_a_plan_of_another_block_is_refused(self, layers, read):
        _, _, stacked, carry = layers
        other = block_apply(replace(zoo("gpt-dot").config, num_layers=L, norm="rmsnorm"))
        run = jremat.stack(other, self.policies(read)[0], num_layers=L)
        with pytest.raises(ValueError, match="planned for another program"):
            jax.eval_shape(jax.grad(lambda p: run(p, carry).x.sum()), stacked)


def routed(weights, x):
    """A choice of two of four experts by their affinity. weights: [h, 4], [h, h], [h, h]; x: [tokens, h]."""
    gates, _ = jax.lax.top_k(jremat.tag(x @ weights[0], "affinity"), 2)
    hidden = jremat.tag(x @ weights[1], "hidden")
    return jnp.tanh(hidden) @ weights[2] * jnp.exp(gates.sum(-1, keepdims=True))


class TestForcedKeeps:
    ARGS = ((jnp.ones((8, 4)), jnp.ones((8, 8)), jnp.ones((8, 8))), jnp.ones((16, 8)))
    # Of 16 tokens: the matmuls to the affinity and to hidden. In f32 and int32 the two chosen experts, which spare the
    # affinity, the sum of the gates, and hidden.
    ROUTER_FLOPS, HIDDEN_FLOPS = 2 * 16 * 8 * 4, 2 * 16 * 8 * 8
    ROUTER_BYTES, HIDDEN_BYTES = 16 * 2 * 4 + 16 * 4, 16 * 8 * 4

    def recompute(self, policy):
        return jremat.flops(gradient(routed, policy), *self.ARGS).recompute

    @pytest.mark.parametrize("keep", [(), ("hidden",)])
    def test_what_a_choice_is_made_from_and_what_the_user_marks_is_never_made_twice(self, keep):
        block = read_block(routed, *self.ARGS, cost=matmul_flops, keep=keep)
        assert {n.name for n in block.problem.nodes if n.forced and n.name} == {"affinity", *keep}
        least = self.ROUTER_BYTES + (self.HIDDEN_BYTES if keep else 0)
        outcomes = [best(block.problem, Budget(nbytes)) for nbytes in (least - 1, least, np.inf)]
        assert outcomes[0] is None and None not in outcomes[1:]
        spared = self.ROUTER_FLOPS + (self.HIDDEN_FLOPS if keep else 0)
        assert outcomes[1].recompute_flops == self.recompute(FULL) - spared
        for outcome in outcomes[1:]:
            policy = block.policy(outcome)
            assert str(jax.make_jaxpr(gradient(routed, policy))(*self.ARGS)).count("= top_k[") == 1
            assert self.recompute(policy) == outcome.recompute_flops
            assert jax_kept_bytes(jremat.checkpoint(routed, policy), *self.ARGS) == outcome.kept_bytes

    def test_a_router_by_its_own_name_is_forced_without_a_word(self):
        block = read_block(
            lambda w, x: jax.nn.softmax(jremat.tag(x @ w, "router")), *self.ARGS[0][:1], self.ARGS[1], cost=matmul_flops
        )
        assert [n.name for n in block.problem.nodes if n.forced] == ["router"]

    def test_an_unknown_name_is_refused(self):
        with pytest.raises(ValueError, match="keep: expected tags of this function"):
            read_block(routed, *self.ARGS, cost=matmul_flops, keep=("ruter",))


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_by_names_alone_holds_under_plain_jax_and_flax(name):
    block, f, args = zoo(name), zoo(name).function(), zoo(name).args()
    every = {outcome.kept_bytes: (outcome, policy) for outcome, policy in choices(name, names_only=True)}
    assert len(every) >= 4
    key = jax.random.key(1) if block.config.dropout else None
    for outcome, policy in every.values():
        assert not policy.values and not policy.families
        assert jax_kept_bytes(jax.checkpoint(f, policy=policy), *args) == outcome.kept_bytes
        flax = nn.remat(Block, policy=policy)(block.config)
        assert jax_kept_bytes(lambda p, x, flax=flax: flax.apply({"params": p}, x, key), *args) == outcome.kept_bytes


def test_a_cast_of_a_layers_own_weights_is_never_kept():
    f = lambda w, x: jnp.tanh(x @ w.astype(jnp.bfloat16)) @ w.astype(jnp.bfloat16)
    w, x = jnp.ones((8, 8)), jnp.ones((4, 8), jnp.bfloat16)

    def kept_bytes(fetched):
        problem = read_block(f, w, x, cost=matmul_flops, fetched=fetched).problem
        return problem.outcome(problem.marks).kept_bytes

    casts, tanh = 2 * 8 * 8 * 2, 4 * 8 * 2  # two casts; tanh's result, which its derivative reads; 2 bytes a value
    assert (kept_bytes(0), kept_bytes(1)) == (casts + tanh, tanh)


COUNTED = {
    "tanh": (tanh_mlp, mlp_args, ("none", "full", "dots_saveable", "ops:pointwise")),
    "a sine": (mlp, mlp_args, ("none", "full", "save:up", "but:up")),
    "a loop": (looped, mlp_args, ("none", "full", "dots_saveable", "ops:pointwise")),
    "complex": (complex_carry, complex_args, ("none", "full")),
}


@pytest.mark.parametrize("name, spec", [(name, spec) for name, (*_, specs) in COUNTED.items() for spec in specs])
def test_policies_are_priced_as_jax_runs_them_whether_they_can_be_planned_or_not(name, spec):
    """What is inside loops, complex, or made by derivative rules is no choice of the planner's; policies keep it."""
    block, args, _ = COUNTED[name]
    policy = policies.get(spec)
    found = read_block(block, *args(), cost=matmul_flops, fetched=1).outcome(policy)
    assert found.kept_bytes == jremat.residuals(block, *args(), policy=policy).total_bytes
    w, x = args()
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), w)
    counted = jremat.flops(gradient_step(jremat.stack(block, policy, num_layers=2)), stacked, x).recompute
    assert 2 * found.recompute_flops == counted
    assert found.recompute_seconds >= found.recompute_flops
    assert (found.recompute_flops == 0) == (spec not in ("full", "but:up"))
