"""A policy: frozen data that says which values of a block are kept, compressed, kept on the host, or recomputed."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jremat.policy.decision import BITS, E5M2, FP8, INT4, INT8, OFFLOAD, RECOMPUTE, SAVE, Decision, stronger
from jremat.policy.ops import NEVER_ROUNDED, Family
from jremat.policy.places import checked_selector, is_place, matches, specificity
from jremat.policy.planned_for import PlannedFor

if TYPE_CHECKING:
    from jax.extend.core import Primitive


@dataclass(frozen=True)
class Policy:
    """What of one block is kept for the backward pass, as data.

    A value's fate is the first that speaks of it: its id in the graph (``values``), its tag, the line or the module
    that makes it (all three in ``names``), the operation that made it (``families``), and else ``default``. Equal
    policies are equal, hash alike and print alike.

    Used two ways: as a plain JAX policy, ``jax.checkpoint(f, policy=p)`` or ``nn.remat(Block, policy=p)``; and
    strictly, ``jremat.checkpoint(f, p)``, where each value gets its decision and a name that matches nothing raises.

    Args:
        names: (selector, decision) pairs; a selector is a tag, a path of modules with ``*``, such as ``*/attn/*``, or
            a line, ``modeling.py:41`` (see ``jremat.policy.places``). Of several places the most specific holds.
        families: (op family, decision) pairs.
        values: (value id in a traced graph, decision) pairs: a planned policy; strict use only.
        default: the fate of every other value; not to compress it, since some never may be.
        optional: those among ``names`` that may match nothing.
        fingerprint: of the graph that ``values`` speaks of.
        label: the spec it is known by, e.g. ``dots_saveable``; not compared.
        planned_for: what a plan holds for; strict use only, which refuses it elsewhere; not compared.

    Raises:
        ValueError: two rules that contradict each other, a family that is never rounded is to be compressed, or a
            default that compresses.

    >>> Policy.save("attn_out", "mlp_up")
    policies.get('save:attn_out,mlp_up')
    >>> Policy.save("a") | Policy.offload("b")
    policies.get('save:a;offload:b')
    >>> Policy.save("b", "a") == Policy.save("a") | Policy.save("b")
    True
    """

    names: tuple[tuple[str, Decision], ...] = ()
    families: tuple[tuple[Family, Decision], ...] = ()
    values: tuple[tuple[str, Decision], ...] = ()
    default: Decision = RECOMPUTE
    optional: frozenset[str] = frozenset()
    fingerprint: str | None = None
    label: str | None = field(default=None, compare=False)
    planned_for: PlannedFor | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "families", _canonical(self.families, key=lambda family: family.name))
        object.__setattr__(self, "names", _canonical(self.names, key=checked_selector))
        object.__setattr__(self, "values", _canonical(self.values, key=lambda value: value))
        object.__setattr__(self, "optional", frozenset(self.optional) & {n for n, _ in self.names})
        _check_overlaps(self.families)
        rounded = [f.name for f, d in self.families if d.compresses and d is not BITS and f in NEVER_ROUNDED]
        if rounded:
            raise ValueError(f"policy: expected families that may be rounded, got {rounded[0]}, which never is")
        if self.default.compresses:
            raise ValueError(f"default: expected save, offload or recompute, got {self.default.value}")

    # -- construction ------------------------------------------------------------------------------------------

    @staticmethod
    def save(*names: str) -> "Policy":
        """Keep the values tagged ``names``; recompute the rest."""
        return Policy(names=tuple((name, SAVE) for name in names))

    @staticmethod
    def offload(*names: str) -> "Policy":
        """Keep the values tagged ``names`` in pinned host memory; recompute the rest."""
        return Policy(names=tuple((name, OFFLOAD) for name in names))

    @staticmethod
    def compress(*names: str, to: Decision = INT8) -> "Policy":
        """Keep the values tagged ``names`` compressed, recompute the rest; for strict use only.

        Raises:
            ValueError: a decision that doesn't compress.

        >>> Policy.compress("mlp_up", to=FP8)
        policies.get('fp8:mlp_up')
        """
        if not to.compresses:
            raise ValueError(f"to: expected a decision that compresses, e.g. Decision.FP8, got {to}")
        return Policy(names=tuple((name, to) for name in names))

    @staticmethod
    def ops(*families: Family) -> "Policy":
        """Keep what operations of ``families`` make; recompute the rest."""
        return Policy(families=tuple((family, SAVE) for family in families))

    @staticmethod
    def but(*names: str) -> "Policy":
        """Recompute the values tagged ``names`` and keep all else that the backward reads; for strict use only."""
        return Policy(names=tuple((name, RECOMPUTE) for name in names), default=SAVE)

    # -- algebra -----------------------------------------------------------------------------------------------

    def __or__(self, other: "Policy") -> "Policy":
        """The rules of both, as ``;`` joins them in a spec.

        A rule is more specific than the default, whichever side it comes from, and a rule by name more specific than
        one by family. The default ``RECOMPUTE`` yields to any other. A name that either side requires stays required,
        also where it is decided as the default decides. The order and the grouping of unions don't matter.

        Raises:
            ValueError: the two sides decide differently about one name, one family, a family and a part of it, or the
                values that no rule speaks of; a planned policy, which holds for its graph as it is.

        >>> Policy.but("a") | Policy.offload("b")
        policies.get('none;offload:b;but:a')
        >>> Policy.offload("a") | Policy.save("a")
        Traceback (most recent call last):
        ...
        ValueError: policy: 'offload:a' | 'save:a': expected one decision for 'a', got offload and save
        """
        if not isinstance(other, Policy):
            return NotImplemented
        if self.values or other.values or self.planned_for or other.planned_for:
            raise ValueError("policy: a planned policy holds for its graph as it is and can't be combined; plan anew")
        defaults = {self.default, other.default} - {RECOMPUTE}
        required = {n for policy in (self, other) for n, _ in policy.names if n not in policy.optional}
        try:
            if len(defaults) > 1:
                raise ValueError("policy: expected one decision for what no rule names, got save and offload")
            return Policy(
                names=self.names + other.names,
                families=self.families + other.families,
                default=defaults.pop() if defaults else RECOMPUTE,
                optional=(self.optional | other.optional) - required,
            )
        except ValueError as error:
            reason = str(error).removeprefix("policy: ")
            raise ValueError(f"policy: {self.spec!r} | {other.spec!r}: {reason}") from None

    def all_but(self, *names: str) -> "Policy":
        """The same policy, with the values tagged ``names`` recomputed.

        >>> Policy.save("a", "b").all_but("b")
        policies.get('save:a')
        >>> from jremat.policy.ops import MATMUL
        >>> Policy.ops(MATMUL).all_but("attn_scores")
        policies.get('ops:matmul;but:attn_scores')
        """
        return replace(self, names=(*self._without(names), *((n, RECOMPUTE) for n in names)), label=None)._effective()

    def to_host(self, *names: str) -> "Policy":
        """The same policy, with what it keeps moved to pinned host memory: the values tagged ``names``, or all.

        >>> Policy.save("a", "b").to_host("b")
        policies.get('save:a;offload:b')
        """
        if names:
            return replace(self, names=(*self._without(names), *((n, OFFLOAD) for n in names)), label=None)._effective()

        def move(decision: Decision) -> Decision:
            return OFFLOAD if decision is SAVE else decision

        return replace(
            self,
            names=tuple((n, move(d)) for n, d in self.names),
            families=tuple((f, move(d)) for f, d in self.families),
            values=tuple((v, move(d)) for v, d in self.values),
            default=move(self.default),
            label=None,
        )

    def rename(self, new_names: Mapping[str, str]) -> "Policy":
        """The same policy in another model's vocabulary.

        Raises:
            ValueError: a name that this policy doesn't have.

        >>> Policy.save("context").rename({"context": "attn_out"})
        policies.get('save:attn_out')
        """
        unknown = sorted(set(new_names) - {name for name, _ in self.names})
        if unknown:
            raise ValueError(f"new_names: expected names of this policy, {self._listed()}, got {', '.join(unknown)}")
        return replace(
            self,
            names=tuple((new_names.get(n, n), d) for n, d in self.names),
            optional=frozenset(new_names.get(n, n) for n in self.optional),
            label=None,
        )

    def with_optional(self, *names: str) -> "Policy":
        """The same policy, in which a function need not bear the tags ``names`` (all of them, if none is given).

        >>> Policy.save("mlp_gate", "mlp_up").with_optional("mlp_gate")
        policies.get('save:mlp_gate?,mlp_up')
        """
        chosen = names or tuple(name for name, _ in self.names)
        return replace(self, optional=self.optional | frozenset(chosen), label=None)

    def labelled(self, label: str) -> "Policy":
        """The same policy under the spec that it is known by."""
        return replace(self, label=label)

    # -- what it says ------------------------------------------------------------------------------------------

    @property
    def spec(self) -> str:
        """The spec that ``policies.get`` reads back to an equal policy."""
        return self.label or self.canonical_spec

    @property
    def canonical_spec(self) -> str:
        """The rules themselves as a spec, whatever the policy is called.

        >>> from jremat.policy.ops import WEIGHT_MATMUL
        >>> Policy.ops(WEIGHT_MATMUL).labelled("dots_with_no_batch_dims_saveable").canonical_spec
        'ops:weight_matmul'
        """
        parts = [_DEFAULT_SPEC[self.default]] if self.default is not RECOMPUTE or self.idle else []
        for decision, (name_key, ops_key, codec) in SPEC_KEYS.items():
            names = [n + "?" * (n in self.optional) for n, d in self.names if d is decision]
            families = [f.name for f, d in self.families if d is decision]
            parts += [f"{name_key}:{','.join(names)}{codec}"] if names else []
            parts += [f"{ops_key}:{'+'.join(families)}{codec}"] if families else []
        if self.values:
            parts.append(f"{len(self.values)} planned values of graph {str(self.fingerprint).partition('-')[0]}")
        if parts[:1] == [_DEFAULT_SPEC[SAVE]] and len(parts) > 1 and parts[1].startswith("but:") and not self.idle:
            parts = parts[1:]  # "but:…" alone says that all else is kept
        return ";".join(parts) or "full"

    def __str__(self) -> str:
        return self.spec

    def __repr__(self) -> str:
        return f"policies.get({self.spec!r})"

    @property
    def idle(self) -> tuple[str, ...]:
        """The names and families whose rules decide as the default does.

        Such a rule still requires that a name exists, unless it is optional. A rule that exempts a value from another
        rule isn't idle: a family from a weaker one that it overlaps, a name from any by family.

        >>> (Policy(default=SAVE) | Policy.save("a")).idle, Policy.save("a").idle
        (('a',), ())
        """
        kept = self._effective()
        rules = (*self.names, *((f.name, d) for f, d in self.families))
        effective = {*kept.names, *((f.name, d) for f, d in kept.families)}
        return tuple(selector for selector, d in rules if (selector, d) not in effective)

    @property
    def keeps_everything(self) -> bool:
        """Whether it changes nothing: all that the backward reads is kept, as without remat."""
        rules = self._effective()
        return self.default is SAVE and not (rules.names or rules.families or self.values)

    @property
    def is_identity(self) -> bool:
        """Whether it changes nothing and requires nothing of a function: neither a name nor a plan's shapes."""
        return self.keeps_everything and self.planned_for is None and {n for n, _ in self.names} <= self.optional

    @functools.cached_property
    def tags(self) -> tuple[tuple[str, Decision], ...]:
        """The rules by tag among ``names``."""
        return tuple((name, d) for name, d in self.names if not is_place(name))

    @functools.cached_property
    def places(self) -> tuple[tuple[str, Decision], ...]:
        """The rules by path or line among ``names``, the most specific first."""
        found = ((name, d) for name, d in self.names if is_place(name))
        return tuple(sorted(found, key=lambda rule: specificity(rule[0]), reverse=True))

    @property
    def offloads(self) -> bool:
        """Whether it keeps anything in host memory."""
        return OFFLOAD in self._decisions

    @property
    def compresses(self) -> bool:
        """Whether it keeps anything in fewer bytes than it has."""
        return any(decision.compresses for decision in self._decisions)

    @functools.cached_property
    def _decisions(self) -> frozenset[Decision]:
        return frozenset((self.default, *(d for _, d in (*self.names, *self.families, *self.values))))

    @property
    def strict_only(self) -> bool:
        """Whether JAX's plain policy protocol can't express it, so that ``jremat.checkpoint`` is needed.

        JAX asks about one operation at a time, by primitive. Where a tagged value is to be left out of what is kept,
        the untagged value before the tag would be kept in its place; neither a planned value nor a place can be asked
        about; and the answers are to keep, to offload or to recompute, none to compress.

        >>> Policy.but("a").strict_only, Policy.save("a").strict_only, Policy.save("*/attn/*").strict_only
        (True, False, True)
        """
        return bool(self.values) or bool(self.places) or self.leaves_out or self.compresses

    @property
    def leaves_out(self) -> bool:
        """Whether a value is left out of what is kept, so that what is kept in its place has to be looked at."""
        rules = self._effective()
        left_out = any(decision is RECOMPUTE for _, decision in rules.tags)
        return left_out or (self.default is not RECOMPUTE and bool(rules.names))

    def decide(
        self,
        *,
        names: Iterable[str] = (),
        families: Iterable[str] = (),
        value: str | None = None,
        path: str = "",
        source: str = "",
    ) -> Decision:
        """The fate of one value.

        Args:
            names: every tag that the value bears.
            families: names of every family that the operation that made it belongs to.
            value: its id in the traced graph.
            path: of the modules that make it.
            source: the line that makes it.

        >>> Policy.save("a").decide(names=["a"]).value, Policy.save("a").decide(names=["b"]).value
        ('save', 'recompute')
        """
        planned = dict(self.values)
        if value is not None and value in planned:
            return planned[value]
        borne, made_by = set(names), set(families)
        by_name = [d for n, d in self.tags if n in borne]
        if by_name:
            return stronger(*by_name)
        for place, decision in self.places if path or source else ():
            if matches(place, path, source):
                return decision
        by_family = [d for f, d in self.families if f.name in made_by]
        return stronger(*by_family) if by_family else self.default

    def __call__(self, prim: "Primitive", *avals: Any, **params: Any) -> Any:
        """JAX's policy protocol: may the outputs of this operation be kept?

        Returns:
            True, False, or JAX's own mark for an offload to ``pinned_host``.

        Raises:
            ValueError: the policy can't be expressed operation by operation.
        """
        if self.strict_only or self.planned_for is not None:
            what = "is a plan, held to the shapes that it was made for"
            if self.places:
                what = f"selects by place ({self.places[0][0]})"
            elif self.compresses:
                what = "compresses values"
            elif self.strict_only:
                what = "decides value by value"
            raise ValueError(
                f"policy: {self.spec!r} {what}, which a plain JAX policy can't; "
                "use jremat.checkpoint(f, policy) or jremat.remat(Block, policy)"
            )
        from jremat.jax_internals import tagged_name  # loads JAX, which whoever calls this has done

        name = tagged_name(prim, params)
        primitive, params = ("name", {"name": name}) if name is not None else (prim.name, params)
        decision = self.decide(
            names=[] if name is None else [name],
            families=[f.name for f, _ in self.families if f.matches(primitive, params)],
        )
        return _offload_mark() if decision is OFFLOAD else decision is SAVE

    def _effective(self) -> "Policy":
        """The same policy without its idle rules."""
        weaker = any(stronger(d, self.default) is not d for _, d in self.families)
        families = tuple((f, d) for f, d in self.families if weaker or d is not self.default)
        ruled = bool(families) or any(d is not self.default for _, d in self.places)
        names = tuple((n, d) for n, d in self.names if ruled or d is not self.default)
        return replace(self, names=names, families=families)

    def _without(self, names: Iterable[str]) -> tuple[tuple[str, Decision], ...]:
        dropped = set(names)
        return tuple((n, d) for n, d in self.names if n not in dropped)

    def _listed(self) -> str:
        return ", ".join(name for name, _ in self.names) or "(it has none)"


def _canonical(pairs: Iterable[tuple[Any, Decision]], key: Any) -> tuple[tuple[Any, Decision], ...]:
    """Sorted, each selector once; where one is named twice with different decisions, an error."""
    seen: dict[Any, Decision] = {}
    for selector, decision in pairs:
        if seen.setdefault(selector, decision) is not decision:
            raise ValueError(
                f"policy: expected one decision for {key(selector)!r}, got {seen[selector].value} and {decision.value}"
            )
    return tuple(sorted(seen.items(), key=lambda pair: key(pair[0])))


def _check_overlaps(families: Iterable[tuple[Family, Decision]]) -> None:
    """Refuse a rule for a part of a family where a stronger rule for the whole leaves nothing of it."""
    pairs = tuple(families)
    for part, weak in pairs:
        for whole, strong in pairs:
            if part != whole and weak is not strong and part.within(whole) and stronger(weak, strong) is strong:
                raise ValueError(
                    f"policy: expected one decision for {part.name!r}, a part of {whole.name!r}, got {weak.value} and "
                    f"{strong.value}"
                )


SPEC_KEYS: Mapping[Decision, tuple[str, str, str]] = {
    SAVE: ("save", "ops", ""),
    OFFLOAD: ("offload", "offload_ops", ""),
    FP8: ("fp8", "fp8_ops", ""),
    E5M2: ("fp8", "fp8_ops", "@e5m2"),
    INT8: ("compress", "compress_ops", ""),
    INT4: ("compress", "compress_ops", "@int4"),
    BITS: ("bits", "bits_ops", ""),
    RECOMPUTE: ("but", "but_ops", ""),
}
"""How a spec writes each decision: its rule by name, its rule by op family, and what stands after the selectors."""
_DEFAULT_SPEC = {SAVE: "none", OFFLOAD: "offload_all", RECOMPUTE: "full"}


@functools.cache
def _offload_mark() -> Any:
    """JAX's mark for "keep in pinned host memory". It has no public constructor; a public policy hands one out."""
    import jax
    from jax.extend.core.primitives import dot_general_p

    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    return policy(dot_general_p, dimension_numbers=(((), ()), ((), ())))


NONE = Policy(default=SAVE, label="none")
FULL = Policy(label="full")
