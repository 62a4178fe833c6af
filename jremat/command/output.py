"""What becomes of an explanation: tables, findings, JSON, a page; for the installed command and the script."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jremat.policy.files import check_file, write_whole

if TYPE_CHECKING:
    from jremat.report.page import PolicyView

Files = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(optional)")]
Json = Annotated[
    Path | None,
    tyro.conf.arg(metavar="FILE", help="Write every figure there, as JSON.", help_behavior_hint="(optional)"),
]


@dataclass(frozen=True)
class Output:
    """What is shown and written."""

    all: bool = False
    """A row for small values too."""
    lint: bool = False
    """Look for mistakes that users make with remat, each with its place, cost and cure."""
    json: Json = None
    html: Files = None
    """Write one page there: the tables and what is alive at every moment of the step. It needs nothing else."""

    def check(self) -> None:
        """Refuse files that can't be written, before any work.

        Raises:
            ValueError: a folder, or one that isn't there.
        """
        check_file("json", self.json)
        check_file("html", self.html)


@dataclass(frozen=True)
class ExplainedFunction:
    """One function under one policy, ready to be explained.

    Args:
        title: of the function and its shapes.
        forward: the function as it runs, its policy in it, and its arguments.
        args, kwargs: of it.
        rules: the policy, for the reasons.
        num_layers: of the stack that a plan holds for, or None.
        step: what the memory's timeline is of, e.g. a whole training step, and its arguments.
        step_args: of it.
        donated: the places among ``step_args`` whose memory the results take; a step without any updates nothing.
        written: the function as its author wrote it, and its arguments, where the policy is put on it from outside:
            what the lint reads, with the policy.
    """

    title: str
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rules: Any
    num_layers: int | None
    step: Callable[..., Any]
    step_args: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    written: tuple[Callable[..., Any], tuple[Any, ...]] | None = None


def present(subject: ExplainedFunction, against: ExplainedFunction | None, output: Output) -> None:
    """Explain one subject, or two side by side, on stdout and in the files asked for."""
    from jremat.report import explained
    from jremat.report.page import page
    from jremat.report.timeline import peak_line
    from jremat.terminal.tables import console, human, show

    view, other = policy_view(subject), None if against is None else policy_view(against)
    found = view.found
    findings = lint(subject) if output.lint else ()
    # All files first: whoever reads the tables may stop in the middle.
    if output.json:
        figures = {"title": subject.title} | _figures(view)
        figures |= {} if other is None else {"against": _figures(other)}
        figures |= {"findings": [asdict(finding) for finding in findings]} if output.lint else {}
        write_whole(output.json, json.dumps(figures, indent=1, default=str) + "\n")
    if output.html:
        write_whole(output.html, page(subject.title, view, other, findings))
    screen = console()
    screen.print(explained.of_values(found, f"{subject.title}, {view.name}", every=output.all))
    show(screen, *explained.totals(found), indent=13)
    show(screen, f"peak         {human(view.timeline.peak_bytes)} predicted: {peak_line(view.timeline)}", indent=13)
    if any(row.layers for row in found):
        show(screen, "")
        screen.print(explained.of_segments(found, f"{view.name}, segment by segment"))
    if other is not None:
        show(screen, "")
        screen.print(explained.of_changes(found, other.found, f"what changes from {view.name} to {other.name}"))
    if output.lint:
        lines = [line for finding in findings for line in str(finding).splitlines()] or ["lint: nothing found"]
        show(screen, *lines, indent=4)
    if output.html:
        show(screen, f"page         {output.html}", indent=13)


def policy_view(subject: ExplainedFunction) -> "PolicyView":
    """A subject's values and the timeline of its step."""
    from jremat.graph.arguments import take_apart
    from jremat.graph.peak import predicted_memory
    from jremat.report.explain import explain_call
    from jremat.report.kept_reasons import PolicyRules
    from jremat.report.page import PolicyView
    from jremat.report.timeline import timeline

    call = take_apart(subject.forward, subject.args, subject.kwargs)
    found = explain_call(call, PolicyRules(subject.rules, subject.num_layers))
    peak = predicted_memory(subject.step, *subject.step_args, donate=subject.donated)
    return PolicyView(found, timeline(peak, found, updates=bool(subject.donated)))


def _figures(view: "PolicyView") -> dict[str, Any]:
    return view.found.to_dict() | {"timeline": view.timeline.to_dict()}


def lint(subject: ExplainedFunction) -> Sequence[Any]:
    """The findings of ``jremat.lint``."""
    import jremat

    if subject.written is None:
        return jremat.lint(subject.forward, *subject.args, **subject.kwargs)
    f, args = subject.written
    return jremat.lint(f, *args, policy=subject.rules, num_layers=subject.num_layers, **subject.kwargs)
