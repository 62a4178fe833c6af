"""A policy held against a graph: which of its values are kept, and an error where a selector matches nothing."""

import difflib
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from jremat.graph.graph import Graph, Op, Value
from jremat.graph.packing import unpackable
from jremat.graph.trace import MARK
from jremat.graph.two_passes import OF_FORMAT
from jremat.jax_internals import CUSTOM_JVP, CUSTOM_VJP, NAME, SHARD_MAP
from jremat.policy.decision import OFFLOAD, RECOMPUTE, SAVE, Decision
from jremat.policy.places import matches, nothing_there
from jremat.policy.planned_for import PlannedFor
from jremat.policy.policy import Policy


@dataclass(frozen=True)
class Decisions:
    """What a policy says of one graph.

    Args:
        marks: value id -> the name to put on it, for every value that is kept.
        saved, offloaded: all names that are kept, on device and on the host; marks, and the user's own tags inside
            kernels, which can't be marked from outside.
        in_rules: those of them that stand in derivative rules.
        packed: value id -> how it is packed, for those of ``marks`` that are kept compressed.
    """

    marks: dict[str, str]
    saved: frozenset[str]
    offloaded: frozenset[str]
    in_rules: frozenset[str] = frozenset()
    packed: Mapping[str, Decision] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """One value that can be kept.

    Args:
        op, value: of the graph.
        mark: the name under which it is kept: one of our own, or the user's tag inside a kernel.
        inside: whether it is inside a kernel, where only tags can be kept.
        in_rule: whether it is inside a kernel with a derivative rule, where ``jax_remat3`` reads no tags.
        place: id of the value that the mark is put on: what a tag names, where the same graph makes it, so that a
            derivative that reads it reads what is kept.
    """

    op: Op
    value: Value
    mark: str
    inside: bool
    in_rule: bool
    place: str


def candidates(graph: Graph) -> Iterator[Candidate]:
    """Every value of ``graph`` that can be kept: all outside kernels, the tagged ones inside.

    A kernel is an operation with a derivative of its own (``custom_vjp``) or one that JAX can't look into: its matmuls
    are nobody's matmuls, only its tags speak. Marks bear the graph's fingerprint, so that a remat inside a remat
    doesn't see the outer one's.
    """
    return _candidates(graph, f"{MARK}{graph.fingerprint[:8]}.", inside=False, in_rule=False)


def _candidates(graph: Graph, head: str, inside: bool, in_rule: bool) -> Iterator[Candidate]:
    makers = {output: op for op in graph.ops for output in op.outputs}
    for op in graph.ops:
        if not (inside and op.primitive != "name"):
            for output in op.outputs:
                value, within = graph.values[output], op.inside(output)
                tagged_within = within is not None and within.primitive == "name"  # the tag in there is the value
                if value.dtype != "None" and not tagged_within and not (inside and value.name is None):
                    mark = value.name if inside and value.name else f"{head}{output}"
                    yield Candidate(op, value, mark, inside, in_rule, _named(output, makers))
        for inner in op.inner:
            has_rule = op.primitive in (CUSTOM_VJP, CUSTOM_JVP)
            yield from _candidates(inner, head, inside or op.opaque, in_rule or has_rule)


def _named(value: str, makers: dict[str, Op]) -> str:
    """The value that a row of tags names, where an operation of the same graph makes it; else the value itself."""
    while makers[value].primitive == "name" and makers[value].inputs and makers[value].inputs[0] in makers:
        value = makers[value].inputs[0]
    return value


def _plain_reads(graph: Graph) -> Iterator[str]:
    """Ids of the values that are read by more than tags."""
    yield from graph.outputs
    for op in graph.ops:
        if op.primitive != "name":
            yield from op.inputs
        for inner in op.inner:
            yield from _plain_reads(inner)


def decide(graph: Graph, policy: Policy, needed: frozenset[str] | None = None) -> Decisions:
    """The values of ``graph`` that ``policy`` keeps.

    Args:
        graph: traced with the policy's own families, ``jremat.trace(f, ..., families=...)``.
        policy: not a plan.
        needed: the marks that the backward pass reads where all may be kept; what a policy keeps *by default* is taken
            from these alone, so that leaving a value out doesn't keep another in its place.
    """
    ruled, plain_reads = dict(policy.tags), frozenset(_plain_reads(graph))
    marks: dict[str, str] = {}
    by_decision: dict[Decision, set[str]] = {decision: set() for decision in Decision}
    packed: dict[str, Decision] = {}
    in_rules: set[str] = set()
    for candidate in candidates(graph):
        value, op = candidate.value, candidate.op
        tagged = value.name if op.primitive == "name" else None
        if tagged is None and value.name in ruled and (ruled[value.name] is RECOMPUTE or value.id not in plain_reads):
            continue  # the tag that reads this value carries the decision
        decision = policy.decide(
            names=[tagged] if tagged else [],
            families=op.families,
            value=value.id,
            path=value.path,
            source=value.source,
        )
        if decision.compresses and (candidate.inside or _unpackable(candidate, decision)):
            decision = policy.default  # a rule by place or family; a name is refused by ``check``
        if decision is RECOMPUTE or (needed is not None and candidate.mark not in needed):
            continue
        if candidate.inside:
            by_decision[decision].add(candidate.mark)
            in_rules |= {candidate.mark} if candidate.in_rule else set()
        elif candidate.place not in marks:
            by_decision[decision].add(candidate.mark)
            marks[candidate.place] = candidate.mark
            packed |= {candidate.place: decision} if decision.compresses else {}
    if not policy.values:  # a plan names its values itself
        marks |= _beside(graph, marks, ruled)
    # What an operation makes beside a packed value bears the mark alone.
    beside = {mark for value, mark in marks.items() if value not in packed and mark not in by_decision[OFFLOAD]}
    compressed = {f"{marks[value]}{OF_FORMAT}{decision.value}" for value, decision in packed.items()}
    saved, offloaded = by_decision[SAVE] | beside | compressed, by_decision[OFFLOAD] - by_decision[SAVE]
    return Decisions(marks, frozenset(saved), frozenset(offloaded), frozenset(in_rules), packed)


def _unpackable(candidate: Candidate, decision: Decision) -> str | None:
    """Why a value can't be packed, in words; None where it can."""
    value = candidate.value
    return unpackable(value.shape, value.dtype, {value.name or "", *candidate.op.families, value.family}, decision)


def _beside(graph: Graph, marks: dict[str, str], ruled: dict[str, Decision]) -> dict[str, str]:
    """Marks of the other results of operations with a result that is kept: one that is read would be run for it again.

    What isn't read is not kept, whatever its mark.
    """
    found: dict[str, str] = {}
    for op in graph.ops:
        mark = next((marks[output] for output in op.outputs if output in marks), None)
        if mark is not None and not op.inner:
            free = [o for o in op.outputs if o not in marks and ruled.get(graph.values[o].name or "") is not RECOMPUTE]
            found |= dict.fromkeys(free, mark)
        for inner in op.inner:
            found |= _beside(inner, marks, ruled)
    return found


def check(graph: Graph, policy: Policy, *, strict: bool) -> None:
    """Raise, or warn if not ``strict``, where a selector of ``policy`` matches nothing in ``graph``.

    Every name that isn't optional must be borne by a value. Families are many in one policy; one of them, or a name,
    must match something.
    """
    problem = _mismatch(graph, policy)
    if problem and strict:
        raise ValueError(problem)
    if problem:
        warnings.warn(problem, stacklevel=4)


def shapes_given(graph: Graph) -> tuple[str, ...]:
    """The floating arrays that a graph is given, arguments and constants, as ``float32[2, 3]``, sorted."""
    given = (graph.values[i] for i in (*graph.inputs, *graph.constants))
    floating = (v for v in given if v.dtype.startswith(("float", "bfloat", "complex")))
    return tuple(sorted(f"{v.dtype}{list(v.shape)}" for v in floating))


def _mismatch(graph: Graph, policy: Policy) -> str | None:
    if policy.planned_for and (problem := policy.planned_for.shapes_problem(shapes_given(graph))):
        return f"policy: {problem}"
    if policy.fingerprint is not None and policy.fingerprint.partition("-")[0] != graph.fingerprint:
        return f"policy: {_plan(policy)} {graph.differs_from(policy.fingerprint)}: plan anew"
    every = tuple(candidates(graph))
    lost = sorted({value for value, _ in policy.values} - {c.value.id for c in every})
    if lost:
        return f"policy: {_plan(policy)} keeps the value {lost[0]!r}, which this function hasn't"
    names = sorted({c.value.name for c in every if c.op.primitive == "name" and c.value.name})
    listed = ", ".join(names) or "none"
    missing = [n for n, _ in policy.tags if n not in names and n not in policy.optional]
    if missing:
        near = [f"{m!r} (did you mean {c[0]!r}?)" for m in missing if (c := difflib.get_close_matches(m, names, 1))]
        named = ", ".join(near or map(repr, missing))
        return f"policy: {policy.spec!r} names {named}, which no value bears; names in this function: {listed}"
    by_place = {place: [c for c in every if matches(place, c.value.path, c.value.source)] for place, _ in policy.places}
    for place, selected in by_place.items():
        if not selected and place not in policy.optional:
            return f"policy: {policy.spec!r} names {_nowhere(graph, place, every)}"
    if problem := _compression_problem(policy, every):
        return problem
    families = {family for candidate in every for family in candidate.op.families}
    by_family = any(f.name in families for f, _ in policy.families)
    by_name = any(n in names for n, _ in policy.tags) or any(by_place.values())
    if (policy.families or policy.names) and not (by_family or by_name):
        return (
            f"policy: {policy.spec!r} matches nothing in this function; it has names: {listed}; "
            f"op families: {', '.join(sorted(families)) or 'none'}"
        )
    hidden = sorted(_hidden(graph, {f.name for f, d in policy.families if d is not policy.default}))
    if hidden:
        where = ", ".join(hidden)
        return f"policy: {policy.spec!r} can't reach what {where}; put jremat.checkpoint on the function inside"
    return None


def _compression_problem(policy: Policy, every: Collection[Candidate]) -> str | None:
    """What to say of a name under which a value that can't be packed is to be compressed."""
    for name, decision in policy.tags:
        tagged = [c for c in every if c.op.primitive == NAME and c.value.name == name] if decision.compresses else []
        outside = [c for c in tagged if not c.inside]
        if tagged and not outside:
            return (
                f"policy: {policy.spec!r} compresses {name!r}, which is inside a kernel, where values can only be kept"
            )
        for candidate in outside:
            if why := _unpackable(candidate, decision):
                return f"policy: {policy.spec!r} compresses {name!r}, which {why}"
    return None


def _nowhere(graph: Graph, place: str, every: Collection[Candidate]) -> str:
    """What to say of a place where no value can be kept."""
    hidden = next((value for _, value in graph.walk() if matches(place, value.path, value.source)), None)
    if hidden is not None:
        return f"{place!r}, which is inside a kernel ({hidden.source or hidden.path}), where only tags can be kept"
    return nothing_there(place, [(c.value.path, c.value.source) for c in every])


def _plan(policy: Policy) -> str:
    """A planned policy in a message: the file that it was read from, its label, or else how much it says."""
    if policy.planned_for and policy.planned_for.plan != PlannedFor().plan:
        return repr(policy.planned_for.plan)
    if policy.label:
        return repr(policy.label)
    return f"a policy with {len(policy.values)} planned value{'s' * (len(policy.values) != 1)}"


def _hidden(graph: Graph, families: Collection[str]) -> Iterator[str]:
    """Operations of ``families`` where no policy reaches and no kernel means to hide them."""
    for op in graph.ops:
        if op.primitive in (SHARD_MAP, CUSTOM_JVP):
            for inner_op, _ in (pair for inner in op.inner for pair in inner.walk()):
                for family in (set(inner_op.families) & set(families)) - set(op.families):
                    yield f"{op.primitive} at {op.source or 'a line unknown'} hides ({family})"
        elif not op.opaque:
            for inner in op.inner:
                yield from _hidden(inner, families)
