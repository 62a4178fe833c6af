"""``python -m policies`` prints the zoo; ``python -m policies SPEC`` one of its rows, or what any other spec says."""

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jremat.command.line import fail, run
from jremat.policy import LayerPlan, Policy
from policies.entry import Entry, Spec
from policies.registry import get, table

PROGRAM = "policies"
WIDTH = 120
SPEC_WIDTH = 41  # of the longest spec, so that each can be copied
LEGEND = (
    "Per layer. b batch, s sequence, h hidden, n query heads, k key and value width, f MLP width, e bytes of a value; "
    "M is 1 where attention materialises its scores, F where it is fused, else 0.\n"
    "Kept: bytes for the backward pass, the block's input included, dropout off. Recomputed: matmul FLOPs of "
    "the forward pass that the backward pass repeats; shares, as in overhead:0.03, are of the forward's matmul FLOPs."
)


def main(arguments: Sequence[str]) -> int:
    """Print the zoo, or what one spec says; 2 for a spec that says nothing."""
    console = Console(width=WIDTH, highlight=False)
    if arguments in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if not arguments:
        console.print(zoo(table()))
        console.print(LEGEND, style="dim")
        return 0
    try:
        if len(arguments) > 1:
            raise ValueError(f"policy: expected one spec at most, got {len(arguments)}: {' '.join(arguments)}")
        console.print(said(arguments[0], get(arguments[0])))
    except ValueError as error:
        return fail(PROGRAM, error)
    return 0


def zoo(entries: Sequence[Entry]) -> Table:
    """The zoo as a table, one row an entry."""
    rows = Table(show_lines=True, pad_edge=False, title="Remat policies", expand=True)
    rows.add_column("Spec · elsewhere · source", width=SPEC_WIDTH, overflow="fold")
    for heading in ("Keeps → recomputes", "Bytes kept → matmul FLOPs recomputed, per layer"):
        rows.add_column(heading, ratio=1, overflow="fold")
    for entry in entries:
        rows.add_row(_spec(entry), _fate(entry), _costs(entry))
    return rows


def said(spec: str, policy: Spec) -> Table:
    """What one spec says: its row where it has one, else its rules or segments."""
    rows = [entry for entry in table() if spec in (entry.spec, *entry.aliases)]
    if rows:
        return zoo(rows)
    lines = Table(show_header=False, pad_edge=False, box=None)
    lines.add_row("spec", Text(policy.spec))
    if isinstance(policy, Policy):
        lines.add_row("rules", Text(policy.canonical_spec))
    elif isinstance(policy, LayerPlan):
        for segment in policy.segments:
            pattern = " ".join(policy.spec for policy in segment.pattern)
            repeats = "to the end" if segment.repeats is None else f"{segment.repeats} times"
            group = f", in groups of {segment.group}" if segment.group > 1 else ""
            slots = f", {segment.slots} slots" if segment.slots else ""
            lines.add_row("layers", Text(f"{pattern}, {repeats}{group}{slots}"))
    else:
        lines.add_row("request", Text(f"{policy.kind} {'' if policy.amount is None else policy.amount}".strip()))
    for name, value in _holds_for(policy):
        lines.add_row(name, Text(value))
    return lines


def _holds_for(policy: Spec) -> Iterator[tuple[str, str]]:
    """What a planned policy was planned for, and is refused on others of."""
    every = [policy] if isinstance(policy, Policy) else []
    every += [p for s in policy.segments for p in s.pattern] if isinstance(policy, LayerPlan) else []
    made_for = next((p.made_for for p in every if p.made_for), None)
    if made_for is not None:
        yield "planned for", ", ".join(dict.fromkeys(made_for.shapes)) or "any shapes"
        yield "", "any number of layers" if made_for.num_layers is None else f"{made_for.num_layers} layers"
        yield "", ", ".join(f"{package} {version}" for package, version in made_for.versions) or "any versions"


def _spec(entry: Entry) -> Text:
    text = Text(entry.spec, style="bold")
    for also in entry.aliases:
        text.append(f"\n{also}", style="not bold")
    if entry.is_form:
        text.append(f"\ne.g. {entry.policy.spec}", style="not bold")
    if isinstance(entry.policy, Policy) and entry.policy.strict_only:
        text.append("\njremat.checkpoint and jremat.remat only", style="not bold")
    return text.append(f"\n{entry.elsewhere}\n{entry.source}", style="not bold dim")


def _fate(entry: Entry) -> Text:
    return Text.assemble(entry.kept, "\n→ ", entry.recomputed)


def _costs(entry: Entry) -> Text:
    if not entry.gpt.exact:
        return Text.assemble(entry.gpt.kept_bytes, "\n→ ", entry.gpt.recomputed_flops)
    lines = []
    for family, cost in (("GPT", entry.gpt), ("Llama", entry.llama)):
        kept, host, flops = cost.pretty()
        lines.append(f"{family} {kept}" + f"\n  of it on the host {host}" * (host != "0") + f"\n→ {flops}")
    return Text("\n".join(lines))


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]), PROGRAM)
