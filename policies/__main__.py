"""``python -m policies`` prints the zoo; ``python -m policies SPEC`` one of its rows, or what any other spec says."""

import sys
from collections.abc import Iterator, Sequence

from jremat.policy import LayerPlan, Policy
from jremat.policy.shown import filled
from jremat.terminal.command_line import fail, run
from jremat.terminal.start_jax import start_jax
from jremat.terminal.tables import Table, columns, console, show
from policies.costs import Attention, Family, cost
from policies.entry import Entry, Spec
from policies.registry import get, table

PROGRAM = "policies"
TITLE = "Remat policies, per layer"
LEGEND = (
    "Per layer in bfloat16, dropout off, read off a traced block: b batch, s sequence, h hidden, n query heads, k key "
    "and value width, f MLP width; a spec by itself shows the fused attention of both families.\n"
    "Kept: bytes for the backward pass, the block's input included. Recomputed: matmul FLOPs of the forward pass that "
    "the backward pass repeats; shares, as in overhead:0.03, are of the forward's matmul FLOPs."
)
FAMILIES: tuple[tuple[str, Family, Attention], ...] = (
    ("GPT", "gpt", "dot"),
    ("Llama", "llama", "dot"),
    ("GPT, fused attention", "gpt", "blockwise"),
    ("Llama, fused attention", "llama", "blockwise"),
)


def main(arguments: Sequence[str]) -> int:
    """Print the zoo, or what one spec says; 2 for a spec that says nothing."""
    screen = console()
    if arguments in (["-h"], ["--help"]):
        print(filled(__doc__))
        return 0
    if not arguments:
        for k, entry in enumerate(table()):  # each as soon as its block is traced
            screen.print(zoo([entry], FAMILIES[:2], "" if k else TITLE))
            screen.print()
        show(screen, *LEGEND.splitlines())
        return 0
    try:
        if len(arguments) > 1:
            raise ValueError(f"policy: expected one spec at most, got {len(arguments)}: {' '.join(arguments)}")
        screen.print(spec_table(arguments[0], get(arguments[0])))
    except ValueError as error:
        return fail(PROGRAM, error)
    return 0


def zoo(
    entries: Sequence[Entry], families: Sequence[tuple[str, Family, Attention]] = FAMILIES, title: str = TITLE
) -> Table:
    """The zoo, one row an entry: what it keeps and recomputes, its price, what it is elsewhere, its source."""
    rows = columns(title, ("",))
    for entry in entries:
        rows.add_section()
        rows.add_row(", ".join((entry.spec, *entry.aliases)), bold=True)
        for line in _lines(entry, families):
            rows.add_note(line)
    return rows


def _lines(entry: Entry, families: Sequence[tuple[str, Family, Attention]]) -> Iterator[str]:
    if entry.is_form:
        yield f"e.g. {entry.policy.spec}"
    yield f"keeps {entry.kept} → recomputes {entry.recomputed}"
    yield from _costs(entry, families)
    if isinstance(entry.policy, Policy) and entry.policy.strict_only:
        yield "jremat.checkpoint and jremat.remat only"
    yield f"elsewhere: {entry.elsewhere}"
    yield f"source: {entry.source}"


def _costs(entry: Entry, families: Sequence[tuple[str, Family, Attention]]) -> Iterator[str]:
    if entry.words:
        yield "bytes {} → FLOPs {}".format(*entry.words)
        return
    start_jax()
    for name, family, attention in families:
        kept, host, flops = cost(entry, family, attention)
        on_host = f", of it on the host {host}" * (host not in ("0", "–"))
        yield f"{name}: {kept} bytes{on_host} → {flops} FLOPs"


def spec_table(spec: str, policy: Spec) -> Table:
    """What one spec says: its row where it has one, else its rules or segments."""
    rows = [entry for entry in table() if spec in (entry.spec, *entry.aliases)]
    if rows:
        return zoo(rows)
    lines = columns("", ("spec", policy.spec), loose=(policy.spec,))
    if isinstance(policy, Policy):
        lines.add_row("rules", policy.canonical_spec)
    elif isinstance(policy, LayerPlan):
        for segment in policy.segments:
            pattern = " ".join(policy.spec for policy in segment.pattern)
            repeats = "to the end" if segment.repeats is None else f"{segment.repeats} times"
            group = f", in groups of {segment.group}" if segment.group > 1 else ""
            slots = f", {segment.slots} slots" if segment.slots else ""
            lines.add_row("layers", f"{pattern}, {repeats}{group}{slots}")
    else:
        lines.add_row("request", f"{policy.kind} {'' if policy.amount is None else policy.amount}".strip())
    for name, value in _holds_for(policy):
        lines.add_row(name, value)
    return lines


def _holds_for(policy: Spec) -> Iterator[tuple[str, str]]:
    """What a planned policy was planned for, and is refused on others of."""
    every = [policy] if isinstance(policy, Policy) else []
    every += [p for s in policy.segments for p in s.pattern] if isinstance(policy, LayerPlan) else []
    planned_for = next((p.planned_for for p in every if p.planned_for), None)
    if planned_for is not None:
        yield "planned for", ", ".join(dict.fromkeys(planned_for.shapes)) or "any shapes"
        yield "", "any number of layers" if planned_for.num_layers is None else f"{planned_for.num_layers} layers"
        yield "", ", ".join(f"{package} {version}" for package, version in planned_for.versions) or "any versions"


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]), PROGRAM)
