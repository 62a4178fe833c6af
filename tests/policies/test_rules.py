"""The base data that specs turn into: rules that exempt a value from another rule are kept, and change what happens."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jremat
import policies
from jremat.policy import OFFLOAD, RECOMPUTE, SAVE, Decision, Policy, tag
from jremat.policy.decision import stronger
from jremat.policy.ops import ATTENTION, BATCHED_MATMUL, MATMUL, WEIGHT_MATMUL


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


DECISIONS = st.sampled_from(list(Decision))
TAGS, OPS = st.sampled_from("ab"), st.sampled_from([ATTENTION, BATCHED_MATMUL, MATMUL, WEIGHT_MATMUL])


def rules(selectors, decisions):
    return st.dictionaries(selectors, decisions).map(lambda found: tuple(found.items()))


BY_NAME = st.builds(Policy, names=rules(TAGS, DECISIONS), default=DECISIONS)
MAYBE_BORNE = st.builds(Policy, names=rules(TAGS, DECISIONS), default=DECISIONS, optional=st.frozensets(TAGS))
KEPT = st.sampled_from([SAVE, OFFLOAD])
LISTS = st.builds(Policy, names=rules(TAGS, KEPT), families=rules(OPS, KEPT), optional=st.frozensets(TAGS))


@given(st.one_of(st.tuples(BY_NAME, BY_NAME, BY_NAME), st.tuples(LISTS, LISTS, LISTS)))
def test_order_and_grouping_of_a_union_do_not_matter(three):
    a, b, c = three
    assert (a | b) | c == a | (b | c)
    assert a | b == b | a
    assert a | a == a


@given(MAYBE_BORNE, MAYBE_BORNE, MAYBE_BORNE, st.frozensets(TAGS, max_size=1))
def test_unions_of_policies_by_name_decide_as_the_one_that_keeps_most(a, b, c, borne):
    strongest = stronger(*(policy.decide(names=borne) for policy in (a, b, c)))
    assert ((a | b) | c).decide(names=borne) is (a | (b | c)).decide(names=borne) is strongest


@pytest.mark.parametrize(
    ("one", "other", "union"),
    [
        ("save:a", "save:a?", "save:a"),
        ("save:a?", "offload:a", "save:a"),
        ("save:a?", "offload:a?", "save:a?"),
        ("save:a?", "save:b", "save:a?,b"),
        ("none", "save:a", "none"),
    ],
)
def test_a_name_that_either_side_insists_on_stays_required(one, other, union):
    assert policies.get(one) | policies.get(other) == policies.get(union)
