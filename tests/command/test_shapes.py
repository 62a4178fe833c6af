"""Arguments described on a command line."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jremat.command.shapes import read_arguments

DTYPES = {
    "f32": jnp.float32,
    "bf16": jnp.bfloat16,
    "i32": jnp.int32,
    "u8": jnp.uint8,
    "float16": jnp.float16,
    "c64": jnp.complex64,
    "complex64": jnp.complex64,
}


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 9), max_size=4))
def test_an_array_is_what_is_written(dtype, shape):
    text = f"{dtype}[{','.join(map(str, shape))}]" if shape else dtype
    (args, kwargs) = read_arguments([text])
    assert args == (jax.ShapeDtypeStruct(tuple(shape), DTYPES[dtype]),) and kwargs == {}


def test_trees_keys_words_and_names():
    args, kwargs = read_arguments(["{'w': [f32[2], (i32[3], 'relu')]}", "key", "n=3, train=True"])
    tree, key = args
    assert tree["w"][0].shape == (2,) and tree["w"][1][1] == "relu"
    assert jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    assert kwargs == {"n": 3, "train": True}


@pytest.mark.parametrize("text", ["f64[2]", "int64", "u64[3]", "c128[2]"])
def test_what_jax_would_halve_in_silence_is_refused(text):
    with pytest.raises(ValueError, match=r"args: \w+ needs JAX's 64 bits; set JAX_ENABLE_X64=1"):
        read_arguments([text])
    with jax.enable_x64(True):
        [found], _ = read_arguments([text])
        assert found.dtype.itemsize == (16 if text.startswith("c") else 8)


@pytest.mark.parametrize(
    "text, said",
    [
        ("f33[3]", "did you mean 'f32'?"),
        ("c63[3]", "did you mean 'c64'?"),
        ("f32[3", "expected an array such as f32[8,128]"),
        ("f32[n]", "expected sizes"),
        ("f32[-1]", "expected sizes"),
        ("relu", "'key' or a quoted word, got 'relu'"),
        ("print('hello')", "expected an array such as f32[8,128]"),
        ("**{}", "got **"),
    ],
)
def test_anything_else_is_refused_and_nothing_is_evaluated(text, said, capsys):
    with pytest.raises(ValueError, match="args: ") as error:
        read_arguments([text])
    assert said in str(error.value) and capsys.readouterr().out == ""
