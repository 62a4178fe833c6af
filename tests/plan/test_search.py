"""The search for the fastest choice that fits, on figures made up: no step is traced, nothing is compiled."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jremat.plan.search import search
from jremat.plan.stack import Choice
from jremat.policy import Policy


def test_memory_left_over_is_looked_at_again():
    """A prediction a quarter too high would leave a quarter of the memory unused after two compiles."""
    plans = [Policy.save(f"v{k}") for k in range(1000, 0, -10)]
    choices = [Choice(plan, 1000 - 10 * k, 0, float(k), 0) for k, plan in enumerate(plans)]
    true = {plan: 500 + choice.kept_bytes for plan, choice in zip(plans, choices)}
    found = search(choices, 1200, lambda plan: int(1.25 * true[plan]), lambda plan: true[plan])
    assert found.fits and found.compiled[found.place] >= 0.93 * 1200


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shift=st.integers(-50, 50), limit=st.integers(0, 2000))
def test_a_search_ends_with_the_fastest_that_fits_after_two_compiles(seed, shift, limit):
    """Where the prediction misses by one figure for all plans, two compiles are enough."""
    rng = np.random.default_rng(seed)
    kept = sorted({int(k) for k in rng.integers(0, 1500, 20)}, reverse=True)
    plans = [Policy.save(f"v{k}") for k in kept]
    choices = [Choice(plan, k, 0, float(-k), 0) for plan, k in zip(plans, kept)]
    true = {plan: 100 + k for plan, k in zip(plans, kept)}
    found = search(choices, limit, lambda plan: true[plan] - shift, lambda plan: true[plan])
    fitting = [k for k, plan in enumerate(plans) if true[plan] <= limit]
    assert found.fits == bool(fitting)
    if fitting:
        # After a compile that came out too large the next one aims half a percent lower.
        assert not [k for k in fitting if k < found.place and true[plans[k]] <= 0.995 * limit]
        left_over = any(0.995 * limit < p <= limit for p in true.values())  # passed over at first, then looked at again
        assert len(found.compiled) <= 2 + left_over
        assert len(found.predicted) <= 5, "a line between two traced choices finds the third"


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), limit=st.integers(0, 2000))
def test_a_search_never_returns_what_the_compiler_refuses(seed, limit):
    rng = np.random.default_rng(seed)
    kept = sorted({int(k) for k in rng.integers(0, 1500, 12)}, reverse=True)
    plans = [Policy.save(f"v{k}") for k in kept]
    choices = [Choice(plan, k, 0, float(-k), 0) for plan, k in zip(plans, kept)]
    true = {plan: 100 + k + int(rng.integers(0, 300)) for plan, k in zip(plans, kept)}
    found = search(choices, limit, lambda plan: true[plan] + int(rng.integers(-200, 200)), lambda plan: true[plan])
    if found.fits:
        assert true[choices[found.place].plan] <= limit
    assert found.compiled
