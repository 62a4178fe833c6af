"""Other systems' settings: what each becomes here, and that what is not carried over is said."""

import pytest

import policies
from jremat.policy import OFFLOAD, RECOMPUTE, SAVE, Policy

MEGATRON = [
    ("", "none", []),
    ("--lr 1e-4 --num-layers 32", "none", ["left out, as not about activations: --lr"]),
    ("--recompute-activations", "megatron:core_attn", []),
    ("--recompute-granularity selective", "megatron:core_attn", []),
    ("--recompute-granularity=selective --recompute-modules layernorm mlp", "megatron:layernorm,mlp", []),
    ("--recompute_granularity selective --recompute_modules=layernorm,mlp", "megatron:layernorm,mlp", []),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "full", []),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 4", "every_k:4", []),
    ("--recompute-granularity full --recompute-method uniform", "full", ["1 is taken"]),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 12", "block:12", []),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 3 "
        "--pipeline-model-parallel-size 2",
        "block:3",
        ["of one pipeline stage: give it to each of 2"],
    ),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 3 "
        "--pipeline-model-parallel-size 2 --num-layers 8",
        "mix:3*full,1*none,3*full,1*none",
        ["the first 3 layers of each of 2 stages"],
    ),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 "
        "--pipeline-model-parallel-size 2 --distribute-saved-activations",
        "every_k:2",
        ["--distribute-saved-activations: kept inputs are not sharded", "from each stage's first layer"],
    ),
    ("--recompute-method block", "none", ["--recompute-method: without effect"]),
    (
        "--recompute-activations --recompute-num-layers 2",
        "megatron:core_attn",
        ["--recompute-num-layers: without effect"],
    ),
    ("--recompute-activations --use-flash-attn", "megatron:core_attn", ["core_attn has no effect"]),
    ("--recompute-activations --attention-backend flash", "megatron:core_attn", ["core_attn has no effect"]),
    ("--recompute-activations --attention-backend unfused", "megatron:core_attn", []),
    ("--recompute-something new", "none", ["--recompute-something: unknown here, not carried over"]),
    (
        "--cpu-offloading --cpu-offloading-num-layers 2",
        "none",
        ["offloading whole layers", "--cpu-offloading-num-layers"],
    ),
    ("--offload-modules attn_norm", "none", ["without effect unless --fine-grained"]),
    (
        "--recompute-granularity selective --recompute-modules layernorm --fine-grained-activation-offloading "
        "--offload-modules core_attn attn_proj expert_fc1",
        "none;offload:attn_out,key,query,value;but:attn_norm,mlp_norm",
        ["expert_fc1: its input has no tag"],
    ),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 "
        "--fine-grained-activation-offloading --offload-modules core_attn",
        "every_k:2",
        ["--offload-modules: not carried over beside 'every_k:2'"],
    ),
]


@pytest.mark.parametrize(("arguments", "spec", "notes"), MEGATRON)
def test_from_megatron(arguments, spec, notes):
    translation = policies.translate("megatron", arguments)
    assert translation.policy == policies.get(spec)
    assert policies.get(translation.policy.spec) == translation.policy
    assert len(translation.notes) == len(notes)
    for note, part in zip(translation.notes, notes, strict=True):
        assert part in note
    assert policies.translate("megatron", arguments.split()) == translation


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("full", "expected flags"),
        ("--recompute-granularity half", "--recompute-granularity has no value 'half'"),
        ("--recompute-granularity full", "expected --recompute-method uniform or block"),
        ("--recompute-granularity full --recompute-method blok", r"did you mean 'block'\?"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 0", "at least 1, got '0'"),
        ("--recompute-activations --recompute-granularity full", "expected one of"),
        ("--recompute-granularity selective --recompute-modules mpl", r"did you mean 'mlp'\?"),
        ("--fine-grained-activation-offloading --offload-modules core", "no module to offload 'core'"),
        (
            "--recompute-granularity full --recompute-method block --pipeline-model-parallel-size 3 --num-layers 8",
            "expected --num-layers to divide by 3 stages, got 8",
        ),
    ],
)
def test_from_megatron_refuses(arguments, said):
    with pytest.raises(ValueError, match=said):
        policies.translate("megatron", arguments)


HUGGINGFACE = [
    (None, "full", []),
    ({"use_reentrant": False}, "full", []),
    ({"use_reentrant": True}, "full", ["use_reentrant: there is one kind here"]),
    ({"use_reentrant": False, "preserve_rng_state": False}, "full", ["preserve_rng_state: random keys are inputs"]),
    ({"preserve_rng_state": True, "determinism_check": "default", "debug": False, "early_stop": True}, "full", []),
    ({"determinism_check": "none", "debug": True}, "full", ["determinism_check: not carried", "debug: not carried"]),
    ({"context_fn": print}, "full", ["context_fn: a function can't be carried over"]),
    ({"every_n_layers": 3}, "alternate:3", []),
    ({"every_n_layers": 1}, "full", []),
    ({"use_reentrent": False}, "full", ["use_reentrent: unknown here, not carried over"]),
]


@pytest.mark.parametrize(("kwargs", "spec", "notes"), HUGGINGFACE)
def test_from_huggingface(kwargs, spec, notes):
    translation = policies.translate("huggingface", kwargs)
    assert translation.policy == policies.get(spec)
    assert len(translation.notes) == len(notes)
    assert all(part in note for note, part in zip(translation.notes, notes, strict=True))


def test_from_huggingface_switched_off():
    assert policies.translate("huggingface", gradient_checkpointing=False) == policies.Translation(policies.get("none"))
    off = policies.translate("huggingface", {"use_reentrant": True}, gradient_checkpointing=False)
    assert off.policy == policies.get("none") and "without effect" in off.notes[0]
    with pytest.raises(ValueError, match="every_n_layers: expected a whole number"):
        policies.translate("huggingface", {"every_n_layers": 0})


TORCHTITAN = [
    ({"mode": "none"}, "none"),
    ({"mode": "full"}, "full"),
    ({"activation_checkpoint": {"mode": "full"}}, "full"),
    ({}, "torchtitan:2"),
    ({"mode": "selective", "selective_ac_option": "3"}, "torchtitan:3"),
    ({"mode": "selective", "selective_ac_option": 3}, "torchtitan:3"),
    ({"mode": "selective", "selective_ac_option": "0"}, "full"),
    ({"mode": "selective", "selective_ac_option": "op"}, "torchtitan_selective_op"),
    ({"mode": "memory_budget", "memory_budget": 0.25}, "budget:0.25"),
    ({"mode": "memory_budget"}, "budget:0.5"),
]


@pytest.mark.parametrize(("config", "spec"), TORCHTITAN)
def test_from_torchtitan(config, spec):
    assert policies.translate("torchtitan", config).policy == policies.get(spec)


def test_from_torchtitan_forced_matmuls_leave_the_count():
    """Without wq the count goes wk wv wo w1 w3 w2, so that wk, wo and w3 are kept."""
    key = "per_op_sac_force_recompute_mm_shapes_by_fqns"
    forced = {
        "mode": "selective",
        "selective_ac_option": "op",
        key: ["layers.0.attention.wq", "moe.router.gate", "head"],
    }
    policy, notes = (translation := policies.translate("torchtitan", forced)).policy, translation.notes
    assert {name for name, decision in policy.names if decision is SAVE} == {"key", "attn_proj", "mlp_up"}
    assert policy.families == policies.get("torchtitan_selective_op").families
    assert policies.get(policy.spec) == policy
    assert any("moe.router.gate" in note for note in notes)
    assert any("'head': unknown here" in note for note in notes)
    assert any("by weight shape there" in note for note in notes)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"mode": "ful"}, r"torchtitan has no 'ful'; did you mean 'full'\?"),
        ({"selective_ac_option": "ops"}, "expected 'op' or a whole number"),
        ({"mode": "memory_budget", "memory_budget": 3}, "number from 0 to 1"),
        ({"activation_checkpoint": "full"}, "expected a table"),
    ],
)
def test_from_torchtitan_refuses(config, said):
    with pytest.raises(ValueError, match=said):
        policies.translate("torchtitan", config)


def test_from_torchtitan_says_what_is_lost():
    notes = policies.translate("torchtitan", {"mode": "full", "early_stop": False, "new_knob": 1}).notes
    assert len(notes) == 2
    assert "JAX never recomputes" in notes[0] and "new_knob: unknown here" in notes[1]


MAXTEXT_NAMES = [spec for spec in policies.names() if spec.startswith("maxtext:")]


@pytest.mark.parametrize("spec", MAXTEXT_NAMES)
def test_from_maxtext_by_name(spec):
    assert policies.translate("maxtext", spec.removeprefix("maxtext:")) == policies.Translation(policies.get(spec))


MAXTEXT_CUSTOM = [
    ({}, "full", []),
    ({"decoder_layer_input": "device"}, "full", []),
    ({"decoder_layer_input": "offload"}, "offload_inputs", []),
    ({"decoder_layer_input": "remat"}, "full", ["kept all the same"]),
    ({"qkv_proj": "device"}, "save:query,key,value", []),
    ({"qkv_proj": "device", "query_proj": "device"}, "save:query,key,value", []),
    ({"mlpwi_0": "device", "mlpwi_1": "offload"}, "save:mlp_gate?;offload:mlp_up", []),
    ({"mlpwi": "offload", "out_proj": "device", "mlpwo": "remat"}, "save:attn_proj;offload:mlp_up", []),
    ({"context": "device"}, "praxis:save_context", []),
    ({"context": "offload"}, "offload:attn_out;offload_ops:attention", []),
    ({"moe_mlpwi_0": "device", "mla_q": "remat"}, "full", ["moe_mlpwi_0: our models have no such tensor"]),
]


@pytest.mark.parametrize(("tensors", "spec", "notes"), MAXTEXT_CUSTOM)
def test_from_maxtext_custom(tensors, spec, notes):
    translation = policies.translate("maxtext", "custom", tensors)
    assert translation.policy == policies.get(spec)
    assert len(translation.notes) == len(notes)
    assert all(part in note for note, part in zip(translation.notes, notes, strict=True))


def test_from_maxtext_says_and_refuses():
    none = policies.translate("maxtext", "none")
    assert none.policy == policies.get("full") and "full remat" in none.notes[0]
    assert "without effect" in policies.translate("maxtext", "minimal", {"context": "device"}).notes[0]
    for arguments, said in [
        (("minimul",), r"MaxText has no 'minimul'; did you mean 'minimal'\?"),
        (("custom", {"context": "gpu"}), "context: MaxText has no place 'gpu'"),
        (("custom", {"qkv_proj": "device", "key_proj": "offload"}), "expected one place for key here"),
    ]:
        with pytest.raises(ValueError, match=said):
            policies.translate("maxtext", *arguments)


def test_a_translation_prints_its_notes():
    assert str(policies.translate("megatron", "--recompute-activations --lr 1")) == (
        "megatron:core_attn\n  note: left out, as not about activations: --lr"
    )


def test_offloaded_and_left_out_beside_kept():
    policy = policies.get("none;offload:attn_out;but:attn_norm")
    assert policy == Policy(names=(("attn_norm", RECOMPUTE), ("attn_out", OFFLOAD)), default=SAVE)
