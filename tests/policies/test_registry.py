"""The zoo as a table, the way in, and the warning where JAX won't ask a policy."""

import subprocess
import sys
import warnings
from dataclasses import FrozenInstanceError, fields

import jax
import pytest

import policies
from jremat.policy import Policy
from jremat.policy.ops import SELECTABLE
from policies import __main__ as command
from policies import registry

ENTRIES = policies.table()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.spec)
def test_a_row_is_whole_and_its_policy_reads_back(entry):
    for field in fields(entry):
        if field.name not in ("aliases", "aten", "words"):
            assert getattr(entry, field.name), field.name
    assert (entry.words is None) == isinstance(entry.policy, Policy)  # of one policy formulas are derived
    for spec in (entry.policy.spec, *entry.aliases):
        policy = policies.get(spec)
        assert policy == entry.policy
        assert policy.spec == spec
        assert hash(policy) == hash(entry.policy)
        assert eval(repr(policy)) == policy
    if isinstance(entry.policy, Policy):
        assert policies.get(entry.policy.canonical_spec) == entry.policy


def test_rows_are_frozen_and_names_unique():
    with pytest.raises(FrozenInstanceError):
        ENTRIES[0].spec = "other"
    with pytest.raises(TypeError):
        registry.ZOO.named["mine"] = ENTRIES[0].policy
    names = policies.names()
    assert len(set(names)) == len(names)
    assert {policies.get(name).spec for name in names} == set(names)


# Every row of the table of specs, as users write it.
WRITTEN = """
none everything_saveable full nothing_saveable dots_saveable checkpoint_dots dots_with_no_batch_dims_saveable
checkpoint_dots_with_no_batch_dims save_only_matmuls torchtitan_selective_op selective core_attn megatron:mlp
megatron:layernorm megatron:moe_act megatron:core_attn megatron:moe megatron:shared_experts megatron:mla_up_proj
maxtext:minimal maxtext:save_qkv_proj maxtext:qkv_proj_offloaded maxtext:full maxtext:minimal_with_context
maxtext:minimal_flash maxtext:save_dot_with_context_except_mlp maxtext:save_dot_except_mlpwi
maxtext:save_dot_except_mlp maxtext:save_out_proj maxtext:minimal_offloaded save:a,b offload:a,b save:a;offload:b
but:a,b every_k:4 every_k:4,full alternate:2 torchtitan:2 block:3 block:3,full sqrt revolve:4 mix:2*save:a+b,3*full
offload_dots offload_inputs budget:0.4 overhead:0.03 auto:60GiB auto ops:matmul+attention praxis:save_dot_only
axlearn:flash_attention haliax:offload_carries
"""


@pytest.mark.parametrize("spec", WRITTEN.split())
def test_every_spec_of_the_design_reads(spec):
    assert policies.get(spec).spec == spec


def test_maxtexts_none_is_no_spec():
    with pytest.raises(ValueError, match="no spec 'maxtext:none'"):
        policies.get("maxtext:none")


def test_the_form_by_family_lists_every_family():
    entry = next(entry for entry in ENTRIES if entry.spec.startswith("ops:"))
    assert entry.kept.endswith(" ".join(["families:", *(family.name for family in SELECTABLE)]))


# -- where JAX won't ask ---------------------------------------------------------------------------------------


@pytest.fixture
def remat3():
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", before)


@pytest.mark.parametrize("spec", ["none", "dots_saveable", "save_only_matmuls", "maxtext:minimal_with_context"])
def test_a_plain_policy_that_jax_would_not_ask_warns_once(remat3, spec):
    with pytest.warns(UserWarning, match=f"'{spec}' as a plain JAX policy is not honoured under jax_remat3") as caught:
        policies.get(spec)
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize("spec", ["full", "selective", "alternate:2", "auto"])
def test_the_others_do_not_warn(remat3, spec):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policies.get(spec)


def test_names_warn_where_jax_does_not_ask_about_them(remat3):
    """What is warned about is so: the residuals of a policy by name under the new remat, counted."""
    import jax.numpy as jnp

    from jremat.policy import tag

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        policy = policies.get("save:a")
    f = jax.checkpoint(lambda x: jnp.sin(tag(jnp.sin(x), "a")), policy=policy)
    kept = len(jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(f, x)[1], jnp.ones(4))))
    assert kept == (1 if caught else 2)


# -- the command -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [60, 100])
def test_the_command_prints_every_row_whole(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert command.main([]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    for entry in ENTRIES:
        assert all(spec in out for spec in (entry.spec, *entry.aliases))
        assert "".join(entry.source.split()) in "".join(out.split())


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("core_attn", "jremat.checkpoint and jremat.remat only"),
        ("save:b,a?", "save:a?,b"),
        ("mix:2*every_k:2,rest*full", "in groups of 2"),
        ("auto:2KiB", "auto 2048"),
    ],
)
def test_the_command_says_what_a_spec_says(spec, said, capsys):
    assert command.main([spec]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "said"), [(["dots_savable"], "dots_saveable"), (["a", "b"], "one spec at most")])
def test_the_command_refuses_in_one_line(arguments, said, capsys):
    assert command.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


def test_the_module_runs():
    ran = subprocess.run([sys.executable, "-m", "policies", "full"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0
    assert "nothing_saveable" in ran.stdout
