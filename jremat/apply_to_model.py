"""Policies put on a Flax model from outside, by module path: nothing of its library changes, nor its parameters."""

import dataclasses
import difflib
import fnmatch
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import flax.linen as nn
import jax
from flax import nnx

import policies
from jremat.graph.nnx_modules import submodules
from jremat.policy import LayerPlan, Policy
from jremat.policy.layers import NeedsShapes
from jremat.policy.places import numbered_alike
from jremat.transform.linen import remat_over_module
from jremat.transform.remat import remat
from jremat.transform.subclass import in_place_of

Model = TypeVar("Model", bound=nn.Module | nnx.Module)
Rules = tuple[tuple[str | None, Policy | LayerPlan], ...]
"""Patterns with what holds for the modules that they match; None: the model's repeated layers."""

_FLAG = "jremat_apply"
_STRICT: Mapping[str, Any] = {"strict": True, "static_argnames": (), "static_argnums": (), "prevent_cse": True}


def apply(model: Model, policy: Any) -> Model:
    """A Flax model under remat, from outside: each module whose path matches keeps just what its policy keeps.

    Matched modules keep and recompute as classes under ``jremat.remat``; all others stay as they are. Parameters have
    the names and values that they have without.

    Args:
        model: a Linen module, not bound, or an NNX module.
        policy: a policy, or a plan over layers, or a spec of either, for the model's repeated layers; or a dict from
            module paths to them. In a path ``*`` stands for any text; of the modules inside one another that a path
            matches, the outermost is meant. A plan goes to the modules that its path matches in the order of their
            numbers.

    Returns:
        A model like ``model``, which is left as it is; for ``init`` and every method, under every transformation.

    Raises:
        ValueError: ``policy`` is none of these, or has groups or schedules, which join layers; a path that matches no
            module, at once in NNX, at the call in Linen, whose modules are made there; as ``jremat.remat``.

    >>> import jax.numpy as jnp
    >>> class Net(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         for k in range(2):
    ...             x = nn.Sequential([nn.Dense(4), jnp.sin, nn.Dense(4), jnp.sin], name=f"layers_{k}")(x)
    ...         return x
    >>> net, x = apply(Net(), {"layers_*": "full"}), jnp.ones((2, 4))
    >>> variables = net.init(jax.random.key(0), x)
    >>> from jremat import residuals
    >>> residuals(Net().apply, variables, x).total_bytes, residuals(net.apply, variables, x).total_bytes
    (224, 32)

    Source: the selective recomputation of Chen et al. 2016, arXiv 1604.06174.
    """
    rules = tuple((path, _policy(own)) for path, own in policy.items()) if isinstance(policy, Mapping) else ()
    rules = rules or ((None, _policy(policy)),)
    if isinstance(model, nn.Module):
        if model.scope is not None:
            raise ValueError(
                f"model: expected a Linen module that isn't bound, got {type(model).__name__} inside apply"
            )
        own = {field.name: getattr(model, field.name) for field in dataclasses.fields(model) if field.init}
        cached: Any = _linen_class
        return cached(type(model), rules)(**own)
    if isinstance(model, nnx.Module):
        return _nnx(model, rules)
    raise ValueError(f"model: expected a Linen or an NNX module, got {model!r}")


def _policy(given: Any) -> Policy | LayerPlan:
    found = policies.get(given) if isinstance(given, str) else given
    found = found.plan if hasattr(found, "plan") and not isinstance(found, Policy | LayerPlan) else found
    if isinstance(found, NeedsShapes):
        found()  # says which call takes it
    if not isinstance(found, Policy | LayerPlan):
        raise ValueError(f"policy: expected a policy or a plan over layers, or a spec such as 'full', got {given!r}")
    joined = isinstance(found, LayerPlan) and any(s.group > 1 or s.slots is not None for s in found.segments)
    if joined:
        raise ValueError(
            f"policy: {found.spec!r} joins layers in groups or a schedule, which modules one by one can't; use "
            "jremat.stack(block, plan, num_layers=L)"
        )
    return found


# -- which policy for which module -----------------------------------------------------------------------------


def _placed(rules: Rules, paths: Sequence[str], model: str, *, some: bool = False) -> dict[str, Policy]:
    """The policy of each module that a rule matches; the rule that spells more of a path holds.

    Args:
        rules: of ``apply``.
        paths: of the modules that there are.
        model: its name.
        some: whether these may be some of the model's modules, those that one method calls.

    Raises:
        ValueError: a rule matches no module.
    """
    found: dict[str, Policy] = {}
    for pattern, policy in sorted(rules, key=lambda rule: len((rule[0] or "").replace("*", ""))):
        matched = _repeated(paths, policy, model) if pattern is None else _matched(pattern, paths)
        if not matched and some:
            continue
        if not matched:
            raise ValueError(_nothing(pattern or "", paths, model))
        each = policy.policies(len(matched)) if isinstance(policy, LayerPlan) else (policy,) * len(matched)
        found |= dict(zip(matched, each))
    return found


def _matched(pattern: str, paths: Sequence[str]) -> list[str]:
    """The outermost paths that match, by their numbers."""
    every = {path for path in paths if path and fnmatch.fnmatchcase(path, pattern.strip("/"))}
    return sorted((path for path in every if not _above(path) & every), key=_by_number)


def _above(path: str) -> set[str]:
    steps = path.split("/")
    return {"/".join(steps[:k]) for k in range(1, len(steps))}


def _by_number(path: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", path)]


def _repeated(paths: Sequence[str], policy: Policy | LayerPlan, model: str) -> list[str]:
    """The layers of a model: its outermost modules that differ by a number alone."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        alike = numbered_alike(path)
        if alike != path and not {numbered_alike(above) for above in _above(path)} & groups.keys():
            groups.setdefault(alike, []).append(path)
    rows = {alike: own for alike, own in groups.items() if len(own) > 1}
    if not rows or (isinstance(policy, LayerPlan) and len(rows) > 1):
        raise ValueError(
            f"policy: expected paths of modules, {{'layers_*': {policy.spec!r}}}, since {model} has "
            f"{'several rows of' if rows else 'no'} layers with numbers; its modules: {_few(rows or paths)}"
        )
    return sorted((path for own in rows.values() for path in own), key=_by_number)


def _nothing(pattern: str, paths: Sequence[str], model: str) -> str:
    names = list(dict.fromkeys(numbered_alike(path) for path in paths if path))
    near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"policy: {pattern!r} matches no module of {model}{hint}; its modules: {_few(names)}"


def _few(paths: Mapping[str, Any] | Sequence[str], most: int = 8) -> str:
    names = [path for path in dict.fromkeys(map(numbered_alike, paths)) if path]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "none"


# -- NNX: the classes of a copy's modules ----------------------------------------------------------------------


def _nnx(model: Any, rules: Rules) -> Any:
    copy = nnx.merge(*nnx.split(model))
    modules = {path: module for path, module in submodules(copy) if callable(module)}
    for path, policy in _placed(rules, tuple(modules), type(model).__name__).items():
        module = modules[path]
        object.__setattr__(module, "__class__", remat(type(module), policy))
    return copy


# -- Linen: the calls, intercepted -----------------------------------------------------------------------------


@functools.lru_cache(maxsize=512)  # the same class again, as jax.jit, copies and pickles need it
def _linen_class(block: Any, rules: Rules) -> Any:
    """A subclass whose methods run with the calls of matched modules rematted."""
    own = {name: _installing(block, name, rules) for name in _methods(block)}
    made = type(block)(block.__name__, (block,), {**own, "__module__": block.__module__})
    return in_place_of(made, block, functools.partial(_linen_class, block, rules))


def _methods(block: Any) -> Iterator[str]:
    """The methods that a user of the model calls."""
    for name, _ in inspect.getmembers(block, inspect.isfunction):
        if name == "__call__" or not (name.startswith("_") or name == "setup" or hasattr(nn.Module, name)):
            yield name


def _installing(block: Any, name: str, rules: Rules) -> Callable[..., Any]:
    plain = getattr(block, name)

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.scope is None or _FLAG in self.scope.flags:
            return plain(self, *args, **kwargs)
        called = _called(block, self, name, args, kwargs)
        placed = _placed(rules, called, block.__name__, some=name != "__call__")
        with _flagged(self.scope, rules), nn.intercept_methods(_rematting(len(self.path), placed)):
            return plain(self, *args, **kwargs)

    # What Flax has written on the model's own method says that it isn't to be wrapped again; only that one is compact.
    vars(method).pop("compact", None)
    return method


@contextmanager
def _flagged(scope: Any, rules: Rules) -> Iterator[None]:
    """Inside, Flax's own caches (``nn.jit``) tell this model's calls from those of the model as it was."""
    before = scope.flags
    scope.flags = before.copy({_FLAG: rules})
    try:
        yield
    finally:
        scope.flags = before


def _rematting(depth: int, placed: Mapping[str, Policy]) -> Callable[..., Any]:
    """An interceptor that remats the calls of modules; ``depth`` is that of the model's own path."""
    running: set[str] = set()

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        path = "/".join(module.path[depth:]) if module.scope is not None else ""
        if context.method_name != "__call__" or path not in placed or path in running:
            return call(*args, **kwargs)
        running.add(path)
        try:
            inner = functools.wraps(type(module).__call__)(lambda own, *a, **k: type(own).__call__(own, *a, **k))
            return remat_over_module(inner, placed[path], **_STRICT)(module, *args, **kwargs)
        finally:
            running.discard(path)

    return intercept


def _called(block: Any, model: Any, name: str, args: Any, kwargs: Any) -> tuple[str, ...]:
    """The paths of all modules that a method of a model calls: it is traced by itself, nothing is run."""
    found: dict[str, None] = {}

    def note(call: Callable[..., Any], given: Any, named: Any, context: Any) -> Any:
        if context.method_name == "__call__" and context.module.scope is not None:
            found.setdefault("/".join(context.module.path))
        return call(*given, **named)

    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init and f.name != "parent"}
    plain = block(**fields, parent=None)
    with nn.intercept_methods(note):
        variables = model.variables
        rngs = {rng: jax.random.key(0) for rng in ("params", *model.scope.rngs)}
        if model.is_initializing() or not variables:
            jax.eval_shape(lambda: plain.init(rngs, *args, method=getattr(block, name), **kwargs))
        else:
            run = lambda: plain.apply(variables, *args, rngs=rngs, mutable=True, method=getattr(block, name), **kwargs)
            jax.eval_shape(run)
    return tuple(found)
