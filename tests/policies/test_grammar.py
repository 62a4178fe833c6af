"""Specs: every good one reads, prints back and equals itself; every broken one is a ValueError and nothing else."""

import shlex
import subprocess

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import policies
from jremat.planner.request import Request
from jremat.policy import OFFLOAD, RECOMPUTE, SAVE, Decision, LayerPlan, Policy
from jremat.policy.ops import SELECTABLE
from policies import megatron

NAMES = st.sampled_from(["query", "mlp_up", "attn_out", "a", "x.y/z_1", "B2", "none", "full"])
COUNTS = st.integers(1, 64)
DECISIONS, DEFAULTS = st.sampled_from(Decision), st.sampled_from([SAVE, OFFLOAD, RECOMPUTE])


@st.composite
def rule_policies(draw) -> Policy:
    """Any policy by rules."""
    names = draw(st.dictionaries(NAMES, DECISIONS, max_size=4))
    families = draw(st.dictionaries(st.sampled_from(SELECTABLE), DECISIONS, max_size=3))
    optional = draw(st.sets(st.sampled_from(sorted(names)))) if names else ()
    default = draw(DEFAULTS)
    try:
        return Policy(tuple(names.items()), tuple(families.items()), default=default, optional=frozenset(optional))
    except ValueError:  # a family and a part of it
        reject()


NAMED = sorted(policies.registry.ZOO.named)
ONE_BLOCK = st.one_of(st.sampled_from(NAMED), rule_policies().map(lambda p: p.canonical_spec))
IN_LIST = ONE_BLOCK.map(lambda spec: spec.replace(",", "+"))
SIZES = st.builds("{}{}".format, st.integers(1, 999), st.sampled_from(["B", "KB", "GB", "KiB", "MiB", "GiB", "TiB"]))
SHARES = st.decimals(0, 1, places=3).map(str)
PARTS = st.lists(st.builds("{}*{}".format, COUNTS, IN_LIST), min_size=1, max_size=4)
GOOD = st.one_of(
    ONE_BLOCK,
    st.builds("every_k:{}".format, COUNTS),
    st.builds("every_k:{},{}".format, COUNTS.filter(lambda k: k > 1), ONE_BLOCK),
    st.builds("alternate:{}".format, st.integers(0, 64)),
    st.builds("torchtitan:{}".format, COUNTS),
    st.builds("block:{}".format, st.integers(0, 64)),
    st.builds("block:{},{}".format, COUNTS, ONE_BLOCK),
    st.builds("revolve:{}".format, COUNTS),
    PARTS.map(lambda parts: f"mix:{','.join(parts)}"),
    st.builds(lambda parts, last: f"mix:{','.join(parts)},{last}", PARTS, st.builds("rest*{}".format, IN_LIST)),
    st.builds("mix:{}*every_k:4+full,**none".format, COUNTS),
    st.lists(st.sampled_from(sorted(megatron.MODULES)), min_size=1, unique=True).map(
        lambda modules: f"megatron:{','.join(modules)}"
    ),
    st.sampled_from(["sqrt", "auto", "sac:mm", "sac:aten.mm.default,bmm", "megatron:layernorm+mlp"]),
    SIZES.map("auto:{}".format),
    SHARES.map("budget:{}".format),
    SHARES.map("overhead:{}".format),
)


@given(GOOD)
def test_a_spec_prints_back_and_equals_itself(spec):
    policy = policies.get(spec)
    assert policy.spec == spec == str(policy)
    assert policies.get(policy.spec) == policy
    assert eval(repr(policy)) == policy
    assert hash(policies.get(spec)) == hash(policy)
    assert shlex.split(f"'{spec}'") == [spec]


@given(rule_policies())
def test_any_policy_by_rules_reads_back_from_its_rules(policy):
    assert policies.get(policy.canonical_spec) == policy
    assert policies.get(policy.spec) == policy


BROKEN = st.one_of(
    st.text(),
    st.text(alphabet="abeflmnopstuvy_:;,+*?.0123456789GiB", max_size=40),
    st.builds(lambda spec, at, text: spec[:at] + text + spec[at:], GOOD, st.integers(0, 30), st.text(max_size=3)),
    st.builds(lambda spec, at: spec[:at] + spec[at + 1 :], GOOD, st.integers(0, 30)),
    st.builds("{}{}".format, GOOD, GOOD),
    st.builds("plan:{}".format, st.text(max_size=10)),
)


@settings(max_examples=400)
@given(BROKEN)
def test_anything_else_is_a_value_error(text):
    try:
        policy = policies.get(text)
    except ValueError as error:
        assert str(error).strip()
    else:
        assert isinstance(policy, Policy | LayerPlan | Request)
        assert policy.spec == text.strip()


@pytest.mark.parametrize("given_", [None, 3, b"full", ["full"], Policy.save("a")])
def test_only_text_is_a_spec(given_):
    with pytest.raises(ValueError, match="expected a spec such as 'full', got"):
        policies.get(given_)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("", "got an empty one"),
        ("dots_savable", r"no spec 'dots_savable'; did you mean 'dots_saveable'\?"),
        ("Full", r"no spec 'Full'; did you mean 'full'\?"),
        (
            "save_out_proj",
            "'save_out_proj', which is ambiguous; did you mean 'maxtext:save_out_proj' or 'praxis:save_out_",
        ),
        ("dots", "'dots', which is ambiguous; did you mean 'dots_saveable' or"),
        ("minimal", r"did you mean 'maxtext:minimal'\?"),
        ("evry_k:3", r"did you mean 'every_k:'\?"),
        ("save_only_these_names", r"did you mean 'save:'\?"),
        ("save:", "expected names joined"),
        ("save:two words", "expected an identifier"),
        ("save:a,a", "expected each selector once, got 'a' twice"),
        ("save:a;offload:a", "expected each selector once, got 'a' twice"),
        ("save:a;but:b", "naming b would change nothing, since all that isn't named is recomputed"),
        ("save:a;offload:a", "expected each selector once, got 'a' twice"),
        ("ops:matmul;offload_ops:weight_matmul", "one decision for 'weight_matmul', a part of 'matmul', got offload"),
        ("save:a;full", "no rule 'full'"),
        ("ops:matmull", r"no op family 'matmull'; did you mean 'matmul'\?"),
        ("every_k", r"did you mean 'every_k:'\?"),
        ("every_k:0", "expected K from 1"),
        ("every_k:x", "expected a whole number, got 'x'"),
        ("every_k:²", "expected a whole number"),
        ("every_k:999999999", "expected K from 1 to 100000"),
        ("every_k:1,save:a", "would not use 'save:a'"),
        ("every_k:2,alternate:2", "expected a policy of one block"),
        ("every_k:2,auto", "expected a policy of one block"),
        ("alternate:-1", "expected a whole number"),
        ("torchtitan:0", "expected K from 1"),
        ("revolve:0", "expected SLOTS from 1"),
        ("mix:", "expected N*"),
        ("mix:2*", "expected N*"),
        ("mix:0*full", "expected N from 1"),
        ("mix:**full,2*none", "as the last count only"),
        ("mix:3*alternate:2", "expected a multiple of 2 layers"),
        ("mix:2*save:a,b", "inside a list names join"),
        ("mix:2*mix:2*full", "expected a policy, or one of the plans"),
        ("mix:2*auto", "which needs shapes first"),
        ("auto:60", "expected a number and a unit"),
        ("auto:0GiB", "expected a number and a unit"),
        ("budget:2", "number from 0 to 1"),
        ("budget:nan", "number from 0 to 1"),
        ("sqrt:4", "takes nothing after it"),
        ("megatron:mpl", r"no module 'mpl' to recompute; did you mean 'mlp'\?"),
        ("sac:gelu", "no op family keeps just the aten op 'gelu'"),
        ("plan:/no/such.json", "cannot read /no/such.json: No such file"),
        ("mix:" + "1*mix:" * 5000 + "full", "expected a policy, or one of the plans"),
        ("every_k:2," * 5000 + "full", "expected a policy of one block"),
    ],
)
def test_what_a_broken_spec_is_told(spec, said):
    with pytest.raises(ValueError, match=said.replace("N*", r"N\*")) as error:
        policies.get(spec)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("save:a?,b", Policy.save("a", "b").with_optional("a")),
        ("save:a+b", Policy.save("a", "b")),
        ("  full ", policies.get("full")),
        ("but:a", Policy.but("a")),
        ("none;offload:a", Policy(names=(("a", OFFLOAD),), default=SAVE)),
        ("none;offload:a;but:b", Policy(names=(("a", OFFLOAD), ("b", RECOMPUTE)), default=SAVE)),
        ("offload_all", Policy(default=OFFLOAD)),
        ("auto:1.5KiB", Request("auto", 1536)),
        ("auto", Request("auto")),
        ("budget:.25", Request("budget", 0.25)),
        ("overhead:0.03", Request("overhead", 0.03)),
        ("sqrt", Request("sqrt")),
        ("sac:mm,addmm,bmm,convolution", policies.get("ops:weight_matmul+batched_matmul+conv")),
    ],
)
def test_what_a_spec_stands_for(spec, expected):
    assert policies.get(spec) == expected


def test_a_shell_hands_on_a_quoted_spec():
    spec = "mix:2*save:a?+b,3*none;offload:c,**full"
    policies.get(spec)
    said = subprocess.run(["sh", "-c", f"printf %s '{spec}'"], capture_output=True, text=True, check=True).stdout
    assert said == spec
