"""Arguments that are only described: ``f32[8,128]`` on a command line."""

import ast
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from jremat.policy.messages import near

_SHORT = {
    **{f"f{n}": f"float{n}" for n in (16, 32, 64)},
    **{f"i{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"u{n}": f"uint{n}" for n in (8, 16, 32, 64)},
    **{f"c{n}": f"complex{n}" for n in (64, 128)},
    "bf16": "bfloat16",
}
_DTYPES = (*_SHORT, *_SHORT.values(), "bool")
EXAMPLE = "--args 'f32[8,128]' 'f32[128,512]'"


def read_arguments(texts: Sequence[str], letters: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from their texts.

    An array is written ``dtype[shape]``, a random key ``key``, a pytree as Python writes it; other words and numbers
    stand for themselves. Nothing is evaluated.

    Args:
        texts: one an argument.
        letters: sizes may be letters and products of them, ``f32[b,4*h]``.

    Raises:
        ValueError: a text that says none of these.

    >>> read_arguments(["{'w': f32[4,8], 'b': bf16[8]}", "f32[2,4]", "train=True"])[1]
    {'train': True}
    >>> read_arguments(["f32[2,4]"])[0][0].shape
    (2, 4)
    >>> read_arguments(["f32[b,4*h]"], letters=True)[0][0].shape
    (b, 4*h)
    """
    scope = jax.export.SymbolicScope() if letters else None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for text in texts:
        try:
            call = ast.parse(f"f({text})", mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"args: expected an array such as f32[8,128], got {text!r}") from error
        assert isinstance(call, ast.Call)
        args += [_value(node, text, scope) for node in call.args]
        kwargs |= {keyword.arg or "": _value(keyword.value, text, scope) for keyword in call.keywords}
    if "" in kwargs:
        raise ValueError("args: expected names and arrays, got **")
    return tuple(args), kwargs


def _value(node: ast.AST, text: str, scope: Any = None) -> Any:
    match node:
        case ast.Subscript(value=ast.Name(id=dtype), slice=sizes):
            return jax.ShapeDtypeStruct(_shape(sizes, text, scope), _dtype(dtype))
        case ast.Subscript(value=ast.Name(id=dtype)) | ast.Name(id=dtype) if dtype in _DTYPES:
            return jax.ShapeDtypeStruct((), _dtype(dtype))
        case ast.Name(id="key"):
            return jax.eval_shape(lambda: jax.random.key(0))
        case ast.Name(id=word):
            raise ValueError(f"args: expected an array such as f32[8,128], 'key' or a quoted word, got {word!r}")
        case ast.Dict(keys=keys, values=values):
            return {_value(key, text) if key else "**": _value(value, text, scope) for key, value in zip(keys, values)}
        case ast.List(elts=items):
            return [_value(item, text, scope) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item, text, scope) for item in items)
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise ValueError(f"args: expected an array such as f32[8,128], got {text!r}") from error


def _shape(node: ast.AST, text: str, scope: Any) -> tuple[Any, ...]:
    items = node.elts if isinstance(node, ast.Tuple) else [node]
    if scope is not None and items:
        try:
            return tuple(jax.export.symbolic_shape(f"({', '.join(map(ast.unparse, items))},)", scope=scope))
        except ValueError as error:
            raise ValueError(f"args: expected numbers and letters in brackets, got {text!r}") from error
    sizes = [item.value if isinstance(item, ast.Constant) else None for item in items]
    if any(not isinstance(size, int) or isinstance(size, bool) or size < 0 for size in sizes):
        raise ValueError(f"args: expected sizes of at least 0 in brackets, got {text!r}")
    return tuple(size for size in sizes if isinstance(size, int))


def _dtype(name: str) -> Any:
    if name not in _DTYPES:
        raise ValueError(f"args: expected a dtype such as f32, bf16 or i32, got {name!r}{near(name, _DTYPES, 1, 0.4)}")
    dtype = jnp.dtype(_SHORT.get(name, name))
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:  # JAX would take half of it in silence
        raise ValueError(f"args: {name} needs JAX's 64 bits; set JAX_ENABLE_X64=1")
    return dtype
