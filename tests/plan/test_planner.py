"""The planner's face: a budget in bytes, a plan that the compiler confirms, and what it says of itself."""

import json
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jremat
import policies
from jremat import PlanOptions
from jremat.planner.read_block import read_block
from jremat.planner.result import DoesNotFit
from jremat.planner.roofline import matmul_flops
from jremat.planner.stack import Stack
from jremat.policy import FULL, NONE, Policy
from jremat.transform.chain import stack
from jremat.transform.groups import gradient_step
from tests.plan.blocks import HIDDEN, ROWS, WIDE, bare, deep, deep_args, mlp, mlp_args, routed, routed_args

LAYERS = 8


def step_of(policy):
    w, x = mlp_args()
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((LAYERS, *leaf.shape), leaf.dtype), w)
    return gradient_step(stack(mlp, policy, num_layers=LAYERS)), stacked, x


def compiled(policy) -> int:
    return jremat.compiled_memory(*step_of(policy), target="cpu", num_buffers=0).peak_bytes


@pytest.fixture(scope="module")
def ends() -> tuple[int, int]:
    """Compiled peaks of the stack under full remat and under none."""
    return compiled(FULL), compiled(NONE)


@pytest.fixture(scope="module")
def planned(ends):
    """Plans for budgets from what none needs down to what full needs."""
    low, high = ends
    budgets = [low + (high - low) * k // 4 for k in (4, 3, 2, 1, 0)]
    # The prediction is a GPU's; a CPU's compiler may take more than two tries to agree with it.
    options = {"num_layers": LAYERS, "target": "cpu", "compiles": 6, "options": PlanOptions(margin=0)}
    return [jremat.plan(mlp, *mlp_args(), hbm_bytes=nbytes, **options) for nbytes in budgets]


def test_every_plan_fits_and_costs_more_the_less_memory_there_is(planned, ends):
    for plan in planned:
        assert plan.peak_bytes <= plan.hbm_bytes
        assert plan.peak_bytes == compiled(plan.policy), "the figure is the compiler's own"
    shares = [plan.recompute_share for plan in planned]
    assert shares == sorted(shares) and shares[0] == 0
    predicted = jremat.predicted_memory(*step_of(FULL)).peak_bytes
    for plan in planned:  # full remat of this block runs one of its two matmuls again
        assert plan.recompute_share <= 0.5 or plan.hbm_bytes < predicted
    assert planned[0].policy.spec != planned[-1].policy.spec


def test_the_predicted_peak_never_rises_as_the_frontier_goes_on(planned):
    for plan in planned:
        peaks = [point.predicted_peak_bytes for point in plan.frontier]
        flops = [point.recompute_flops for point in plan.frontier]
        assert peaks == sorted(peaks, reverse=True) and flops == sorted(flops)


def test_recomputed_flops_are_the_programs_own(planned):
    w, x = mlp_args()
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((LAYERS, *leaf.shape), leaf.dtype), w)
    for plan in planned:
        counted = jremat.flops(gradient_step(stack(mlp, plan.policy, num_layers=LAYERS)), stacked, x)
        assert plan.recompute_flops == counted.recompute


def test_gradients_under_every_plan_are_nones(planned):
    keys = jax.random.split(jax.random.key(0), 3)
    w = {
        "up": jax.random.normal(keys[0], (LAYERS, HIDDEN, WIDE)) / HIDDEN**0.5,
        "down": jax.random.normal(keys[1], (LAYERS, WIDE, HIDDEN)) / WIDE**0.5,
    }
    x = jax.random.normal(keys[2], (ROWS, HIDDEN))
    gradient = lambda policy: jax.tree.leaves(gradient_step(stack(mlp, policy, num_layers=LAYERS))(w, x)[1])
    expected = gradient(NONE)
    for plan in planned:
        for given_, wanted in zip(gradient(plan.policy), expected, strict=True):
            assert np.linalg.norm(given_ - wanted) <= 1e-6 * np.linalg.norm(wanted)


def test_a_last_layer_that_costs_no_memory_recomputes_nothing():
    """Where the peak is in its backward pass all of its activations are there, so all are kept, and no other's."""
    block = read_block(deep, *deep_args(), cost=matmul_flops, fetched=1)

    def peak(plan) -> int:
        policies_of = [plan] * LAYERS if isinstance(plan, Policy) else plan.policies(LAYERS)
        return 1 + sum(block.outcome(policy).kept_bytes for policy in policies_of[:-1])

    memory = {"hbm_bytes": 1, "compiles": 0, "options": PlanOptions(margin=0, predict=peak)}
    found = jremat.plan(deep, *deep_args(), num_layers=LAYERS, target="cpu", **memory)
    assert found.recompute_flops == (LAYERS - 1) * block.outcome(FULL).recompute_flops > 0


def test_nothing_fits_says_by_how_much_and_keeps_the_leanest():
    with pytest.raises(DoesNotFit, match=r"nothing fits in .* needs .* more") as caught:
        jremat.plan(mlp, *mlp_args(), num_layers=LAYERS, hbm_bytes=1000, target="cpu")
    assert isinstance(caught.value, ValueError)
    assert caught.value.leanest.peak_bytes > 1000


@pytest.fixture(scope="module")
def by_value():
    """A plan that keeps a value without a name."""
    found = jremat.plan(bare, *mlp_args(), num_layers=LAYERS, hbm_bytes=2**30, target="cpu", compiles=0)
    points = [point.plan for point in found.frontier if "[" in point.spec]
    return replace(found, policy=points[0])


def bare_stack(policy, rows=ROWS):
    w, x = mlp_args(rows)
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((LAYERS, *leaf.shape), leaf.dtype), w)
    return gradient_step(stack(bare, policy, num_layers=LAYERS)), stacked, x


def test_a_plan_is_plain_data_that_can_be_read_back(by_value, tmp_path):
    with pytest.raises(ValueError, match="save it first"):
        _ = by_value.spec
    saved = by_value.save(tmp_path / "plan.json")
    assert saved.spec == f"plan:{tmp_path / 'plan.json'}"
    again = policies.get(saved.spec)
    assert again == by_value.policy
    assert jremat.flops(*bare_stack(again)) == jremat.flops(*bare_stack(by_value.policy))
    facts = json.loads((tmp_path / "plan.json").read_text())
    assert facts["peak_bytes"] == by_value.peak_bytes and facts["versions"]["jax"] == jax.__version__
    assert f"float32[{ROWS}, {HIDDEN}]" in facts["shapes"]


def test_a_plan_is_refused_for_other_shapes(by_value):
    step, *shapes = bare_stack(by_value.policy, rows=2 * ROWS)
    with pytest.raises(
        ValueError, match=r"first operation that differs is .* other shapes, another function or another JAX"
    ):
        jax.eval_shape(step, *shapes)


def test_a_function_without_layers_gets_a_policy():
    w, x = mlp_args()
    none = jremat.plan(mlp, w, x, hbm_bytes=2**30, target="cpu", compiles=0)
    assert isinstance(none.policy, Policy) and none.recompute_flops == 0 and none.peak_bytes is None
    assert none.compiles == 0


def test_only_tags_are_kept_where_plain_remat_is_to_run_the_plan():
    args = deep_args()
    block = read_block(deep, *args, cost=matmul_flops, fetched=1, names_only=True)
    found = [choice.plan for choice in Stack(block, 1, 0).choices()]
    assert policies.get("save:second") in found
    for policy in found:
        assert not policy.values
        kept = jremat.residuals(jax.checkpoint(deep, policy=policy), *args).total_bytes if policy != NONE else None
        assert kept in (None, block.outcome(policy).kept_bytes), policy.spec


def test_a_choice_by_value_is_never_made_twice():
    block = read_block(routed, *routed_args(), cost=matmul_flops, fetched=1)
    whole, nodes = Stack(block, 4, 0), block.problem.nodes
    assert all(whole.repeats_a_decision(policies.get(spec)) for spec in ("full", "every_k:2", "revolve:2"))
    choices = whole.choices()
    assert choices
    for choice in choices:
        for policy in {choice.plan} if isinstance(choice.plan, Policy) else set(choice.plan.policies(4)):
            outcome = block.outcome(policy)
            for place in outcome.recomputed:
                assert not nodes[place].forced
                # JAX's derivative of top_k reads its own result, so it runs again: from the values of the first run.
                if nodes[place].primitive == "top_k":
                    assert set(nodes[place].reads) <= set(outcome.held), choice.plan.spec
    found = jremat.plan(routed, *routed_args(), num_layers=4, hbm_bytes=2**30, target="cpu", compiles=0)
    assert not whole.repeats_a_decision(found.policy)
    marked = read_block(routed, *routed_args(), cost=matmul_flops, fetched=1, keep=("router",))
    assert any(node.forced and node.name == "router" for node in marked.problem.nodes)
    with pytest.raises(ValueError, match="keep: expected tags of this function"):
        read_block(routed, *routed_args(), cost=matmul_flops, keep=("routr",))


NONSENSE = {
    "num_layers": ({"num_layers": 0}, "num_layers: expected a whole number of at least 1, got 0"),
    "layers in words": ({"num_layers": "3"}, "num_layers: expected a whole number of at least 1, got '3'"),
    "half a layer": ({"num_layers": 2.5}, "num_layers: expected a whole number of at least 1, got 2.5"),
    "memory without a unit": ({"hbm_bytes": "one"}, "hbm_bytes: size: expected a number and a unit"),
    "no number": ({"hbm_bytes": float("nan")}, "hbm_bytes: expected bytes as a number"),
    "endless": ({"hbm_bytes": float("inf")}, "hbm_bytes: expected bytes as a number"),
    "half a byte": ({"host_bytes": 0.5}, "host_bytes: expected a whole number"),
    "margin in words": ({"margin": "0.1"}, "margin: expected a share from 0 to 1, got '0.1'"),
    "half a compile": ({"compiles": 1.5}, "compiles: expected a whole number of at least 0, got 1.5"),
    "specs": ({"also": ["dots_saveable"]}, "also: expected what policies.get returns"),
    "one policy": ({"also": FULL}, "also: expected policies in a list"),
    "a request": ({"also": [policies.get("auto")]}, "also: expected what policies.get returns"),
    "a plan without layers": (
        {"also": [policies.get("every_k:2")], "num_layers": None},
        "also: 'every_k:2' is a plan over layers, and there is no num_layers",
    ),
    "one tag": ({"keep": "up"}, "keep: expected tags in a list, got 'up'"),
    "hbm_bytes": ({"hbm_bytes": 0}, "hbm_bytes: expected more than 0"),
    "unknown memory": ({"hbm_bytes": None}, "memory of target 'cpu' is unknown"),
    "host_bytes": ({"host_bytes": -1}, "host_bytes: expected a whole number of at least 0"),
    "margin": ({"margin": 1.0}, "margin: expected a share from 0 to 1"),
    "compiles": ({"compiles": -1}, "compiles: expected a whole number of at least 0"),
    "objective": ({"objective": "second"}, "objective: expected 'seconds' or 'flops', got 'second'"),
    "seconds without a chip": ({"objective": "seconds"}, "no chip of the table"),
    "a cost in words": ({"cost": 3}, "cost: expected a function, got 3"),
    "a step in words": ({"step": 3}, "step: expected a function, got 3"),
    "a prediction in words": ({"predict": "much"}, "predict: expected a function, got 'much'"),
    "names in words": ({"names_only": "yes"}, "names_only: expected True or False, got 'yes'"),
    "devices without a step": ({"target": "h200x8"}, "step: expected the whole step, cut over the devices of target"),
    "a cost for all": ({"cost": lambda graph: 3}, r"cost: expected \d+ costs of at least 0, one for each.*, got 3"),
    "too few costs": ({"cost": lambda graph: (1.0,)}, r"cost: expected \d+ costs of at least 0, .*, got 1 of them"),
    "costs below 0": ({"cost": lambda graph: [-1.0] * len(graph.ops)}, r"cost: expected \d+ costs of at least 0"),
    "a step of nothing": ({"step": lambda: None}, r"step: expected a function of one argument, got one of \(\)"),
    "arguments too many": ({"step": lambda plan: (lambda x: x, (1, 2))}, r"got 2 shapes for a step of \(x\)"),
    "host bytes in other words": ({"host_bytes": "2 much"}, "host_bytes: size: expected a number and a unit"),
    "no step": ({"step": lambda plan: None}, "step: expected to return the step and a tuple of .* got None"),
    "no prediction": ({"predict": lambda plan: None}, "predict: expected to return bytes, .* got None"),
    "a prediction below 0": ({"predict": lambda plan: -1}, "predict: expected to return bytes, .* got -1"),
    "options in a dictionary": (
        {"options": {"margin": 0}},
        "options: expected a jremat.PlanOptions, got {'margin': 0}",
    ),
    "target": ({"target": "h20"}, "'h20' is unknown; near: h200"),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_refused_in_a_line(case):
    changed, message = NONSENSE[case]
    given = {"num_layers": LAYERS, "hbm_bytes": 2**30, "target": "cpu"} | changed
    seldom = {name: given.pop(name) for name in vars(PlanOptions()) if name in given}
    with pytest.raises(ValueError, match=message):
        jremat.plan(mlp, *mlp_args(), **({"options": PlanOptions(**seldom)} | given))


def test_a_numpy_integer_is_a_number_of_layers():
    found = jremat.plan(mlp, *mlp_args(), num_layers=np.int64(3), hbm_bytes=2**30, target="cpu", compiles=0)
    assert found.recompute_flops == 0


TRIVIAL = {
    "its input": (lambda w, x: x, 3),
    "its input, without layers": (lambda w, x: x, None),
    "no matmul": (lambda w, x: jnp.sin(jnp.tanh(x)), 3),
    "one result of complex numbers": (lambda w, x: jnp.sin(jnp.fft.fft(x).real), 3),
}


@pytest.mark.parametrize("case", TRIVIAL)
def test_blocks_with_little_to_choose_have_their_plans(case):
    block, layers = TRIVIAL[case]
    found = jremat.plan(block, *mlp_args(), num_layers=layers, hbm_bytes=2**30, target="cpu", compiles=0)
    assert found.recompute_flops == 0 and found.frontier


def test_no_floating_point_is_no_block():
    with pytest.raises(ValueError, match="args: expected a floating-point array"):
        jremat.plan(lambda w, x: x + w, jnp.int32(1), jnp.int32(2), num_layers=2, hbm_bytes=2**30, target="cpu")


def test_policies_beside_the_plan_may_come_one_by_one():
    some = (policies.get(spec) for spec in ("full", "dots_saveable"))
    more = PlanOptions(also=some)
    found = jremat.plan(mlp, *mlp_args(), num_layers=3, hbm_bytes=2**30, target="cpu", compiles=0, options=more)
    assert [point.spec for point in found.beside] == ["full", "dots_saveable"]


def test_named_policies_cost_the_same_where_only_tags_may_be_kept():
    options = {"num_layers": 3, "hbm_bytes": 2**30, "target": "cpu", "compiles": 0}
    named = [policies.get(spec) for spec in ("dots_saveable", "full")]
    more = [PlanOptions(also=named, names_only=only) for only in (False, True)]
    every, tags = (jremat.plan(bare, *mlp_args(), **options, options=each).beside for each in more)
    assert [p.recompute_flops for p in every] == [p.recompute_flops for p in tags]
    assert every[0].recompute_flops == 0


def test_seconds_are_none_where_flops_are_the_aim():
    found = jremat.plan(mlp, *mlp_args(), num_layers=3, hbm_bytes=2**30, target="cpu", compiles=0)
    assert found.objective == "flops"
    assert found.recompute_seconds is found.step_seconds is found.frontier[0].recompute_seconds is None


def test_a_plan_with_a_value_that_the_block_has_not_is_refused(by_value):
    policy = by_value.policy
    lost = replace(policy, values=(*policy.values, ("v999", policy.values[0][1])))
    with pytest.raises(ValueError, match="keeps the value 'v999', which this function hasn't"):
        jax.eval_shape(jremat.checkpoint(bare, replace(lost, fingerprint=fingerprint_of_bare())), *mlp_args())


def fingerprint_of_bare() -> str:
    return read_block(bare, *mlp_args(), cost=matmul_flops).problem.fingerprint


def test_memory_may_be_given_with_its_unit():
    w, x, more = jnp.ones((8, 8)), jnp.ones((4, 8)), {"num_layers": 2, "target": "cpu", "compiles": 0}
    found = jremat.plan(lambda w, x: jnp.tanh(x @ w), w, x, hbm_bytes="40MiB", **more)
    assert found.hbm_bytes == 40 * 2**20
    with pytest.raises(ValueError, match="hbm_bytes: size: expected a number and a unit"):
        jremat.plan(lambda w, x: jnp.tanh(x @ w), w, x, hbm_bytes="40", **more)


@pytest.mark.parametrize("f, args, what", [(nn.Dense(4), 2, "f: expected a function"), (jnp.tanh, 1, "args: expected")])
def test_a_module_or_a_layer_without_its_carry_is_refused_in_a_line(f, args, what):
    with pytest.raises(ValueError, match=what):
        jremat.plan(f, *[jnp.ones((4, 4))] * args, num_layers=2, hbm_bytes=2**20, target="cpu")
