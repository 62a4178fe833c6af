"""``jremat fit package.module:function --hbm 80GiB``: a plan under which a function of one's own fits the memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jremat.command.output import Files
from jremat.policy.files import check_file
from jremat.terminal.command_line import command, fail, parse

PROGRAM = "jremat fit"
Optional = Annotated[str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="(optional)")]


@dataclass(frozen=True)
class Fit:
    """A plan under which a loss fits the memory: its segments, what each keeps, and the compiled peak.

    Nothing is run. The function is named as package.module:function or file.py:function. Describe its arguments by
    --args, e.g. --args "{'w': f32[128,512]}" 'f32[8,128]'; or name a function without arguments that returns (f, args),
    which can hand over modules and parameters. In code, jremat.fit(f, *args, plan=FILE) runs it under the plan.
    """

    function: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="FUNCTION")]]
    """package.module:function or file.py:function."""
    hbm: Optional = None
    """Device memory, e.g. 80GiB. Without: the target's own."""
    target: str = "local"
    """A device that it is compiled for and that needn't be here, e.g. h100."""
    args: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ARG …", help_behavior_hint="(optional)")] = ()
    """Its arguments: dtype[shape] for an array, `key` for a random key, Python's spelling for pytrees and the rest."""
    argnums: tuple[int, ...] = (0,)
    """The arguments that are differentiated, as in jax.grad."""
    objective: Literal["seconds", "flops"] | None = None
    """What the recompute is counted in. Without: seconds where the target's chip is known."""
    margin: float = 0.05
    """Share of the memory to leave free."""
    compiles: int = 2
    """Compiles to confirm the peak with; 0: it is predicted."""
    out: Files = None
    """Write the plan there."""
    html: Files = None
    """Write one page there: what is kept and recomputed, and what is alive at every moment of the step."""
    picture: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(optional)")] = None
    """Draw the frontier there: what other memories would cost."""


@command(PROGRAM)
def main(argv: Sequence[str] | None) -> int:
    """Run the command line ``argv``; returns the exit code."""
    flags = parse(Fit, PROGRAM, argv)
    check_file("out", flags.out)
    check_file("html", flags.html)

    from jremat.terminal.start_jax import start_jax  # what follows imports JAX

    start_jax()
    from jremat.command.explain import as_written
    from jremat.command.target import called, function_at, what
    from jremat.fitting.planner import fit

    f, args, kwargs = called(function_at(flags.function), flags.function, flags.args)
    try:
        as_written(f, args, kwargs)
    except (TypeError, IndexError, KeyError, AttributeError, NotImplementedError) as error:
        return fail(PROGRAM, f"function: tracing {flags.function} raised {what(error)}")
    fitted = fit(
        f,
        *args,
        hbm_bytes=flags.hbm,
        target=flags.target,
        argnums=flags.argnums,
        objective=flags.objective,
        margin=flags.margin,
        compiles=flags.compiles,
        **kwargs,
    )
    if flags.out:
        fitted.plan.save(flags.out)
    if flags.html:
        _page(flags, fitted, args, kwargs)
    if flags.picture:
        _picture(flags, fitted)
    print(fitted.plan)
    for name, path in (("plan", flags.out), ("page", flags.html), ("picture", flags.picture)):
        if path:
            print(f"{name:9}  {path}")
    return 0


def _page(flags: Fit, fitted, args, kwargs) -> None:
    """The page of a fitted function."""
    from jremat.command.output import ExplainedFunction, policy_view
    from jremat.command.step import gradient_step
    from jremat.policy.files import write_whole
    from jremat.report.page import page

    assert flags.html is not None, "asked for"
    step, step_args = gradient_step(fitted, args, kwargs)
    title = f"{flags.function}, fitted"
    write_whole(
        flags.html,
        page(title, policy_view(ExplainedFunction(title, fitted, args, kwargs, None, None, step, step_args))),
    )


def _picture(flags: Fit, fitted) -> None:
    """The frontier of a fitted function."""
    from jremat.report.plots import frontier

    assert flags.picture is not None, "asked for"
    plan = fitted.plan
    unit = 1e12 if plan.objective == "flops" else 1.0
    peak = plan.predicted_peak_bytes if plan.peak_bytes is None else plan.peak_bytes
    frontier(
        [("the plan", peak, plan.seconds / unit)],
        [(point.expected_peak_bytes, point.seconds / unit) for point in plan.frontier],
        folder=flags.picture,
        name="frontier",
        title=flags.function,
        cost="recomputed matmuls, TFLOP" if plan.objective == "flops" else "modelled recompute, s",
        hbm_bytes=plan.hbm_bytes,
    )
