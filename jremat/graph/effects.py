"""Effects that recomputation would repeat, which remat refuses: Refs read or written, callbacks that must run once."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jremat.graph.trace import Program, user_line
from jremat.jax_internals import harmful_effects, inner_jaxprs, is_ref, opened, ref_of, without_local_refs


def rerunnable(program: Program, what: str = "f") -> Program:
    """A program that remat can run again: Refs that it makes for itself become values.

    Debug prints are left to JAX's remat, which runs them in the forward and in the recompute; ``pure_callback`` has no
    effect.

    Args:
        program: traced.
        what: the argument to name.

    Raises:
        ValueError: it reads or writes a Ref from outside, or calls what must be called once (``io_callback``); with the
            user's line.
    """
    refuse_refs(program.jaxpr, program.paths, what)
    if harmful_effects(program.jaxpr):
        eqn, line = next(_equations(program.jaxpr))
        raise ValueError(
            f"{what}: expected no effect that must happen once, got {eqn.primitive.name} at {line}, which remat would "
            "run again in the backward pass; call it outside of the function, or use jax.pure_callback or "
            "jax.debug.callback"
        )
    try:
        return replace(program, jaxpr=without_local_refs(program.jaxpr))
    except NotImplementedError as error:
        raise ValueError(
            f"{what}: expected no Ref inside of an operation that JAX can't read it from; hand its value on instead: "
            f"{error}"
        ) from error


def refuse_refs(jaxpr: Any, paths: Sequence[str] = (), what: str = "f") -> None:
    """Raise where a program is given a Ref, or reads or writes one that it closes over.

    Raises:
        ValueError: with the Ref and the user's line.
    """
    for effect in harmful_effects(jaxpr):
        ref = ref_of(jaxpr, effect)
        if ref is not None:
            place = jaxpr.invars.index(ref) if ref in jaxpr.invars else len(paths)
            which = paths[place] if place < len(paths) else "that it closes over"
            line = next((f" at {line}" for eqn, line in _equations(jaxpr) if line), "")
            raise ValueError(
                f"{what}: expected no Ref from outside, but it reads or writes the {ref.aval} {which}{line}, an effect "
                "that a rerun in the backward pass would repeat; read the Ref outside of the function, pass its value, "
                "return the new value and write it outside"
            )
    if given := [path for path, var in zip(paths, jaxpr.invars) if is_ref(var.aval)]:
        raise ValueError(f"{what}: expected no Ref from outside, got one at {given[0]}; pass its value")


def _equations(jaxpr: Any, call: Any = None) -> Iterator[tuple[Any, str]]:
    """The innermost equations that have a harmful effect, with their lines."""
    for eqn in opened(jaxpr).eqns:
        if harmful_effects(eqn):
            inner = [found for body, _ in inner_jaxprs(eqn) for found in _equations(body, eqn)]
            yield from inner or [(eqn, user_line(eqn, call))]
