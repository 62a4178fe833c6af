"""The zoo: every named policy, read from ``zoo.toml``, and the way from a spec to a policy."""

import os
import sys
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from jremat.policy import RECOMPUTE, Policy, PolicyLike
from policies.entry import Entries, Entry
from policies.grammar import Zoo, no_effect, parse
from policies.megatron import modules
from policies.torch_sac import sac

_FAMILIES = MappingProxyType({"megatron": modules, "sac": sac})


def _entry(spec: str, row: Mapping[str, Any], defaults: Mapping[str, Mapping[str, str]]) -> Entry:
    """A row of ``zoo.toml``."""
    system, _, name = spec.partition(":")
    own = {**defaults.get(system, {}), **row}
    policy = parse(own.get("policy", spec), Zoo({}, _FAMILIES))
    is_form = spec != spec.lower()  # capitals where a value goes
    return Entry(
        spec,
        policy if is_form else replace(policy, label=spec),
        own["keeps"],
        own["recomputes"],
        own["elsewhere"].replace("{}", name),
        own["source"],
        tuple(own.get("aliases", ())),
        tuple(own["per_layer"]) if "per_layer" in own else None,
    )


def _entries() -> Iterator[Entry]:
    data = tomllib.loads(Path(__file__).with_name("zoo.toml").read_text(encoding="utf-8"))
    return (_entry(spec, row, data["defaults"]) for spec, row in data["zoo"].items())


ENTRIES = tuple(_entries())


def _named() -> Mapping[str, Policy]:
    """Policies by spec and alias; forms have no name of their own, and ``sqrt`` and ``auto`` are the grammar's."""
    pairs = [
        (name, entry.policy)
        for entry in ENTRIES
        if isinstance(entry.policy, Policy) and not entry.is_form
        for name in (entry.spec, *entry.aliases)
    ]
    named = dict(pairs)
    assert len(named) == len(pairs), "two entries of one name"
    return MappingProxyType(named)


ZOO = Zoo(_named(), _FAMILIES)


def get(spec: str) -> PolicyLike:
    """The policy, plan or request that a spec stands for.

    A ``Policy`` goes wherever JAX and Flax take one (``jax.checkpoint(f, policy=p)``, ``nn.remat(Block, policy=p)``)
    and into ``jremat.checkpoint`` and ``jremat.remat``; a ``LayerPlan`` into a stack of layers; a ``Request`` is
    resolved with a block and its shapes first. ``names()`` and ``python -m policies`` list the specs.

    Args:
        spec: as ``full``, ``save:attn_out,mlp_up``, ``every_k:4``, ``maxtext:minimal``, ``auto:60GiB``.

    Returns:
        What it stands for. ``get(p.spec) == p``, and ``p.spec`` is the spec as given.

    Raises:
        ValueError: unknown or ambiguous (near names are listed), out of range, or of no effect.

    Warns:
        UserWarning: a rule that changes nothing, as in ``none;save:a``, which keeps everything; under ``jax_remat3``,
            where JAX doesn't ask a plain policy about every operation, so that this one would keep less than it says.

    >>> get("dots_saveable") == get("checkpoint_dots")
    True
    >>> [str(p) for p in get("alternate:2").policies(3)]
    ['full', 'none', 'full']
    >>> get("dots_savable")
    Traceback (most recent call last):
    ...
    ValueError: policy: no spec 'dots_savable'; did you mean 'dots_saveable'?
    """
    policy = parse(spec, ZOO)
    if isinstance(policy, Policy) and policy.idle:
        warnings.warn(f"policy: {spec!r}: {no_effect(policy)}", UserWarning, stacklevel=2)
    if isinstance(policy, Policy) and not policy.strict_only and _unheard(policy):
        version = sys.modules["jax"].__version__
        warnings.warn(
            f"policy: {policy.spec!r} as a plain JAX policy is not honoured under jax_remat3 (jax {version} asks it "
            "about some operations or none); use jremat.checkpoint(f, policy) or jremat.remat(Block, policy)",
            UserWarning,
            stacklevel=2,
        )
    return cast(PolicyLike, policy)


def load(path: str | os.PathLike[str]) -> PolicyLike:
    """The plan that ``plan.save(path)`` wrote: ``get("plan:PATH")``.

    Args:
        path: of the file.

    Returns:
        The policy or plan over layers, which holds for the block and the shapes that it was planned for.

    Raises:
        ValueError: the file can't be read, or holds no plan.

    >>> load("missing.json")
    Traceback (most recent call last):
    ...
    ValueError: policy: 'plan:missing.json': cannot read missing.json: No such file or directory
    """
    return get(f"plan:{os.fspath(path)}")


def _unheard(policy: Policy) -> bool:
    """Whether ``jax_remat3`` is on and JAX wouldn't ask the plain policy about all that it keeps."""
    if "jax" not in sys.modules and not os.environ.get("JAX_REMAT3"):
        return False  # JAX isn't loaded, nor is the flag set; a spec is read without waiting for it
    from jremat.jax_internals import remat3_calls_policies, remat3_is_on

    if not remat3_is_on():
        return False
    names_only = policy.default is RECOMPUTE and not policy.families
    asked = names_only and remat3_calls_policies()
    keeps_nothing = names_only and not policy.names
    return not (asked or keeps_nothing)


def names() -> tuple[str, ...]:
    """Every spec that can be asked for as it stands: named policies with their aliases, and an example of each form.

    >>> {"none", "full", "core_attn", "maxtext:minimal", "sqrt"} <= set(names())
    True
    """
    examples = (entry.policy.spec for entry in ENTRIES)
    return tuple(dict.fromkeys((*ZOO.named, *examples)))


def table() -> Entries:
    """The zoo, one row a policy or form: spec, kept, recomputed, equivalents elsewhere, source.

    >>> row = next(row for row in table() if row.spec == "dots_with_no_batch_dims_saveable")
    >>> row.kept, row.recomputed
    ('what the weight matmuls make', 'norms, activations, attention (materialised or fused)')
    """
    return Entries(ENTRIES)
