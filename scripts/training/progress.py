"""What is seen of a run: a live bar in a terminal, plain lines elsewhere, and the table at its end."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jremat.terminal.tables import human


class Reporter:
    """Shows steps as they are done.

    Args:
        console: where to; a bar if it is a terminal.
        first, steps: steps done before this run, and in all.
        peak_bytes: of the compiled step.
        log_every: steps between plain lines.
    """

    def __init__(self, console: Console, first: int, steps: int, peak_bytes: int, log_every: int) -> None:
        self.console, self.steps, self.log_every = console, steps, log_every
        self.first, self.peak = first, human(peak_bytes)
        self.bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[line]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=steps, completed=first, line="")

    def __enter__(self) -> "Reporter":
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def step(self, row: Mapping[str, Any]) -> None:
        """A step is done; ``row`` is its line of metrics.jsonl."""
        line = (
            f"loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} tokens/s  MFU {row['mfu']:.1%}  peak {self.peak}"
        )
        self.bar.update(self.task, completed=row["step"], line=line)
        due = row["step"] % self.log_every == 0 or row["step"] in (self.first + 1, self.steps)
        if due and not self.console.is_terminal:
            self.say(f"step {row['step']:>{len(str(self.steps))}}/{self.steps}  {line}")

    def evaluated(self, step: int, loss: float) -> None:
        """Held-out text was evaluated after ``step`` steps."""
        self.say(f"step {step:>{len(str(self.steps))}}/{self.steps}  held-out loss {loss:.4f}")

    def say(self, text: str) -> None:
        """A line above the bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def aligned(rows: Mapping[str, str]) -> list[str]:
    """Names and values in two columns, a line each.

    >>> aligned({"steps": "50", "final loss": "2.5"})
    ['steps       50', 'final loss  2.5']
    """
    width = max(map(len, rows)) + 2
    return [f"{name:<{width}}{value}" for name, value in rows.items()]
