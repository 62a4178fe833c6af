"""``jremat explain package.module:function``: what a function of one's own keeps, moves and recomputes, and why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from jremat.command.output import ExplainedFunction, Output, present
from jremat.terminal.command_line import command, fail, parse

PROGRAM = "jremat explain"
Optional = Annotated[str | None, tyro.conf.arg(metavar="SPEC", help_behavior_hint="(optional)")]


@dataclass(frozen=True)
class Explain:
    """What a function keeps, moves to the host and recomputes for its gradient, one row a value, and why.

    Nothing is run. The function is named as package.module:function or file.py:function. Describe its arguments by
    --args, e.g. --args 'f32[8,128]' "{'w': f32[128,512]}" key train=True; or name a function without arguments that
    returns (f, args), which can hand over modules and parameters. With --layers N the function is one block,
    f(layer_parameters, carry, ...), of a stack of N.
    """

    function: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="FUNCTION")]]
    """package.module:function or file.py:function."""
    policy: Optional = None
    """Under which it is explained; `python -m policies` lists the specs. Without one: as it is."""
    against: Optional = None
    """A second policy: what changes from the first to it."""
    args: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ARG …", help_behavior_hint="(optional)")] = ()
    """Its arguments: dtype[shape] for an array, `key` for a random key, Python's spelling for pytrees and the rest."""
    layers: int = 0
    """Layers of a stack of which the function is one; 0: the function alone."""
    output: Output = field(default_factory=Output)


@command(PROGRAM)
def main(argv: Sequence[str] | None) -> int:
    """Run the command line ``argv``; returns the exit code."""
    flags = parse(Explain, PROGRAM, argv)
    flags.output.check()
    if flags.layers < 0:
        raise ValueError(f"layers: expected 0 or more, got {flags.layers}")

    from jremat.terminal.start_jax import start_jax  # what follows imports JAX

    start_jax()
    from jremat.command.target import called, function_at, what

    f, args, kwargs = called(function_at(flags.function), flags.function, flags.args)
    try:
        as_written(f, args, kwargs)
    except (TypeError, IndexError, KeyError, AttributeError, NotImplementedError) as error:
        return fail(PROGRAM, f"function: tracing {flags.function} raised {what(error)}")
    subject = subject_under(flags, flags.policy, f, args, kwargs)
    against = subject_under(flags, flags.against, f, args, kwargs) if flags.against else None
    present(subject, against, flags.output)
    return 0


def as_written(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Trace the function's gradient by itself: what this raises is the function's own, whatever comes later is not."""
    from jremat.command.step import gradient_step
    from jremat.graph.arguments import take_apart
    from jremat.graph.trace import capture

    step, step_args = gradient_step(f, args, kwargs)
    capture(take_apart(step, step_args, {}))


def subject_under(
    flags: Explain, spec: str | None, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ExplainedFunction:
    """The function under one policy: alone, or as a stack.

    Raises:
        ValueError: the policy is unknown, is a plan without layers, or speaks of nothing in the function.
    """
    import jremat
    import policies
    from jremat.command.step import gradient_step
    from jremat.planner.request import Request
    from jremat.policy import LayerPlan

    policy = policies.get(spec) if spec else None
    if isinstance(policy, Request):
        policy = policy.resolve(f, *args, num_layers=flags.layers or 1, target="local")
    if isinstance(policy, LayerPlan) and not flags.layers:
        raise ValueError(
            f"policy: {spec!r} is a plan over layers; say of how many by --layers N, "
            "the function is then one block f(layer_parameters, carry, ...)"
        )
    forward: Callable[..., Any] = f
    written = f, args
    if flags.layers:
        if len(args) < 2 or kwargs:
            raise ValueError("layers: expected a block f(layer_parameters, carry, ...), all by position")
        forward = jremat.stack(f, policy or jremat.NONE, num_layers=flags.layers)
        args = (stacked(args[0], flags.layers), *args[1:])
    elif policy is not None:
        assert not isinstance(policy, LayerPlan)
        forward = jremat.checkpoint(f, policy)
    name = flags.function + (f", {flags.layers} layers" if flags.layers else "")
    step, step_args = gradient_step(forward, args, kwargs)
    return ExplainedFunction(name, forward, args, kwargs, policy, flags.layers or None, step, step_args, (), written)


def stacked(tree: Any, num_layers: int) -> Any:
    """One layer's parameters as those of a stack, by shape."""
    import jax

    from jremat.graph.arguments import map_arrays

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_layers, *jax.numpy.shape(leaf)), jax.numpy.result_type(leaf))

    return map_arrays(one, tree)
