"""The part of a layer that a value belongs to, read from its tag, its name scopes and its source line."""

import re

from jremat.graph.paths import LAYERS, TURN, steps

PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("norms", ("norm", "layernorm", "rmsnorm", "rms", "ln")),
    ("attention", ("attn", "attention", "qkv", "scores", "probs", "rope", "mha", "softmax")),
    ("mlp", ("mlp", "ffn", "feedforward", "ff", "swiglu", "gelu", "silu", "experts", "moe", "router")),
    ("embedding", ("embed", "embedding", "embeddings", "wte", "wpe", "positions")),
    ("loss", ("loss", "losses", "logits", "head", "entropy", "logsumexp", "unembed")),
    ("layer inputs", ("block", "blocks", "layer", "layers", "stack")),
)
"""Parts of a model, and the words that tell them; the first part that has one of a scope's words holds."""

_WHOLE = {
    **dict.fromkeys(("query", "key", "value", "q_proj", "k_proj", "v_proj", "o_proj"), "attention"),
    **dict.fromkeys(("up_proj", "down_proj", "gate_proj", "c_fc", "fc1", "fc2", "feed_forward"), "mlp"),
}
"""Names that tell a part only as a whole: a ``layer_key`` is no key of attention."""

ORDER = ("embedding", "layer inputs", "norms", "attention", "mlp", "loss")
"""In which tables show them; others follow by name."""


def part_of(tag: str | None, scope: str, source: str) -> str:
    """The part of a value.

    Args:
        tag: its name, or None.
        scope: the name scopes around the operation that made it, outermost first.
        source: its line, ``file.py:12 (function)``.

    >>> part_of("mlp_norm", "", ""), part_of(None, "jvp(Net)/Net/self_attention/Dense_0", "linear.py:3 (__call__)")
    ('norms', 'attention')
    >>> part_of(None, "", "net.py:3 (mixer)")
    'mixer'
    """
    function = source.partition("(")[2].rstrip(")")
    scopes = steps(scope)
    for text in (*([tag] if tag else []), *reversed(scopes), function):
        found = _part(text)
        if found and not (found == "layer inputs" and text == function):  # a block as a plain function
            return found
    plain = function if function.strip("_<>") not in ("", "lambda", "call", "module") else ""
    return (class_of(scopes[-1]) if scopes else plain) or "function"


def class_of(module: str) -> str:
    """A Flax module's class, its number and what remat puts before it left out.

    >>> class_of("CheckpointEncoder_2"), class_of("mlp_up")
    ('Encoder', 'mlp_up')
    """
    return re.sub(r"^(?:Checkpoint|Remat)(?=[A-Z])|_\d+$", "", module)


def module_of(scope: str) -> str:
    """The innermost name of a scope, or nothing.

    >>> module_of("rematted_computation/blocks/blocks._mlp/mlp_up"), module_of("jvp()")
    ('mlp_up', '')
    """
    return (steps(scope) or [""])[-1]


def layers_of(scope: str) -> tuple[int, int, int | None] | None:
    """First and last layer of the loop that a scope is in, and the place in its pattern, or None outside of one.

    >>> layers_of("jvp(Net)/layers_4_7/turn_1"), layers_of("jvp(Net)")
    ((4, 7, 1), None)
    """
    found = LAYERS.search(scope)
    if found is None:
        return None
    turn = TURN.search(scope, found.end())
    return int(found[1]), int(found[2]), int(turn[1]) if turn else None


def _part(text: str) -> str | None:
    if text.lower() in _WHOLE:
        return _WHOLE[text.lower()]
    words = set(re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower()))
    return next((part for part, keys in PARTS if words & set(keys)), None)
