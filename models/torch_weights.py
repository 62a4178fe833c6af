"""Parameters of the Flax transformer as its PyTorch twin's, and back, exactly.

A Flax kernel is [*inputs, *outputs], PyTorch's weight [outputs, inputs]; the scanned blocks have a leading layer axis,
the twin a module a layer. Everything else has one name and one shape.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jremat.estimator.config import TransformerConfig
from models.torch_twin import Transformer


def from_flax(config: TransformerConfig, params: Mapping[str, Any]) -> Transformer:
    """The twin with the parameters of a Flax model.

    Args:
        config: of both.
        params: ``models.init_params``'s tree.
    """
    model = Transformer(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            leaf, layer = _place(name)
            value = np.asarray(_leaf(params, leaf), np.float32)  # exact for float32 and bfloat16
            value = value if layer is None else value[layer]
            if leaf[-1] == "kernel":  # [*inputs, *outputs] to [outputs, inputs]
                value = value.reshape(parameter.shape[1], parameter.shape[0]).T
            parameter.copy_(torch.tensor(np.ascontiguousarray(value)).reshape(parameter.shape))
    return model


def to_flax(config: TransformerConfig, tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Parameters or their gradients as the Flax model's tree, in float32.

    Args:
        config: of both.
        tensors: by the twin's parameter names: ``dict(model.named_parameters())``, or each one's ``.grad`` (None is
            zero).
    """
    tree: dict[str, Any] = {}
    for (leaf, layer), tensor in sorted(((_place(n), t) for n, t in tensors.items()), key=lambda item: item[0][1] or 0):
        node = tree
        for key in leaf[:-1]:
            node = node.setdefault(key, {})
        shape = _flax_shape(config, leaf)
        if tensor is None:
            value = np.zeros(shape, np.float32)
        else:
            value = tensor.detach().float().cpu().numpy()
            value = (value.T if leaf[-1] == "kernel" else value).reshape(shape)
        if layer is None:
            node[leaf[-1]] = value
        else:
            node.setdefault(leaf[-1], []).append(value)
    return {**tree, "blocks": _stacked(tree["blocks"])}


_HEADS = {"query": "heads", "key": "kv_heads", "value": "kv_heads"}


def _place(name: str) -> tuple[tuple[str, ...], int | None]:
    """Where a parameter of the twin lies in the Flax tree: its path, and its layer.

    >>> _place("blocks.3.query.weight"), _place("head")
    ((('blocks', 'query', 'kernel'), 3), (('head',), None))
    """
    head, *rest = name.split(".")
    if head != "blocks":
        return (head, *rest), None
    layer, *path = rest
    return ("blocks", *path[:-1], "kernel" if path[-1] == "weight" else path[-1]), int(layer)


def _flax_shape(config: TransformerConfig, leaf: tuple[str, ...]) -> tuple[int, ...]:
    c, module = config, leaf[-2] if len(leaf) > 1 else leaf[0]
    wide = {"mlp_gate", "mlp_up"}
    if module in _HEADS:
        outputs: tuple[int, ...] = (getattr(c, _HEADS[module]), c.head_dim)
    elif module in wide:
        outputs = (c.mlp_hidden,)
    else:
        outputs = (c.hidden,)
    if leaf[-1] != "kernel":
        rows = {"token_embedding": c.vocab_size, "head": c.vocab_size, "position_embedding": c.max_seq}
        return (rows[module], c.hidden) if module in rows else outputs
    inputs = {"attn_proj": (c.heads, c.head_dim), "mlp_out": (c.mlp_hidden,)}.get(module, (c.hidden,))
    return inputs + outputs


def _leaf(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _stacked(tree: Any) -> Any:
    return np.stack(tree) if isinstance(tree, list) else {key: _stacked(value) for key, value in tree.items()}
