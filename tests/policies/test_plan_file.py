"""Planned policies as files: what is written reads back, what isn't a plan is refused with its key."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import policies
from jremat.policy import OFFLOAD, SAVE, LayerPlan, Policy, Segment
from jremat.policy.plan_file import FORMAT

PLANNED = Policy(values=(("v3", SAVE), ("v7", OFFLOAD)), fingerprint="1f3a")


@pytest.mark.parametrize(
    "plan",
    [
        PLANNED,
        policies.get("save:a?;offload:b"),
        LayerPlan((Segment((PLANNED, policies.get("full")), 3), Segment((policies.get("none"),), group=4)), label=""),
        policies.get("mix:8*full,8*revolve:3"),
    ],
)
def test_what_is_written_reads_back(plan, tmp_path):
    file = tmp_path / "a plan.json"
    policies.write_plan(file, plan, shapes={"x": [2, 3]})
    read = policies.get(f"plan:{file}")
    assert read == plan
    assert read.spec == f"plan:{file}"
    assert eval(repr(read)) == plan


def test_a_plan_stands_inside_others(tmp_path):
    file = tmp_path / "plan.json"
    policies.write_plan(file, PLANNED)
    assert policies.get(f"mix:2*plan:{file},rest*none").policies(3)[:2] == (PLANNED, PLANNED)
    assert policies.get(f"every_k:2,plan:{file}").policies(1) == (PLANNED,)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not a JSON file"),
        ("[]", "expected the file to be a JSON object, got list"),
        ("{}", "format: expected"),
        ({}, "expected one of the keys 'policy' and 'segments'"),
        ({"policy": "full", "segments": []}, "expected one of the keys"),
        ({"policy": 3}, "expected a policy to be a JSON object, got int"),
        ({"policy": "fulll"}, "did you mean 'full'"),
        ({"policy": "alternate:2"}, "expected a policy of one block"),
        ({"policy": {"values": {"v": "save"}}}, "fingerprint: expected the graph's"),
        ({"policy": {"values": {"v": "keep"}, "fingerprint": "f"}}, "expected one of save, offload, recompute"),
        ({"policy": {"values": {"v": ["save"]}, "fingerprint": "f"}}, "expected one of save, offload, recompute"),
        ({"policy": {"values": ["v"], "fingerprint": "f"}}, "expected values to be a JSON object"),
        ({"segments": []}, "segments: expected at least one"),
        ({"segments": 3}, "segments: expected a list"),
        ({"segments": [{}]}, "pattern: expected a list"),
        ({"segments": [{"pattern": []}]}, "pattern: expected at least one policy"),
        ({"segments": [{"pattern": ["full"], "repeats": "two"}]}, "repeats: expected a whole number"),
        ({"segments": [{"pattern": ["full"], "repeats": 0}]}, "repeats: expected at least 1"),
        ({"segments": [{"pattern": ["full"]}, {"pattern": ["none"]}]}, "only the last may be open"),
    ],
)
def test_what_is_no_plan_is_refused(content, said, tmp_path):
    file = tmp_path / "plan.json"
    text = content if isinstance(content, str) else json.dumps({"format": FORMAT, **content})
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        policies.get(f"plan:{file}")


def test_a_file_that_names_itself_ends(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"format": FORMAT, "policy": f"plan:{file}"}))
    with pytest.raises(ValueError, match="expected a policy of one block"):
        policies.get(f"plan:{file}")


def test_unreadable_files_are_told_apart(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for spec, said in [
        (tmp_path, "Is a directory"),
        (tmp_path / "none.json", "No such file"),
        (tmp_path / "bytes", "JSON"),
    ]:
        with pytest.raises(ValueError, match=said):
            policies.get(f"plan:{spec}")


KEYS = st.sampled_from(["policy", "segments", "spec", "values", "fingerprint", "pattern", "repeats", "group", "slots"])
JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from(["full", "save"])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)


@given(content=st.dictionaries(KEYS, JSON, max_size=4))
def test_any_json_is_a_plan_or_a_value_error(content, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "any.json"
    file.write_text(json.dumps({"format": FORMAT, **content}))
    try:
        plan = policies.get(f"plan:{file}")
    except ValueError as error:
        assert str(file) in str(error)
    else:
        assert isinstance(plan, Policy | LayerPlan)
