"""Plans over layers, against lists worked out by hand, and the schedule each segment carries."""

import pytest

import policies
from jremat.policy import FULL, NONE, LayerPlan, Segment

LETTERS = {"full": "f", "none": ".", "dots_saveable": "d", "save:a": "a"}

# spec: the layers for L = 1, 5, 8, 12; None where the plan names more layers than there are, or fewer.
BY_HAND = {
    "alternate:0": [".", ".....", "........", "............"],
    "alternate:1": ["f", "fffff", "ffffffff", "ffffffffffff"],
    "alternate:2": ["f", "f.f.f", "f.f.f.f.", "f.f.f.f.f.f."],
    "alternate:3": ["f", "f..f.", "f..f..f.", "f..f..f..f.."],
    "torchtitan:1": ["f", "fffff", "ffffffff", "ffffffffffff"],
    "torchtitan:2": [".", ".f.f.", ".f.f.f.f", ".f.f.f.f.f.f"],
    "torchtitan:3": [".", "..f..", "..f..f..", "..f..f..f..f"],
    "block:0": [".", ".....", "........", "............"],
    "block:1": ["f", "f....", "f.......", "f..........."],
    "block:5": [None, "fffff", "fffff...", "fffff......."],
    "block:2,dots_saveable": [None, "dd...", "dd......", "dd.........."],
    "every_k:1": ["f", "fffff", "ffffffff", "ffffffffffff"],
    "every_k:4": [".", ".....", "........", "............"],
    "every_k:4,full": ["f", "fffff", "ffffffff", "ffffffffffff"],
    "revolve:3": [".", ".....", "........", "............"],
    "mix:5*full": [None, "fffff", None, None],
    "mix:2*full,3*none": [None, "ff...", None, None],
    "mix:1*save:a,**full": ["a", "affff", "afffffff", "afffffffffff"],
    "mix:4*alternate:2,rest*dots_saveable": [None, "f.f.d", "f.f.dddd", "f.f.dddddddd"],
    "mix:2*full,rest*alternate:3": [None, "fff..", "fff..f..", "fff..f..f..f"],
}


@pytest.mark.parametrize("spec", BY_HAND)
@pytest.mark.parametrize(("column", "num_layers"), [(0, 1), (1, 5), (2, 8), (3, 12)])
def test_the_policy_of_each_layer(spec, column, num_layers):
    plan, expected = policies.get(spec), BY_HAND[spec][column]
    if expected is None:
        with pytest.raises(ValueError, match=f"layers, the stack has {num_layers}"):
            plan.policies(num_layers)
    else:
        assert "".join(LETTERS[policy.spec] for policy in plan.policies(num_layers)) == expected


# spec: (layers, group, slots) of each segment at L = 8.
SEGMENTS = {
    "every_k:4": [(8, 4, None)],
    "every_k:3": [(8, 3, None)],
    "every_k:1": [(8, 1, None)],
    "revolve:3": [(8, 1, 3)],
    "alternate:3": [(6, 1, None), (2, 1, None)],
    "block:3": [(3, 1, None), (5, 1, None)],
    "mix:6*every_k:2+full,2*revolve:2": [(6, 2, None), (2, 1, 2)],
}


@pytest.mark.parametrize("spec", SEGMENTS)
def test_the_segments_of_eight_layers(spec):
    segments = policies.get(spec).resolve(8)
    assert [(len(s.pattern) * s.repeats, s.group, s.slots) for s in segments] == SEGMENTS[spec]


@pytest.mark.parametrize("spec", ["alternate:7", "torchtitan:7", "every_k:7", "revolve:7", "block:7"])
def test_a_plan_is_as_short_as_its_pattern(spec):
    """Compile time goes with the number of segments, so depth must not show in it."""
    plan = policies.get(spec)
    assert len(plan.segments) <= 2
    assert len(plan.resolve(700)) == len(plan.segments)


def test_a_plan_is_no_policy_of_one_block():
    with pytest.raises(ValueError, match="'alternate:2' is a plan for a stack of layers"):
        policies.get("alternate:2")(None)
    with pytest.raises(ValueError, match="'auto:1GiB' needs shapes before it is a policy"):
        policies.get("auto:1GiB")(None)


def test_a_plan_is_uniform_only_without_groups_and_slots():
    assert policies.get("alternate:1").uniform(4) == FULL
    assert policies.get("mix:2*none,rest*none").uniform(4) == NONE
    assert policies.get("every_k:2,full").uniform(4) is None
    assert policies.get("revolve:2").uniform(4) is None


def test_plans_made_in_python_equal_their_specs():
    from policies import stacks

    made = [
        stacks.every_k(4, policies.get("save:a,b")),
        stacks.block(2, policies.get("save:a,b")),
        stacks.mix((2, policies.get("save:a,b")), (4, stacks.alternate(2)), (None, FULL)),
    ]
    for plan in made:
        assert policies.get(plan.spec) == plan
    assert made[2] == LayerPlan(
        (Segment((policies.get("save:a,b"),), 2), Segment((FULL, NONE), 2), Segment((FULL,))), label=""
    )
