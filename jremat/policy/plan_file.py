"""A planned policy as a file: JSON that ``plan:FILE`` reads.

    {"format": "jremat-plan-1",
     "policy": {"spec": "full", "values": {"VALUE": "save"}, "fingerprint": "…"},
     "segments": [{"pattern": [POLICY, …], "repeats": 8, "group": 1, "slots": null}, …],
     "shapes": ["float32[4, 1024, 768]", …], "num_layers": 12, "versions": {"jax": "0.10.2", …},
     …}

Either ``policy`` (one block) or ``segments`` (a stack; ``repeats`` null: all layers left, ``group`` and ``slots`` may
be left out). A POLICY is an object as above or a plain spec: ``spec`` is what holds for every value that ``values``
doesn't name (default ``full``), and ``values`` needs the ``fingerprint`` of the graph that it speaks of.

``shapes``, ``num_layers`` and ``versions`` say what the plan holds for. The planner writes all three, and a plan is
refused on others. A file without them, written by hand and of names alone, is portable. ``FOR_READERS`` names the keys
that are for people alone, such as predicted figures; any other is refused as mistyped.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jremat.policy.decision import Decision
from jremat.policy.files import read_json, write_whole
from jremat.policy.layers import LayerPlan, Segment
from jremat.policy.messages import near, shown
from jremat.policy.planned_for import PlannedFor
from jremat.policy.policy import Policy

FORMAT = "jremat-plan-1"

FOR_READERS = (
    *("target", "hbm_bytes", "peak_bytes", "predicted_peak_bytes"),
    *("recompute_flops", "modelled_recompute_seconds", "comment"),
)
"""Keys that nothing is read from: the planner's figures, and a word by hand."""

Parse = Callable[[str], Policy]


def read(path: str, parse: Parse) -> Policy | LayerPlan:
    """The policy or plan in a file, labelled ``plan:PATH``.

    Args:
        path: of the JSON file.
        parse: reads the specs inside it, each of one block.

    Raises:
        ValueError: no such file, not JSON, or not a plan; the message says which key. A plan made with other versions
            than those that are installed.
    """
    if not path:
        raise ValueError("policy: 'plan:' expected the path of a file, as in plan:FILE")
    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(f"policy: 'plan:{path}': {error}") from None
    try:
        content = _object(content, "the file")
        planned_for = _planned_for(content, f"plan:{path}")
        plan = _content(content, lambda spec: replace(parse(spec), planned_for=planned_for), f"plan:{path}")
    except ValueError as error:
        raise ValueError(f"policy: 'plan:{path}' is not a plan: {error}") from None
    if planned_for and (problem := planned_for.versions_problem()):
        raise ValueError(f"policy: {problem}")
    return plan


def write(
    path: str | Path, plan: Policy | LayerPlan, planned_for: PlannedFor | None = None, **for_readers: Any
) -> None:
    """Write what ``plan:PATH`` reads back to an equal policy or plan.

    Args:
        path: of the file, overwritten.
        plan: to write.
        planned_for: what it holds for; None: what its own policies say, and where they say nothing, anything.
        for_readers: JSON values to stand beside it, by keys of ``FOR_READERS``: predicted figures.

    Raises:
        ValueError: a key that nothing reads back.
        OSError: the file can't be written.

    >>> import policies, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/plan.json", policies.get("save:up"))
    ...     policies.get(f"plan:{folder}/plan.json") == policies.get("save:up")
    True
    """
    _known(for_readers, FOR_READERS, "what stands beside a plan")
    body = {"policy": _plain(plan)} if isinstance(plan, Policy) else {"segments": [_segment(s) for s in plan.segments]}
    policies = [plan] if isinstance(plan, Policy) else [policy for s in plan.segments for policy in s.pattern]
    planned_for = planned_for or next((policy.planned_for for policy in policies if policy.planned_for), None)
    holds = {} if planned_for is None else _plain_planned_for(planned_for)
    text = json.dumps({"format": FORMAT, **body, **holds, **for_readers}, indent=1)
    write_whole(Path(path), text + "\n")


def _plain(policy: Policy) -> Any:
    base = replace(policy, values=(), fingerprint=None).canonical_spec
    if not policy.values:
        return base
    values = {value: decision.value for value, decision in policy.values}
    return {"spec": base, "values": values, "fingerprint": policy.fingerprint}


def _segment(segment: Segment) -> dict[str, Any]:
    shape = {"repeats": segment.repeats, "group": segment.group, "slots": segment.slots}
    return {"pattern": [_plain(policy) for policy in segment.pattern], **shape}


def _plain_planned_for(planned_for: PlannedFor) -> dict[str, Any]:
    return {
        "shapes": list(planned_for.shapes),
        "num_layers": planned_for.num_layers,
        "versions": dict(planned_for.versions),
    }


def _planned_for(content: Mapping[str, Any], plan: str) -> PlannedFor | None:
    shapes, versions = content.get("shapes", []), _object(content.get("versions", {}), "versions")
    if not isinstance(shapes, list) or not all(isinstance(shape, str) for shape in shapes):
        raise ValueError(f"shapes: expected a list of strings such as 'float32[2, 3]', got {shown(shapes)}")
    odd = [shape for shape in shapes if not _SHAPE.fullmatch(shape)]
    if odd:
        raise ValueError(f"shapes: expected a dtype and dimensions such as 'float32[2, 3]', got {shown(odd[0])}")
    wrong = [version for version in versions.values() if not isinstance(version, str)]
    if wrong:
        raise ValueError(f"versions: expected strings, got {shown(wrong[0])}")
    num_layers = _whole(content.get("num_layers"), "num_layers")
    if num_layers is not None and num_layers < 1:
        raise ValueError(f"num_layers: expected at least 1, got {num_layers}")
    planned_for = PlannedFor(tuple(shapes), num_layers, tuple(versions.items()), plan)
    return None if planned_for == PlannedFor() else planned_for


_SHAPE = re.compile(r"[a-z]\w*\[(\d+(, \d+)*)?\]")  # a scalar is float32[]


def _content(content: Mapping[str, Any], parse: Parse, label: str) -> Policy | LayerPlan:
    if content.get("format") != FORMAT:
        raise ValueError(f"format: expected {FORMAT!r}, got {shown(content.get('format'))}")
    _known(content, (*_READ, *FOR_READERS), "a plan")
    if ("policy" in content) == ("segments" in content):
        raise ValueError("expected one of the keys 'policy' and 'segments'")
    if "policy" in content:
        return _policy(content["policy"], parse, label).labelled(label)
    if not isinstance(content["segments"], list):
        raise ValueError(f"segments: expected a list, got {shown(content['segments'])}")
    segments = (_read_segment(_object(segment, "a segment"), parse, label) for segment in content["segments"])
    return LayerPlan(tuple(segments), label=label)


def _read_segment(segment: Mapping[str, Any], parse: Parse, plan: str) -> Segment:
    _known(segment, ("pattern", "repeats", "group", "slots"), "a segment")
    pattern = segment.get("pattern")
    if not isinstance(pattern, list):
        raise ValueError(f"pattern: expected a list of policies, got {shown(pattern)}")
    return Segment(
        tuple(_policy(policy, parse, plan) for policy in pattern),
        repeats=_whole(segment.get("repeats"), "repeats"),
        group=1 if segment.get("group") is None else _whole(segment["group"], "group") or 0,
        slots=_whole(segment.get("slots"), "slots"),
    )


def _policy(entry: Any, parse: Parse, plan: str) -> Policy:
    if isinstance(entry, str):
        entry = {"spec": entry}
    entry = _object(entry, "a policy")
    _known(entry, ("spec", "values", "fingerprint"), "a policy")
    spec, values, fingerprint = entry.get("spec", "full"), entry.get("values", {}), entry.get("fingerprint")
    base = parse(spec)
    values = _object(values, "values")
    if not values:
        return base
    if not isinstance(fingerprint, str) or not fingerprint:
        raise ValueError(f"fingerprint: expected the graph's, since there are values, got {shown(fingerprint)}")
    wrong = [decision for decision in values.values() if decision not in _DECISIONS]
    if wrong:
        raise ValueError(f"values: expected one of {', '.join(_DECISIONS)}, got {shown(wrong[0])}")
    return replace(
        base,
        values=tuple((value, Decision(d)) for value, d in values.items()),
        fingerprint=fingerprint,
        planned_for=base.planned_for or PlannedFor(plan=plan),  # so that a refusal names the file
        label=None,
    )


_READ = ("format", "policy", "segments", "shapes", "num_layers", "versions")
_DECISIONS = tuple(decision.value for decision in Decision)


def _known(found: Mapping[str, Any], keys: tuple[str, ...], what: str) -> None:
    unknown = sorted(set(found) - set(keys))
    if unknown:
        name = shown(unknown[0]).strip("'")
        raise ValueError(f"{name}: no key of {what}, which has {', '.join(keys)}{near(unknown[0], keys)}")


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected {what} to be a JSON object, got {type(value).__name__}")
    return value


def _whole(value: Any, key: str) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ValueError(f"{key}: expected a whole number or null, got {shown(value)}")
    return value
