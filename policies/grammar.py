"""The grammar of policy specs: text to ``Policy``, ``LayerPlan`` or ``Request``.

    spec    = named | rules | plan | request | family ":" item {"," item}     family: megatron, sac
    rules   = rule {";" rule}                     what keeps, offloads or leaves out; see ``Policy.canonical_spec``
    rule    = ("save" | "offload" | "but" | "recompute") ":" selector ["?"] {"," selector ["?"]}
            | "at" ":" file ":" line {"," file ":" line}          the same as "save:" of these lines
            | ("ops" | "offload_ops" | "but_ops") ":" op family {"+" op family}
            | ("compress" | "fp8" | "bits") ":" selector ["?"] {"," selector ["?"]} ["@" format]
            | ("compress_ops" | "fp8_ops" | "bits_ops") ":" op family {"+" op family} ["@" format]
            | "none" | "offload_all" | "full"     first only: what holds for every other value
    format  = "int8" | "int4" of "compress", "e4m3" | "e5m2" of "fp8"; the first where none is given
    selector = tag | path with "*", as */attn/* | file ":" line, as modeling.py:41
    plan    = "every_k:" K ["," policy] | "block:" N ["," policy] | "alternate:" K | "torchtitan:" K | "revolve:" SLOTS
            | "mix:" count "*" policy {"," count "*" policy} | "plan:" FILE
    request = "sqrt" | "auto" [":" size] | "budget:" share | "overhead:" share

Commas and plus signs are the same inside a rule; inside a list that has commas of its own, use plus signs. Without a
first word the rest is recomputed, or, where every rule says what to leave out, kept. A spec prints back as it was
typed.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from jremat.planner.request import Request
from jremat.policy import OFFLOAD, RECOMPUTE, SAVE, Decision, LayerPlan, Policy, plan_file
from jremat.policy.decision import E5M2, FP8, INT4, INT8
from jremat.policy.ops import SELECTABLE, Family
from jremat.policy.places import checked_selector
from jremat.policy.policy import SPEC_KEYS
from jremat.policy.shown import parse_bytes
from policies import stacks
from policies.entry import Spec
from policies.near import did_you_mean


@dataclass(frozen=True)
class Zoo:
    """What a spec may name beside the forms of the grammar.

    Args:
        named: policies by spec, aliases included.
        families: ``megatron:``-like prefixes, each with the function from its items to a policy.
    """

    named: Mapping[str, Policy]
    families: Mapping[str, Callable[[tuple[str, ...]], Policy]]


def parse(spec: str, zoo: Zoo) -> Spec:
    """Read one spec.

    Args:
        spec: see the grammar above.
        zoo: the names that it may use.

    Returns:
        What it stands for; its ``.spec`` is ``spec`` without outer blanks.

    Raises:
        ValueError: a spec that names nothing, or that would do nothing; the message says what was expected.
    """
    if not isinstance(spec, str):
        raise ValueError(
            f"policy: expected a spec such as 'full', got {spec!r}"
            + " (None is full remat to JAX; here write 'full', or 'none' to keep everything)" * (spec is None)
        )
    spec = spec.strip()
    if not spec:
        raise ValueError("policy: expected a spec such as 'full', got an empty one")
    return replace(_parsed(spec, zoo), label=spec)


def _parsed(spec: str, zoo: Zoo) -> Spec:
    if spec in zoo.named:
        return zoo.named[spec]
    head, colon, body = spec.partition(":")
    if colon and head in _PLANS:  # first, since a policy inside a plan may have rules of its own
        return _PLANS[head](body, zoo)
    if ";" in spec or head in _RULES or spec in _DEFAULTS:
        return _rules(spec)
    if head in _REQUESTS:
        return _REQUESTS[head](spec, colon, body)
    if colon and head in zoo.families:
        return zoo.families[head](_items(body, f"{head}:"))
    raise ValueError(did_you_mean("policy: no spec", spec, _known(zoo)))


def _known(zoo: Zoo) -> tuple[str, ...]:
    forms = (*_RULES, *_PLANS, *(kind for kind in _REQUESTS if kind not in ("sqrt", "auto")), *zoo.families)
    return (*zoo.named, "sqrt", "auto", *(f"{form}:" for form in forms))


# -- rules -----------------------------------------------------------------------------------------------------

_RULES: Mapping[str, tuple[Decision, bool]] = {
    **{names: (decision, False) for decision, (names, _, codec) in SPEC_KEYS.items() if not codec},
    "recompute": (RECOMPUTE, False),
    "at": (SAVE, False),
    **{ops: (decision, True) for decision, (_, ops, codec) in SPEC_KEYS.items() if not codec},
}
_FORMATS = {INT8: {"int8": INT8, "int4": INT4}, FP8: {"e4m3": FP8, "e5m2": E5M2}}
_DEFAULTS = {"none": SAVE, "offload_all": OFFLOAD, "full": RECOMPUTE}
_FAMILIES: Mapping[str, Family] = {family.name: family for family in SELECTABLE}


def _rules(spec: str) -> Policy:
    first, *_ = rules = spec.split(";")
    default = _DEFAULTS.get(first)
    rules = rules if default is None else rules[1:]
    names: dict[str, Decision] = {}
    families: dict[Family, Decision] = {}
    optional = set()
    for rule in rules:
        key, colon, body = rule.partition(":")
        if not colon or key not in _RULES:
            raise ValueError(did_you_mean(f"policy: {spec!r}: no rule", rule, [f"{key}:" for key in _RULES]))
        decision, by_family = _RULES[key]
        if decision in _FORMATS and "@" in body:
            body, _, form = body.rpartition("@")
            if form not in _FORMATS[decision]:
                formats = ", ".join(_FORMATS[decision])
                raise ValueError(f"policy: {spec!r}: {key}: expected a format, {formats}, after '@', got {form!r}")
            decision = _FORMATS[decision][form]
        for item in _items(body, rule):
            if by_family:
                _put(families, _op_family(item), decision, item, spec)
            else:
                name = checked_selector(item.removesuffix("?"))
                if key == "at" and ":" not in name:
                    raise ValueError(f"policy: {spec!r}: expected at:file.py:line, got {item!r}")
                optional |= {name} if item.endswith("?") else set()
                _put(names, name, decision, name, spec)
    worded = default is not None
    if default is None:
        default = SAVE if {*names.values(), *families.values()} == {RECOMPUTE} else RECOMPUTE
    policy = Policy(tuple(names.items()), tuple(families.items()), default=default, optional=frozenset(optional))
    if policy.idle and not worded:
        raise ValueError(
            f"policy: {spec!r}: {no_effect(policy)}; a spec may begin with 'none;' (the rest kept), 'offload_all;' or "
            "'full;' (the rest recomputed)"
        )
    return policy


def no_effect(policy: Policy) -> str:
    """What to say of a policy's idle rules."""
    rest = {SAVE: "kept", OFFLOAD: "kept in host memory", RECOMPUTE: "recomputed"}[policy.default]
    idle = ", ".join(sorted(policy.idle))
    return f"naming {idle} would change nothing, since all that isn't named is {rest}"


def _put(rules: dict, selector: str | Family, decision: Decision, name: str, spec: str) -> None:
    if selector in rules:
        raise ValueError(f"policy: {spec!r}: expected each selector once, got {name!r} twice")
    rules[selector] = decision


def _op_family(name: str) -> Family:
    if name not in _FAMILIES:
        raise ValueError(did_you_mean("policy: no op family", name, _FAMILIES))
    return _FAMILIES[name]


def _items(body: str, where: str) -> tuple[str, ...]:
    items = tuple(re.split("[,+]", body))
    if not all(items):
        raise ValueError(f"policy: {where!r}: expected names joined with ',' or '+', got {body!r}")
    return items


# -- plans -----------------------------------------------------------------------------------------------------


def _every_k(body: str, zoo: Zoo) -> LayerPlan:
    k, policy = _number_and_policy("every_k:K[,POLICY]", body, zoo)
    return stacks.every_k(k) if policy is None else stacks.every_k(k, policy)


def _block(body: str, zoo: Zoo) -> LayerPlan:
    n, policy = _number_and_policy("block:N[,POLICY]", body, zoo)
    return stacks.block(n) if policy is None else stacks.block(n, policy)


def _number_and_policy(form: str, body: str, zoo: Zoo) -> tuple[int, Policy | None]:
    number, *policy = re.split("[,+]", body, maxsplit=1)
    return _number(form, number), _one_block(form, policy[0], zoo) if policy else None


def _one_block(form: str, spec: str, zoo: Zoo, plans: tuple[str, ...] = ("plan",)) -> Policy:
    policy = _nested(form, "a policy of one block", spec, zoo, plans)
    if not isinstance(policy, Policy):
        raise ValueError(f"policy: {form}: expected a policy of one block, got {spec!r}")
    return policy


def _nested(form: str, expected: str, spec: str, zoo: Zoo, plans: tuple[str, ...]) -> Spec:
    """A spec inside another, of which only some plans may be one, so that nothing nests without end."""
    head, colon, _ = spec.partition(":") if isinstance(spec, str) else ("", "", "")
    if colon and head in _PLANS and head not in plans:
        raise ValueError(f"policy: {form}: expected {expected}, got {spec!r}")
    return parse(spec, zoo)


def _mix(body: str, zoo: Zoo) -> LayerPlan:
    return stacks.mix(*(_part(part, zoo) for part in body.split(",")))


def _part(part: str, zoo: Zoo) -> tuple[int | None, Policy | LayerPlan]:
    form = "mix:N*POLICY,M*POLICY…"
    match = re.fullmatch(r"(\*|rest|[^*]*)\*(.+)", part, re.DOTALL)
    if match is None:
        raise ValueError(f"policy: {form}: expected N*POLICY, got {part!r}; inside a list names join with '+'")
    count, spec = match.groups()
    plans = tuple(_PLANS.keys() - {"mix", "block"})
    policy = _nested(form, "a policy, or one of the plans every_k, alternate, torchtitan, revolve", spec, zoo, plans)
    if isinstance(policy, Request):
        raise ValueError(f"policy: {form}: expected a policy or a plan, got {spec!r}, which needs shapes first")
    return None if count in ("*", "rest") else _number(form, count), policy


def _number(form: str, text: str) -> int:
    # The length bounds the work; the builders bound the value.
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ValueError(f"policy: {form}: expected a whole number, got {text!r}")
    return int(text)


_PLANS: Mapping[str, Callable[[str, Zoo], Policy | LayerPlan]] = {
    "every_k": _every_k,
    "alternate": lambda body, _: stacks.alternate(_number("alternate:K", body)),
    "torchtitan": lambda body, _: stacks.torchtitan(_number("torchtitan:K", body)),
    "block": _block,
    "revolve": lambda body, _: stacks.revolve(_number("revolve:SLOTS", body)),
    "mix": _mix,
    "plan": lambda body, zoo: plan_file.read(body, lambda spec: _one_block("plan:FILE", spec, zoo, ())),
}

# -- requests --------------------------------------------------------------------------------------------------


def _auto(spec: str, colon: str, body: str) -> Request:
    return Request("auto", parse_bytes(body) if colon else None, label=spec)


def _sqrt(spec: str, colon: str, body: str) -> Request:
    if colon:
        raise ValueError(f"policy: 'sqrt' takes nothing after it, got {spec!r}; for a group of your own: every_k:K")
    return Request("sqrt", label=spec)


def _share(kind: str, spec: str, body: str) -> Request:
    if not re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,18})?|\.[0-9]{1,18}", body) or float(body) > 1:
        raise ValueError(f"policy: expected {kind}:SHARE with a number from 0 to 1, got {spec!r}")
    return Request(kind, float(body), label=spec)


_REQUESTS: Mapping[str, Callable[[str, str, str], Request]] = {
    "sqrt": _sqrt,
    "auto": _auto,
    "budget": lambda spec, _, body: _share("budget", spec, body),
    "overhead": lambda spec, _, body: _share("overhead", spec, body),
}
