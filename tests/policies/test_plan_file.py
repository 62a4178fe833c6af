"""Planned policies as files: what is written reads back, what isn't a plan is refused with its key."""

import dataclasses
import json
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jremat
import policies
from jremat.policy import OFFLOAD, SAVE, LayerPlan, Policy, Segment, tag
from jremat.policy.plan_file import FORMAT, write
from jremat.policy.planned_for import PlannedFor

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
    write(file, plan, peak_bytes=3)
    read = policies.get(f"plan:{file}")
    assert read == plan == policies.load(file)
    assert read.spec == f"plan:{file}"
    assert eval(repr(read)) == plan


def test_a_plan_stands_inside_others(tmp_path):
    file = tmp_path / "plan.json"
    write(file, PLANNED)
    assert policies.get(f"mix:2*plan:{file},rest*none").policies(3)[:2] == (PLANNED, PLANNED)
    assert policies.get(f"every_k:2,plan:{file}").policies(1) == (PLANNED,)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
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
        ({"policy": "full", "shapes": "float32[2]"}, "shapes: expected a list of strings"),
        ({"policy": "full", "shapes": [[2, 3]]}, "shapes: expected a list of strings"),
        ({"policy": "full", "num_layers": 0}, "num_layers: expected at least 1, got 0"),
        ({"policy": "full", "num_layers": "2"}, "num_layers: expected a whole number or null"),
        ({"policy": "full", "versions": ["jax"]}, "expected versions to be a JSON object"),
        ({"policy": "full", "versions": {"jax": 0.1}}, "versions: expected strings, got 0.1"),
        ({"policy": "full", "versions": {"": "1"}}, "versions: expected the name of a package before '1', got ''"),
        ({"policy": "full", "versions": {"jax": ""}}, "versions: expected the version of 'jax', got ''"),
        ({"policy": "full", "shapes": ["float32"]}, "shapes: expected a dtype and dimensions .*, got 'float32'"),
        ({"policy": "full", "shapes": [""]}, "shapes: expected a dtype and dimensions .*, got ''"),
        ({"policy": "full", "shapes": ["float32[2, -3]"]}, "shapes: expected a dtype and dimensions"),
        ({"policy": {"values": {"v": "save"}, "fingerprint": ""}}, "fingerprint: expected the graph's, .*, got ''"),
        ({"policy": "full", "shape": []}, "shape: no key of a plan, .*; did you mean 'shapes'"),
        ({"policy": "full", "num_layer": 2}, "num_layer: no key of a plan, .*; did you mean 'num_layers'"),
        ({"policy": {"specs": "full"}}, "specs: no key of a policy, .*; did you mean 'spec'"),
        (f'{{"format": "{FORMAT}", "policy": "none", "policy": "full"}}', "each key of an object once, got 'policy'"),
        (f'{{"format": "{FORMAT}", "policy": {{"spec": "full", "spec": "none"}}}}', "once, got 'spec' twice"),
    ],
)
def test_what_is_no_plan_is_refused(content, said, tmp_path):
    file = tmp_path / "plan.json"
    text = content if isinstance(content, str) else json.dumps({"format": FORMAT, **content})
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        policies.get(f"plan:{file}")


def test_a_key_that_would_not_be_read_back_is_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"peak_byte: no key of what stands beside a plan, .*'peak_bytes'"):
        write(tmp_path / "plan.json", PLANNED, peak_byte=3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("planned_for", [None, PlannedFor(num_layers=2)])
def test_a_plan_on_another_graph_is_named_by_its_file(planned_for, tmp_path):
    write(tmp_path / "plan.json", LayerPlan((Segment((PLANNED,), 2),), label=""), planned_for)
    plan = f"plan:{tmp_path / 'plan.json'}"
    with pytest.raises(ValueError, match="was planned for graph 1f3a, the function's graph is ") as refused:
        stacked(block, policies.get(plan), COLUMNS, ROWS, 2)
    assert str(refused.value).startswith(f"policy: '{plan}' was planned for graph 1f3a, ")


@pytest.mark.parametrize(("values", "said"), [(("v3", "v7"), "2 planned values"), (("v3",), "1 planned value")])
def test_a_plan_of_no_file_on_another_graph_is_told_by_what_it_holds(values, said):
    policy = Policy(values=tuple((value, SAVE) for value in values), fingerprint="1f3a")
    with pytest.raises(ValueError, match=f"^policy: a policy with {said} was planned for graph 1f3a, the function"):
        jax.eval_shape(jremat.checkpoint(block, policy), COLUMNS, ROWS)


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


ROWS, COLUMNS = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
WIDE = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)


def block(w, x):
    return jnp.sin(tag(jnp.sin(tag(x @ w, "up")), "act")) @ w.T


def biased(w, x):
    return block(w[0], x) + w[1]


@pytest.fixture(params=["save:up", "full", "none", "but:act"])
def planned(request, tmp_path):
    """The spec of a plan of names alone, as the planner writes it for two layers of ``block``."""
    found = jremat.plan(block, COLUMNS, ROWS, num_layers=2, hbm_bytes=2**20, target="cpu", compiles=0)
    return dataclasses.replace(found, policy=policies.get(request.param)).save(tmp_path / "plan.json").spec


def stacked(f, policy, w, x, num_layers):
    parameters = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_layers, *leaf.shape), leaf.dtype), w)
    return jax.eval_shape(jremat.stack(f, policy, num_layers=num_layers), parameters, x)


def test_a_plan_holds_for_what_it_was_planned_for(planned):
    policy = policies.get(planned)
    assert stacked(block, policy, COLUMNS, ROWS, 2).shape == (4, 8)
    assert jax.eval_shape(jremat.checkpoint(block, policy), COLUMNS, ROWS).shape == (4, 8)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda p: stacked(block, p, COLUMNS, COLUMNS, 2), "for float32[4, 8], the function has float32[8, 8]"),
        (lambda p: stacked(block, p, COLUMNS, ROWS, 3), "for a stack of 2 layers, this one has 3"),
        (
            lambda p: jax.eval_shape(jremat.checkpoint(block, p), WIDE, ROWS),
            "for float32[8, 8], the function has bfloat16[8, 8]",
        ),
        (
            lambda p: jax.eval_shape(jremat.checkpoint(biased, p), (COLUMNS, jnp.ones(8)), ROWS),
            "without float32[8], which the function has",
        ),
    ],
)
def test_a_plan_is_refused_on_other_shapes_layers_and_models(use, said, planned):
    with pytest.raises(ValueError, match=re.escape(f"'{planned}' was planned {said}: plan anew")):
        use(policies.get(planned))


@pytest.mark.parametrize("wrap", [jremat.remat, nn.remat])
def test_a_module_is_held_to_the_plan_too(wrap, tmp_path):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(jnp.sin(tag(nn.Dense(8)(x), "up")))

    module, x = Block(), jnp.ones((4, 8))
    layer = lambda params, x: module.apply({"params": params}, x)
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    found = jremat.plan(layer, shapes, x, num_layers=2, hbm_bytes=2**20, target="cpu", compiles=0)
    policy = policies.get(dataclasses.replace(found, policy=Policy.save("up")).save(tmp_path / "plan.json").spec)
    params = wrap(Block, policy=policy)().init(jax.random.key(0), jnp.ones((1, 8)))["params"]  # of any batch
    run = jax.grad(lambda params, x: wrap(Block, policy=policy)().apply({"params": params}, x).sum())
    if wrap is jremat.remat:
        assert run(params, x)["Dense_0"]["kernel"].shape == (8, 8)
        with pytest.raises(
            ValueError, match=re.escape("was planned for float32[4, 8], the function has float32[5, 8]")
        ):
            run(params, jnp.ones((5, 8)))
    else:
        said = "is a plan, held to the shapes that it was made for, which a plain JAX policy can't"
        with pytest.raises(ValueError, match=said):
            run(params, x)


def test_a_plan_is_refused_with_another_jax(planned):
    file = Path(planned.removeprefix("plan:"))
    content = json.loads(file.read_text())
    assert content["versions"]["jax"] == jax.__version__
    file.write_text(json.dumps(content | {"versions": {"jax": "0.4.1", "libtpu-of-nobody": "1"}}))
    said = f"policy: '{planned}' was planned with jax 0.4.1, here is jax {jax.__version__}: plan anew"
    with pytest.raises(ValueError, match=re.escape(said)):
        policies.get(planned)


def test_what_a_plan_holds_for_is_written_again_and_not_combined_away(planned, tmp_path):
    policy = policies.get(planned)
    write(tmp_path / "again.json", policy)
    assert policies.get(f"plan:{tmp_path / 'again.json'}").planned_for == policy.planned_for
    assert policy.planned_for.num_layers == 2
    with pytest.raises(ValueError, match="can't be combined; plan anew"):
        policy | Policy.save("up")


def test_a_file_by_hand_that_says_nothing_of_shapes_is_portable(tmp_path):
    write(tmp_path / "plan.json", Policy.save("up"))
    policy = policies.get(f"plan:{tmp_path / 'plan.json'}")
    assert policy.planned_for is None
    assert stacked(block, policy, COLUMNS, COLUMNS, 3).shape == (8, 8)


def test_versions_and_shapes_of_a_plan_over_layers_reach_each_of_its_policies(tmp_path):
    planned_for = PlannedFor(("float32[2]",), 3, (("jax", jax.__version__),))
    write(tmp_path / "plan.json", policies.get("mix:2*save:up,rest*none"), planned_for)
    plan = policies.get(f"plan:{tmp_path / 'plan.json'}")
    assert {p.planned_for for s in plan.segments for p in s.pattern} == {planned_for}


KEYS = st.sampled_from(
    [
        "policy",
        "segments",
        "spec",
        "values",
        "fingerprint",
        "pattern",
        "repeats",
        "group",
        "slots",
        "shapes",
        "versions",
        "num_layers",
    ]
)
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
