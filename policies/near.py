"""Near names: what a user may have meant by a spec that names nothing."""

import difflib
from collections.abc import Iterable

# JAX's and others' names, in this grammar.
_ELSEWHERE = {
    "save_only_these_names": "save:",
    "save_any_names_but_these": "save:",
    "save_and_offload_only_these_names": "save:a;offload:b",
    "save_anything_except_these_names": "but:",
    "save_from_both_policies": "save:a;ops:matmul",
    "offload_dot_with_no_batch_dims": "offload_dots_with_no_batch_dims",
    "gradient_checkpointing": "full",
    "activation_memory_budget": "budget:",
}


def did_you_mean(what: str, given: str, known: Iterable[str]) -> str:
    """One line that says what was given, and what is known that is near it.

    Near is the same after the colon, or spelled alike, or part of one another; several that fit alike are called
    ambiguous.

    >>> did_you_mean("policy: no spec", "dots_savable", ["dots_saveable", "full"])
    "policy: no spec 'dots_savable'; did you mean 'dots_saveable'?"
    >>> did_you_mean("policy: no spec", "full_remat", ["maxtext:full_remat", "other:full_remat"])
    "policy: no spec 'full_remat', which is ambiguous; did you mean 'maxtext:full_remat' or 'other:full_remat'?"
    >>> did_you_mean("policy: no spec", "zzz", ["full"])
    "policy: no spec 'zzz'; `python -m policies` lists them"
    """
    known = list(dict.fromkeys(known))
    shown = given if len(given) <= 80 else given[:77] + "…"
    if given in _ELSEWHERE:
        return f"{what} {shown!r}; did you mean {_ELSEWHERE[given]!r}?"
    low = given.lower()
    same = [name for name in known if name.lower() == low]
    same = same or [name for name in known if name.partition(":")[2].lower() == low]
    part = [name for name in known if len(low) > 2 and low in name.lower()][:4]
    found = same or part or _spelled_like(low[:200], known) or _spelled_like(low[:200].partition(":")[0] + ":", known)
    if not found:
        return f"{what} {shown!r}; `python -m policies` lists them"
    doubt = ", which is ambiguous" if len(same or part) > 1 else ""
    return f"{what} {shown!r}{doubt}; did you mean {' or '.join(map(repr, found))}?"


def _spelled_like(given: str, known: Iterable[str]) -> list[str]:
    """The best matches: at least 0.6 alike, as difflib's own default, and within 0.05 of the best."""
    alike = [(difflib.SequenceMatcher(None, given, name.lower()).ratio(), name) for name in known]
    best = max((ratio for ratio, _ in alike), default=0.0)
    near = sorted((-ratio, name) for ratio, name in alike if ratio >= max(0.6, best - 0.05))
    return [name for _, name in near[:3]]
