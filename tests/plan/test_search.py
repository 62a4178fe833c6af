"""The search for the fastest choice that fits, on figures made up: no step is traced, nothing is compiled."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jremat.planner.search import search
from jremat.planner.stack import Choice, mixed
from jremat.policy import FULL, Policy
from jremat.transform.groups import every_k


def made_up(rng, count, spread=1500):
    """Choices that keep less and less and take longer and longer."""
    kept = sorted({int(k) for k in rng.integers(0, spread, count)}, reverse=True)
    return [Choice(Policy.save(f"v{k}"), k, 0, float(-k), 0) for k in kept]


def test_memory_left_over_is_looked_at_again():
    """A prediction a quarter too high would leave a fifth of the memory unused after one compile."""
    choices = [Choice(Policy.save(f"v{k}"), k, 0, float(-k), 0) for k in range(1000, 0, -10)]
    true = {choice.plan: 500 + choice.kept_bytes for choice in choices}
    found = search([choices], 1200, lambda plan: int(1.25 * true[plan]), lambda plan: true[plan])
    assert found.fits and found.compiles == 2 and found.peak_bytes >= 0.93 * 1200


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shift=st.integers(-50, 50), limit=st.integers(0, 2000))
def test_a_search_ends_with_the_fastest_that_fits_after_two_compiles(seed, shift, limit):
    """Where the prediction misses by one figure for all plans, two compiles are enough."""
    choices = made_up(np.random.default_rng(seed), 20)
    true = {choice.plan: 100 + choice.kept_bytes for choice in choices}
    traced = set()
    predict = lambda plan: traced.add(plan) or true[plan] - shift
    found = search([choices], limit, predict, lambda plan: true[plan])
    fitting = [choice for choice in choices if true[choice.plan] <= limit]
    assert found.fits == bool(fitting)
    if fitting:
        # After a compile that came out too large the next one aims half a percent lower.
        faster = [c for c in fitting if c.recompute_seconds < found.choice.recompute_seconds]
        assert not [choice for choice in faster if true[choice.plan] <= 0.996 * limit]
        missed = any(0.996 * limit < peak <= limit for peak in true.values())
        sparse = found.peak_bytes < 0.8 * limit  # nothing lies near the limit
        assert found.compiles <= 2 + missed + 3 * sparse
        assert len(traced) <= 6, "a line between two traced choices finds the third"


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), limit=st.integers(0, 2000))
def test_a_search_never_returns_what_the_compiler_refuses(seed, limit):
    rng = np.random.default_rng(seed)
    choices = made_up(rng, 12)
    named = made_up(rng, 5)
    true = {choice.plan: 100 + choice.kept_bytes + int(rng.integers(0, 300)) for choice in (*choices, *named)}
    noisy = {plan: peak + int(rng.integers(-200, 200)) for plan, peak in true.items()}
    seen = []
    found = search([choices], limit, noisy.__getitem__, lambda plan: seen.append(plan) or true[plan], named)
    assert found.peak_bytes == true[found.choice.plan] and found.fits == (found.peak_bytes <= limit)
    assert len(seen) == len(set(seen)) == found.compiles <= 6 + len(named)
    assert found.fits or all(true[plan] > limit for plan in seen)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), limit=st.integers(100, 1600))
def test_a_named_policy_that_is_faster_is_the_answer(seed, limit):
    """The planner's own choices may miss the memory by a hair where a policy by name fits it exactly."""
    rng = np.random.default_rng(seed)
    choices = made_up(rng, 10)
    named = [Choice(Policy.save("named"), limit - 100, 0, float(-limit), 0)]
    true = {choice.plan: 100 + choice.kept_bytes for choice in (*choices, *named)}
    found = search([choices], limit, true.__getitem__, true.__getitem__, named)
    best = min((c for c in (*choices, *named) if true[c.plan] <= limit), key=lambda c: c.recompute_seconds)
    assert found.fits and found.choice == best and found.compiles <= 2


def test_what_cannot_fit_costs_one_compile():
    choices = [Choice(Policy.save(f"v{k}"), k, 0, float(-k), 0) for k in (900, 600, 300)]
    found = search([choices], 100, lambda plan: 1000, lambda plan: 1000)
    assert not found.fits and found.compiles == 1 and found.choice == choices[0]


def test_a_named_policy_that_is_one_of_the_planners_own_choices_is_passed_over_no_more_than_others():
    """Predicted 2% over the limit; the compiler says that it fits."""
    choices = [Choice(Policy.save(f"v{k}"), k, 0, float(-k), 0) for k in (900, 600, 300)]
    true = dict(zip((choice.plan for choice in choices), (1100, 1000, 700)))
    predicted = dict(zip((choice.plan for choice in choices), (1100, 1020, 700)))
    find = lambda named: search([choices], 1000, predicted.__getitem__, true.__getitem__, named, compiles=1)
    assert find([]).choice == choices[2] and find([choices[1]]).choice == choices[1]


def test_a_compile_corrects_near_choices_of_its_own_kind_alone():
    """Mixes are predicted 300 too high, and nothing else is: what is far, uniform or in groups keeps its prediction."""
    more, less = Policy.save("a", "b"), Policy.save("a")
    mix = lambda first: Choice(mixed([(first, less), (12 - first, more)]), 1200 - 50 * first, 0, float(first), 0)
    mixes = [mix(first) for first in range(1, 12)]
    full, every = Choice(FULL, 0, 0, 90.0, 0), Choice(every_k(3, FULL), -50, 0, 99.0, 0)
    uniform = Choice(more, mixes[4].kept_bytes, 0, 50.0, 0)
    true = {c.plan: 2000 + c.kept_bytes for c in (*mixes, full, every, uniform)}
    predicted = {plan: peak + 300 * (plan in [c.plan for c in mixes]) for plan, peak in true.items()}
    found = search([[*mixes, full, every]], 3000, predicted.__getitem__, true.__getitem__, [uniform], compiles=1)
    [proof] = found.compiled
    expected = lambda choice: found.expected_bytes(choice, predicted[choice.plan])
    assert proof.choice in mixes and expected(proof.choice) == true[proof.choice.plan]
    for choice in (full, every, uniform):
        assert expected(choice) == true[choice.plan]
    errors = [abs(expected(choice) - true[choice.plan]) for choice in mixes]
    place = mixes.index(proof.choice)
    assert errors[place] == 0 and errors == sorted(errors[: place + 1], reverse=True) + sorted(errors[place + 1 :])
    assert max(errors) > 100  # the farthest are hardly corrected
