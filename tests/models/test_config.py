from dataclasses import replace
from functools import partial

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models
from jremat.estimator.config import TransformerConfig

SMALL = TransformerConfig(
    vocab_size=11, num_layers=2, hidden=12, heads=4, kv_heads=4, head_dim=6, mlp_hidden=20, max_seq=9
)

# GPT-2 and Llama 3: the sums of the published checkpoints' shapes
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
}


def initialised(config):
    shapes = jax.eval_shape(partial(models.init_params, config), jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("name", models.sizes)
def test_closed_form_equals_the_initialised_tree(name):
    assert models.get(name).num_params() == initialised(models.get(name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name):
    assert models.get(name).num_params() == PUBLISHED[name]


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_closed_form_for_any_mix_of_kinds(data):
    draw = lambda *values: data.draw(st.sampled_from(values))
    config = replace(
        SMALL,
        kv_heads=draw(1, 2, 4),
        norm=draw("layernorm", "rmsnorm"),
        mlp=draw("gelu", "swiglu"),
        positions=draw("learned", "rope"),
        bias=draw(True, False),
        qkv_bias=draw(True, False),
        tied_embeddings=draw(True, False),
    )
    assert config.num_params() == initialised(config)
    assert TransformerConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": 0}, "hidden: expected a whole number of at least 1, got 0"),
        ({"num_layers": -1}, "num_layers: expected a whole number of at least 1, got -1"),
        ({"heads": 4.0}, "heads: expected a whole number of at least 1, got 4.0"),
        ({"vocab_size": True}, "vocab_size: expected a whole number of at least 1, got True"),
        ({"attention_block": 0}, "attention_block: expected a whole number of at least 1, got 0"),
        ({"kv_heads": 3}, "kv_heads: expected a divisor of heads=4, got 3"),
        ({"kv_heads": 8}, "kv_heads: expected a divisor of heads=4, got 8"),
        ({"positions": "rope", "head_dim": 5}, "head_dim: expected an even number, since RoPE turns pairs, got 5"),
        ({"norm": "rmsnrm"}, "norm: expected 'layernorm' or 'rmsnorm', got 'rmsnrm'; did you mean 'rmsnorm'"),
        ({"attention": None}, "attention: expected 'dot' or 'blockwise' or 'cudnn', got None"),
        ({"compute_dtype": "float16"}, "compute_dtype: expected 'float32' or 'bfloat16', got 'float16'"),
        ({"attention": "cudnn"}, "compute_dtype: expected 'bfloat16' with attention='cudnn', got 'float32'"),
        ({"dropout": 1.0}, "dropout: expected a rate of at least 0 and below 1, got 1.0"),
        ({"dropout": float("nan")}, "dropout: expected a rate of at least 0 and below 1, got nan"),
        ({"rope_theta": 0.0}, "rope_theta: expected a positive number, got 0.0"),
        ({"norm_eps": "1e-5"}, "norm_eps: expected a positive number, got '1e-5'"),
        ({"bias": 1}, "bias: expected True or False, got 1"),
    ],
)
def test_a_wrong_field_is_named(change, message):
    with pytest.raises(ValueError) as error:
        replace(SMALL, **change)
    assert str(error.value).startswith(message)


def test_from_dict_names_what_is_missing():
    data = SMALL.to_dict()
    del data["hidden"]
    with pytest.raises(ValueError, match=r"^hidden: TransformerConfig needs it"):
        TransformerConfig.from_dict(data)


def test_an_unlike_name_lists_every_size():
    with pytest.raises(ValueError, match="no size 'zzz'; there are tiny, tiny-llama, gpt2"):
        models.get("zzz")
