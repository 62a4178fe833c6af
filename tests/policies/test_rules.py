"""The base data that specs turn into: rules that exempt a value from another rule are kept, and change what happens."""

import functools
import operator
import warnings

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import jremat
import policies
from jremat.policy import OFFLOAD, RECOMPUTE, SAVE, Decision, Policy, tag
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


@st.composite
def policies_by_rules(draw):
    """Rules by name and family, some optional, under any default."""
    names, families = draw(rules(TAGS, DECISIONS)), draw(rules(OPS, DECISIONS))
    default, optional = draw(st.sampled_from([SAVE, OFFLOAD, RECOMPUTE])), draw(st.frozensets(TAGS))
    try:
        return Policy(names=names, families=families, default=default, optional=optional)
    except ValueError:  # a family and a part of it
        reject()


def union(*policies):
    """Of policies from left to right; None where it is refused."""
    try:
        return functools.reduce(operator.or_, policies)
    except ValueError:
        return None


RULES = policies_by_rules()


@settings(max_examples=400)
@given(RULES, RULES, RULES)
def test_order_and_grouping_of_a_union_do_not_matter(a, b, c):
    """Neither for what it is, nor for whether it is refused."""
    left, right = union(a, b), union(b, c)
    assert (left and union(left, c)) == (right and union(a, right))
    assert left == union(b, a)
    assert union(a, a) == a


@given(RULES, RULES)
def test_a_union_prints_a_spec_that_reads_back(a, b):
    if (both := union(a, b)) is None:
        reject()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rules that change nothing
        assert policies.get(both.spec) == both


@given(RULES, RULES, st.frozensets(TAGS, max_size=1))
def test_every_rule_of_either_side_holds_in_a_union(a, b, borne):
    """A rule of one side is never given up for a rule or a default of the other."""
    if (both := union(a, b)) is None:
        reject()
    defaults = {a.default, b.default} - {RECOMPUTE}
    assert both.default is (defaults.pop() if defaults else RECOMPUTE)
    ruled = {decision for policy in (a, b) for name, decision in policy.names if name in borne}
    assert both.decide(names=borne) is (ruled.pop() if ruled else both.default)
    assert not ruled


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ("offload:x", "save:x", "'x'"),
        ("save:x?", "offload:x", "'x'"),
        ("but:x", "save:x", "'x'"),
        ("none;offload:x", "but:x", "'x'"),
        ("ops:matmul", "offload_ops:matmul", "'matmul'"),
        ("ops:matmul", "none;but_ops:matmul", "'matmul'"),
        ("offload_ops:weight_matmul", "ops:matmul", "'weight_matmul', a part of 'matmul'"),
        ("none", "offload_all", "what no rule names"),
    ],
)
def test_contradictions_are_refused_whatever_they_are_about(one, other, said):
    for a, b in ((one, other), (other, one)):
        with pytest.raises(ValueError) as refused:
            policies.get(a) | policies.get(b)
        assert str(refused.value).startswith(f"policy: {a!r} | {b!r}: expected one decision for {said}, got ")


def test_a_name_decided_as_the_rest_is_stays_required():
    """A union with a policy that keeps everything changes no decision, but a misspelt name still raises."""
    f = lambda x: jnp.sin(tag(jnp.sin(x), "up"))
    both = policies.get("none") | Policy.save("upp")
    assert both.keeps_everything and not both.strict_only
    with pytest.raises(ValueError, match=r"names 'upp' \(did you mean 'up'\?\)"):
        jremat.checkpoint(f, both)(jnp.ones(2))
    with pytest.raises(ValueError, match="'up', got save and offload"):
        policies.get("none") | Policy.save("up") | Policy.offload("up")


def test_a_typed_rule_that_changes_nothing_warns():
    with pytest.warns(UserWarning, match="naming a would change nothing, since all that isn't named is kept"):
        policies.get("none;save:a")


@pytest.mark.parametrize(
    ("one", "other", "union"),
    [
        ("save:a", "save:a?", "save:a"),
        ("save:a?", "save:a?", "save:a?"),
        ("save:a?", "save:b", "save:a?,b"),
        ("none", "offload:a", "none;offload:a"),
        ("but:a", "save:b?", "none;save:b?;but:a"),
        ("full", "offload:a", "offload:a"),
    ],
)
def test_a_name_that_either_side_insists_on_stays_required(one, other, union):
    assert policies.get(one) | policies.get(other) == policies.get(union)
