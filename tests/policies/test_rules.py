"""The base data that specs turn into: rules that exempt a value from another rule are kept, and change what happens."""

import jax
import jax.numpy as jnp

import jremat
import policies
from jremat.policy import RECOMPUTE, SAVE, Policy, tag
from jremat.policy.ops import MATMUL, WEIGHT_MATMUL


def test_a_name_left_out_of_a_family_is_left_out():
    """dots_saveable without ``scores`` keeps one of two matmuls' outputs, not both."""

    def f(x, w):
        scores = tag(x @ w, "scores")  # [8, 16]
        return jnp.sin(jnp.sin(scores) @ w.T)  # the second matmul's output is [8, 4]

    x, w = jnp.ones((8, 4)), jnp.ones((4, 16))
    dots = policies.get("dots_saveable")
    assert jremat.residuals(f, x, w, policy=dots).total_bytes == 4 * (8 * 16 + 8 * 4)
    assert jremat.residuals(f, x, w, policy=dots.all_but("scores")).total_bytes == 4 * 8 * 4


def test_it_is_refused_as_a_plain_policy():
    policy = policies.get("dots_saveable").all_but("scores")
    assert policy.strict_only
    assert policies.get(policy.canonical_spec) == policy


def test_a_family_exempt_from_a_wider_one_stays_exempt():
    left_out = Policy(default=SAVE, families=((MATMUL, RECOMPUTE),))
    either = left_out | Policy.ops(WEIGHT_MATMUL)
    assert either.decide(families=["matmul", "weight_matmul"]) is SAVE
    assert either.decide(families=["matmul", "batched_matmul"]) is RECOMPUTE
    assert policies.get(either.canonical_spec) == either


def test_equal_policies_are_one_key_and_trace_once():
    traces = []

    @jax.jit
    def f(x):
        traces.append(x)
        return jax.checkpoint(jnp.sin, policy=policies.get("save:b,a"))(x)

    f(jnp.ones(2)), f(jnp.ones(2))
    assert len(traces) == 1
    assert {policies.get("save:a,b"), policies.get("save:b,a"), policies.get("save:a;save:b")} == {
        Policy.save("a", "b")
    }
