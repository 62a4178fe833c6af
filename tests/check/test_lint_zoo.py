"""No false alarm: the models of this repository under every registered policy, by tracing alone."""

import functools
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jremat
import models
import policies
from jremat.planner.request import Request
from models import config as sizes
from models.remat import remat, resolved
from models.transformer import block_apply, init_params
from scripts.training.lint import findings
from tests.models.families import GPT, LLAMA

LAYERS = 12
# Wide enough for 12 layers under any plan's segments, small enough to trace only.
GPT_DOT = replace(GPT, num_layers=LAYERS, hidden=32, head_dim=8, mlp_hidden=128, max_seq=32, dropout=0.1)
LLAMA_BLOCKWISE = replace(
    LLAMA, num_layers=LAYERS, hidden=32, head_dim=8, mlp_hidden=96, max_seq=32, attention="blockwise"
)
MODELS = {"gpt": GPT_DOT, "llama": LLAMA_BLOCKWISE}
TOKENS = jax.ShapeDtypeStruct((2, 32), jnp.int32)
# Groups of four keep four layers' activations alive: a true alarm, held against the compiler in test_lint.py.
TOO_LARGE = {"every_k:4"}


def distinct_specs():
    """One spec of each policy: aliases are equal."""
    named = {policies.get(spec): spec for spec in policies.names() if not isinstance(policies.get(spec), Request)}
    return sorted(named.values())


@functools.cache
def shapes(config):
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def lint_of(config, spec, stack):
    model = remat(policies.get(spec), config, stack).model(config)
    key = jax.random.key(1) if config.dropout else None
    return jremat.lint(lambda params, t: models.mean_loss(model, params, t, t, key), shapes(config), TOKENS)


@pytest.mark.parametrize("spec", distinct_specs())
@pytest.mark.parametrize("name", MODELS)
def test_no_false_alarm_on_our_models(name, spec):
    try:
        found = lint_of(MODELS[name], spec, "auto")
    except ValueError as error:  # a policy that speaks of what this block hasn't got says so
        assert "no value bears" in str(error) or "matches nothing" in str(error)
        return
    assert {finding.rule for finding in found} == ({"group-size"} if spec in TOO_LARGE else set())


@pytest.mark.parametrize("spec", ["full", "dots_saveable", "none"])
def test_no_false_alarm_in_the_other_executor_or_on_a_block(spec):
    config = MODELS["llama"]
    assert lint_of(config, spec, "chain") == ()
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), shapes(config)["blocks"])
    x = jax.ShapeDtypeStruct((2, 32, config.hidden), jnp.float32)
    carry = models.transformer.Carry(
        x, jax.ShapeDtypeStruct((), jnp.int32), None, jax.ShapeDtypeStruct((32,), jnp.int32)
    )
    assert jremat.lint(block_apply(config), layer, carry, policy=policies.get(spec)) == ()


@pytest.mark.parametrize("stack", ["scan", "chain"])
def test_thirty_two_layers_take_less_than_five_seconds_of_one_core(stack):
    config = replace(sizes.get("llama-1b"), num_layers=32)
    params = shapes(config)
    model = remat(policies.get("save_only_matmuls"), config, stack).model(config)
    tokens = jax.ShapeDtypeStruct((1, 2048), jnp.int32)
    began = time.process_time()
    assert jremat.lint(lambda params, t: models.mean_loss(model, params, t, t), params, tokens) == ()
    assert time.process_time() - began < 5


@pytest.mark.parametrize("spec, rules", [("dots_saveable", []), ("every_k:3", ["group-size"])])
def test_training_says_what_the_lint_finds_and_nothing_else(spec, rules):
    config = sizes.get("tiny")
    model = resolved(policies.get(spec), config, 8, 128).model(config)
    lines = findings(model, shapes(config), micro_batch=8, seq=128, seed=0)
    assert [line.count("cure:") for line in lines] == [1] * len(rules)
    assert all(f"[{rule}]" in line for rule, line in zip(rules, lines, strict=True))
