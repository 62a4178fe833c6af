"""The dictionary for PyTorch users: made from the zoo, complete, and honest about what has no line there."""

import re
from pathlib import Path

import pytest

import policies
from jremat.policy import Policy
from policies.torch_expression import NotExpressible, express, express_plan, line_of

PAGE = Path(__file__).parents[2] / "docs" / "from-pytorch.md"


def test_every_policy_has_its_row():
    missing = [entry.spec for entry in policies.table() if f"`{entry.policy.spec}`" not in PAGE.read_text()]
    assert not missing


@pytest.mark.parametrize("spec", re.findall(r"^\| `[^`]+` \| `([^`A-Z]+)` \|", PAGE.read_text(), re.M))
def test_the_specs_named_beside_pytorchs_lines_exist(spec):
    assert policies.get(spec).spec == spec


@pytest.mark.parametrize(
    ("spec", "means"),
    {
        "none": "bare",
        "full": "checkpoint",
        "save:block_in": "checkpoint",
        "dots_saveable": "sac",
        "maxtext:minimal": "sac",
        "megatron:layernorm": "sac",
        "selective": "parts",
        "megatron:core_attn,mlp": "parts",
        "offload_inputs": "inputs_on_host",
    }.items(),
)
def test_the_means_that_pytorch_has_for_a_policy(spec, means):
    assert express(policies.get(spec)).means == means


@pytest.mark.parametrize(
    ("spec", "why"),
    {
        "offload_dots": "MUST_CPU_OFFLOAD as recompute",
        "save:mlp_up;offload:block_in": "MUST_CPU_OFFLOAD as recompute",
        "revolve:3": "a backward loop of its own",
        "auto:60GiB": "not for a device's memory",
        "overhead:0.1": "no bound on the FLOPs",
    }.items(),
)
def test_what_pytorch_can_not_say_is_said(spec, why):
    with pytest.raises(NotExpressible, match=why):
        line_of(policies.get(spec))


def test_a_planned_policy_and_a_family_without_aten_ops_are_refused():
    planned = Policy(values=(("3", policies.get("none").default),), fingerprint="0" * 16)
    with pytest.raises(NotExpressible, match="single values of a JAX program"):
        express(planned)


@pytest.mark.parametrize(
    ("spec", "groups"),
    {
        "every_k:2": [(2, "bare", True), (2, "bare", True), (1, "bare", True)],
        "every_k:3,full": [(3, "checkpoint", True), (2, "checkpoint", True)],
        "alternate:2": [(1, "checkpoint", False), (1, "bare", False)] * 2 + [(1, "checkpoint", False)],
        "mix:2*every_k:2,rest*none": [(2, "bare", True)] + [(1, "bare", False)] * 3,
        "block:2,dots_saveable": [(1, "sac", False)] * 2 + [(1, "bare", False)] * 3,
    }.items(),
)
def test_a_plan_over_five_layers(spec, groups):
    found = express_plan(policies.get(spec), 5)
    assert [(group.layers, group.expression.means, group.replayed) for group in found] == groups
