"""Proof by values that what remat recomputes is what the first run made."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jremat.calibration import REPLAY
from jremat.check.differences import Difference, between_runs, between_traces, of_reruns, relative
from jremat.check.gradient_errors import GradientError, compresses, gradient_error, one_rule_each, table
from jremat.check.lint import layers_of, with_policy
from jremat.check.marked_values import Tap, marked, tapped
from jremat.check.replay_arguments import checked_tolerance, jit_under, refuse_abstract, refuse_traced
from jremat.check.sites import equations
from jremat.check.subject import Subject, subject_of
from jremat.graph.arguments import arrays_alone, take_apart
from jremat.graph.differentiate import inexact_places
from jremat.graph.effects import refuse_refs
from jremat.graph.trace import capture
from jremat.planner.request import Request
from jremat.policy import NONE, LayerPlan, Policy
from jremat.policy.whole_number import whole_number
from jremat.transform.chain import stack
from jremat.transform.flat import check_lengths, one_layer


@dataclass(frozen=True)
class Replay:
    """What a replay found.

    Args:
        equal: nothing differs by more than the tolerance.
        bitwise: nothing differs at all.
        tolerance: of the coarsest dtype compared, as a share of a value's largest magnitude.
        largest_difference: the largest share by which two values differ.
        first_difference: the first value, in the program's order, that differs by more than its tolerance.
        values_compared: how many: of both traces, both runs, the reruns, the results and the gradients.
        values_rerun: how many of them remat recomputed.
        gradient_errors: under a policy that compresses, of each gradient, and of all together under each of its rules
            alone; empty under any other. What is recomputed and the gradients are then not held against the exact ones.

    >>> print(Replay(True, True, 1e-5, 0.0, None, values_compared=12, values_rerun=3))
    equal bit for bit: 12 values compared, 3 of them recomputed
    """

    equal: bool
    bitwise: bool
    tolerance: float
    largest_difference: float
    first_difference: Difference | None
    values_compared: int
    values_rerun: int
    gradient_errors: tuple[GradientError, ...] = ()

    def __str__(self) -> str:
        return "\n".join([self._compared(), *([table(self.gradient_errors)] if self.gradient_errors else [])])

    def _compared(self) -> str:
        rerun = f"{self.values_compared:,} values compared, {self.values_rerun:,} of them recomputed"
        if self.first_difference is not None:
            return f"not equal: {self.first_difference} differs first; {rerun}"
        if self.bitwise:
            return f"equal bit for bit: {rerun}"
        return f"equal to {self.tolerance:.1e}, the largest difference {self.largest_difference:.1e}: {rerun}"

    __repr__ = __str__


def replay(
    f: Callable[..., Any],
    *args: Any,
    policy: Any = None,
    num_layers: int | None = None,
    tolerance: float | None = None,
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Replay:
    """Runs ``f`` with and without remat, and holds every value that is recomputed against the first run's.

    Four comparisons, in this order: two traces of ``f`` (a counter, a global, ``np.random`` at trace time show); two
    runs of one program, value by value (a callback that returns another value shows); in the gradient's program, each
    value that remat recomputes against the first run's; and results and gradients with remat and without.
    Keys and arguments are the same throughout. It keeps every value, so use a small batch. Under a policy that
    compresses, traces, runs and results are compared so, and the errors of the gradients are measured.

    Args:
        f: the forward function of a block or a loss.
        args, kwargs: arrays, in pytrees; differentiated by all that float.
        policy: put on ``f``: ours, or a plain one of JAX's; None: the remat that ``f`` already has. A ``LayerPlan``
            takes ``num_layers``.
        num_layers: a stack of so many of ``f`` is replayed, under a policy or plan of ours: ``f`` as
            ``f(layer_parameters, carry, *shared)`` to the next carry, its parameters stacked [num_layers, ...].
        tolerance: as a share of each value's largest magnitude; None: 64 rounding units of its dtype, 8 of a half.
        static_argnames, static_argnums: as of ``jremat.checkpoint``.
        compiler_options: of XLA, for all programs.

    Returns:
        What differs first, if anything does, and how much was compared.

    Raises:
        ValueError: an argument is a shape without values or a tracer, or nothing floats; the parameters aren't stacked;
            the tolerance is no share, or XLA doesn't know an option.

    >>> x, w = jnp.linspace(0, 1, 32).reshape(8, 4), jnp.eye(4)
    >>> found = replay(jax.checkpoint(lambda x, w: jnp.sin(x @ w) @ w), x, w)
    >>> found.equal, found.first_difference, found.values_rerun
    (True, None, 2)
    """
    errors: list[GradientError] = []
    tolerance, compile_ = checked_tolerance(tolerance), jit_under(compiler_options)
    static: dict[str, Any] = {"static_argnames": static_argnames, "static_argnums": static_argnums}
    num_layers = None if num_layers is None else whole_number("num_layers", num_layers)
    plain = take_apart(f, args, kwargs, **static)
    refuse_abstract(plain.arrays)
    inside: _Block | None = None  # the block of a stack, every value of it marked
    bare: Callable[..., Any] | None
    if num_layers is not None or isinstance(policy, LayerPlan):
        layers = _layers(policy, num_layers, args, kwargs, **static)
        if isinstance(policy, Request):
            policy = policy.resolve(f, one_layer(args[0]), *args[1:], num_layers=layers)
        f, args = arrays_alone(f, args)
        inside = _marked_block(f, *args)
        rematted, bare = stack(f, policy, num_layers=layers), stack(f, NONE, num_layers=layers)
        shown = stack(inside.call, policy, num_layers=layers)
    else:
        program = capture(plain)
        refuse_refs(program.jaxpr, program.paths)
        rematted, bare = with_policy(f, policy, **static), None if policy is None else f
    call = take_apart(rematted, args, kwargs, **static)
    arrays = [jnp.asarray(leaf) for leaf in call.arrays]
    if not inexact_places(arrays):
        raise ValueError("args: expected a floating-point array to differentiate by, got none")
    subject, again = subject_of(call), _traced_anew(rematted, args, kwargs, **static)
    refuse_traced(subject.closed.consts)
    without = subject.without(subject.sites) if bare is None else subject_of(take_apart(bare, args, kwargs, **static))
    named = marked(subject.closed if inside is None else subject_of(take_apart(shown, args, kwargs)).closed)
    taps = named.taps if inside is None else named.taps | inside.taps
    compared = [*between_traces(subject.closed, again.closed)]
    try:
        compared += _inside(Subject(named.closed).step, taps, arrays, compile_)
        compared += _outside(subject, without, arrays, call.array_paths, compile_)
        if compresses(policy):
            compared = [c for c in compared if c.where not in ("rerun", "gradient")]
            errors = _gradient_errors(subject, without, arrays, call.array_paths, compile_)
            rules = [*one_rule_each(policy)] if isinstance(policy, Policy) and inside is None else []
            for rule, alone in rules if len(rules) > 1 else ():
                one = subject_of(take_apart(with_policy(f, alone, **static), args, kwargs, **static))
                errors += _gradient_errors(one, without, arrays, (), compile_, rule)
    except NotImplementedError as error:  # an effect in a remat: run forward alone, and say why there is no more
        compared += [*_inside(Subject(named.closed), taps, arrays, compile_), _refused(subject, str(error))]
    return replace(_summed_up(compared, tolerance), gradient_errors=tuple(errors))


@dataclass(frozen=True)
class _Block:
    """A block whose values are marked.

    Args:
        call: it.
        taps: of the marks.
    """

    call: Callable[..., Any]
    taps: dict[str, Tap]


def _layers(policy: Any, num_layers: int | None, args: Any, kwargs: Any, **static: Any) -> int:
    """Of how many layers a stack is replayed.

    Raises:
        ValueError: what is handed over is no stack's.
    """
    layers = layers_of(policy, num_layers)
    if not isinstance(policy, Policy | LayerPlan | Request):
        raise ValueError(
            f"num_layers: expected a policy or a plan of ours beside it, e.g. policies.get('full'), got {policy!r}; "
            "without one f is replayed alone"
        )
    if len(args) < 2 or kwargs or any(value != () for value in static.values()):
        raise ValueError("args: expected those of a stack, f(layer_parameters, carry, *shared), all by position")
    check_lengths(args[0], layers)
    return layers


def _marked_block(f: Callable[..., Any], stacked: Any, *rest: Any) -> _Block:
    closed, out = jax.make_jaxpr(f, return_shape=True)(one_layer(stacked), *rest)
    refuse_refs(closed.jaxpr, take_apart(f, (stacked, *rest), {}).paths, "block")
    named, tree = marked(closed, "block."), jax.tree.structure(out)

    def call(*args: Any) -> Any:
        return jax.tree.unflatten(tree, core.jaxpr_as_fun(named.closed)(*jax.tree.leaves(args)))

    return _Block(call, named.taps)


def _traced_anew(f: Callable[..., Any], args: Any, kwargs: Any, **static: Any) -> Subject:
    """The function traced once more from its source: in another context of JAX's, which changes no program, so that
    nothing that JAX remembers of the first trace, of functions inside ``f`` too, is found."""

    @functools.wraps(f)
    def anew(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs)

    with warnings.catch_warnings(), jax.numpy_rank_promotion("warn"):
        warnings.simplefilter("ignore", UserWarning)
        return subject_of(take_apart(anew, args, kwargs, **static))


def _inside(
    run: Callable[..., Any], taps: dict[str, Tap], arrays: Sequence[Any], compile_: Callable[..., Any]
) -> list[Difference]:
    """Two runs of one program, value by value, and in it what remat recomputes against the first run."""
    closed = jax.make_jaxpr(run)(*arrays)
    found: list[Tap] = []

    def handing_out(*arrays: Any) -> list[Any]:
        _, handed, values = tapped(closed.jaxpr, closed.consts, arrays, taps)
        found[:] = handed
        return values

    compiled = compile_(handing_out)
    one, two = ([np.asarray(value) for value in compiled(*arrays)] for _ in range(2))
    reruns = of_reruns(found, one)
    return [
        *(_checked(tap, "run", by) for tap, by in between_runs(found, one, two)),
        *(_checked(tap, "rerun", by) for tap, by in reruns),
    ]


def _checked(tap: Tap, where: str, by: float) -> Difference:
    return Difference(tap.name, tap.shape, tap.dtype, tap.source, where, by)


def _outside(
    subject: Subject, without: Subject, arrays: Sequence[Any], paths: Sequence[str], compile_: Callable[..., Any]
) -> list[Difference]:
    """Results and gradients, with remat and without."""

    def both(side: Subject) -> tuple[list[Any], list[Any]]:
        results, gradients = compile_(lambda *arrays: (side(*arrays), side.step(*arrays)[1]))(*arrays)
        return [_numbers(x) for x in results], [_numbers(x) for x in gradients]

    (results, gradients), (bare_results, bare_gradients) = both(subject), both(without)
    largest = max(
        (float(np.abs(g.astype(np.float64)).max(initial=0)) for g in bare_gradients if g.dtype.kind == "f"), default=0.0
    )
    active = [paths[k] for k in inexact_places(arrays)]
    return [
        *(_named(f"result {k}", "result", a, b, 0.0) for k, (a, b) in enumerate(zip(results, bare_results))),
        *(
            _named(path, "gradient", a, b, REPLAY.floor * largest)
            for path, a, b in zip(active, gradients, bare_gradients, strict=True)
        ),
    ]


def _gradient_errors(
    subject: Subject,
    exact: Subject,
    arrays: Sequence[Any],
    paths: Sequence[str],
    compile_: Callable[..., Any],
    rule: str = "",
) -> list[GradientError]:
    """Of the gradients by the arguments at ``paths``, or of all together."""
    found, wanted = (
        [np.asarray(x) for x in compile_(lambda *arrays, side=side: side.step(*arrays)[1])(*arrays)]
        for side in (subject, exact)
    )
    active = [paths[k] for k in inexact_places(arrays)] if paths else []
    each = [gradient_error(name, [a], [b]) for name, a, b in zip(active, found, wanted)]
    return [*each, gradient_error(rule or "all gradients", found, wanted)]


def _named(name: str, where: str, a: Any, b: Any, floor: float) -> Difference:
    return Difference(name, a.shape, str(a.dtype), "", where, relative(a, b, floor))


def _numbers(value: Any) -> Any:
    return np.asarray(jax.random.key_data(value) if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key) else value)


def _refused(subject: Subject, why: str) -> Difference:
    eqn, line = next(
        ((e, line) for site in subject.sites for e, _, line in equations(site.body) if e.effects), (None, "")
    )
    name = eqn.primitive.name if eqn is not None else why
    return Difference(name, (), "", line, "refused", float("inf"))


def _summed_up(compared: Sequence[Difference], tolerance: float | None) -> Replay:
    allowed = [tolerance_of(c.dtype) if tolerance is None else tolerance for c in compared]
    beyond = [c for c, most in zip(compared, allowed) if c.relative > most]
    largest = max((c.relative for c in compared), default=0.0)
    return Replay(
        equal=not beyond,
        bitwise=largest == 0,
        tolerance=max((most for c, most in zip(compared, allowed) if c.where != "trace"), default=0.0),
        largest_difference=largest,
        first_difference=beyond[0] if beyond else None,
        values_compared=len(compared),
        values_rerun=sum(c.where == "rerun" for c in compared),
    )


def tolerance_of(dtype: str) -> float:
    """By how much two compilations may differ in a dtype; nothing in integers, whose difference is another decision.

    >>> tolerance_of("int32"), tolerance_of("bfloat16")
    (0.0, 0.0625)
    """
    if not dtype or not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    eps = float(jnp.finfo(dtype).eps)
    return eps * (REPLAY.units_half if eps > 1e-4 else REPLAY.units)
