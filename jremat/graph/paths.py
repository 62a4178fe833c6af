"""The path of a value: the modules that make it, read from JAX's name stack, in which Flax writes them."""

import re

from jremat.jax_internals import REMAT_SCOPE
from jremat.policy.names import RERUN_SCOPE

LAYERS = re.compile(r"layers_(\d+)_(\d+)")
TURN = re.compile(r"turn_(\d+)")
_OURS = (REMAT_SCOPE, RERUN_SCOPE)


def steps(scope: str) -> list[str]:
    """The names in a scope that mean something to a reader, outermost first: of a method, without its module.

    >>> steps("transpose(jvp(Net.losses))/Net/blocks.<lambda>/blocks/blocks._attention/bsd,dh->bsh/query")
    ['losses', 'Net', 'blocks', 'attention', 'query']
    """
    return _without_ours([step.rpartition(".")[2].strip("_") for step in _written(scope)])


def path_of(scope: str) -> str:
    """The path in a scope: the modules, and their methods other than ``__call__``, outermost first.

    >>> path_of("jvp(Net.losses)/layers_0/attn/attn._scores/bqd,bkd->bqk")
    'Net/losses/layers_0/attn/_scores'
    """
    return "/".join(_without_ours([name for step in _written(scope) for name in step.split(".")]))


def _written(scope: str) -> list[str]:
    """The scopes that a model's author or Flax wrote; einsums are none."""
    plain = re.sub(r"\b(?:transpose|jvp|vmap|jit|checkpoint)\(|\)", "", scope)
    return [step for step in plain.split("/") if "->" not in step]


def _without_ours(names: list[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        ours = name in _OURS or name.startswith("jremat_") or LAYERS.fullmatch(name) or TURN.fullmatch(name)
        if name and not ours and not name.startswith("<") and found[-1:] != [name]:
            found.append(name)
    return found
