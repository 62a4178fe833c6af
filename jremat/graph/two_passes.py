"""A function whose forward pass is exact and whose backward pass reads what was decompressed.

The function is evaluated twice in one trace. What the forward pass computes is exact and has no derivative. Beside it
stands what the backward pass computes from compressed values on: it has the derivative, and the results are the exact
values with that derivative. ``jax.checkpoint`` keeps the packed values by name; of the second evaluation nothing runs
in the forward pass, since no result of it is read there, and the backward pass runs just that. Up to the first
compressed value both are one.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jremat.graph.differentiate import is_inexact
from jremat.graph.evaluate import run_named
from jremat.graph.interpret import consts_of, interpret
from jremat.graph.named import bind_named, bind_supplied, with_derivative_of
from jremat.graph.packing import pack, unpack
from jremat.graph.trace import MARK
from jremat.jax_internals import COND, ONCE, SCAN, bind, inner_jaxprs, loop_parts, opened
from jremat.policy.decision import Decision

PACKED = f"{MARK}packed"
"""The name of a value that is packed next, so that its parts can be traced back to it."""
OF_FORMAT = "~"
"""Between the mark of a value and its decision, in the name under which its packed parts are kept."""


@jax.custom_jvp
def _differentiated_once(x: Any) -> Any:
    """``x``, whose second derivative is refused: what was rounded doesn't move with ``x``, so it would be wrong."""
    return x


@_differentiated_once.defjvp
def _first_derivative(primals: Any, tangents: Any) -> Any:
    return _not_differentiated(*primals), tangents[0]


@jax.custom_jvp
def _not_differentiated(x: Any) -> Any:
    return checkpoint_name(x, ONCE)  # the identity, and known as such


@_not_differentiated.defjvp
def _second_derivative(primals: Any, tangents: Any) -> Any:
    raise ValueError(
        "policy: a policy that compresses has first derivatives alone, and this is differentiated twice; "
        "save or recompute the values instead"
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Two:
    """One value in both passes.

    Args:
        forward: exact, without a derivative.
        backward: made from decompressed values, with the derivative.
    """

    forward: Any
    backward: Any


def evaluate_compressed(
    jaxpr: Any,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    marks: Mapping[str, str],
    packed: Mapping[str, Decision],
) -> list[Any]:
    """Evaluate ``jaxpr``, its values ``marks`` named, those of ``packed`` among them packed.

    Args:
        jaxpr, consts, inputs, marks: as of ``evaluate``.
        packed: value id -> how it is packed.

    Returns:
        The exact outputs, with the derivative taken at the unpacked values.
    """
    consts, inputs = ([_differentiated_once(x) if is_inexact(x) else x for x in some] for some in (consts, inputs))
    return [_one(out) for out in _Evaluation(marks, packed).run(jaxpr, consts, inputs)]


@dataclass(frozen=True)
class _Evaluation:
    """The marks and the packed values of a program."""

    marks: Mapping[str, str]
    packed: Mapping[str, Decision]

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], prefix: str = "") -> list[Any]:
        """Arrays or ``Two`` to arrays or ``Two``."""
        count = itertools.count()
        active = [x for x in map(_backward, (*consts, *inputs)) if is_inexact(x)]
        return interpret(
            jaxpr, consts, inputs, lambda eqn, given, _: self._step(eqn, given, f"{prefix}{next(count)}", active)
        )

    def _step(self, eqn: Any, given: Sequence[Any], key: str, active: Sequence[Any]) -> Sequence[Any]:
        outputs = [key if k == 0 else f"{key}:{k}" for k in range(len(eqn.outvars))]
        names, formats = [self.marks.get(o) for o in outputs], [self.packed.get(o) for o in outputs]
        two = any(isinstance(x, Two) for x in given)
        packs_inside = any(value.startswith(f"{key}/") for value in self.packed)
        if packs_inside or (two and any(value.startswith(f"{key}/") for value in self.marks)):
            outs = self._inside(eqn, given, key)
            kept = zip(outs, names, formats)
            return [self._kept(out, name, form, active) if name or form else out for out, name, form in kept]
        if not two and not any(formats):
            return run_named(eqn, given, key, names, self.marks, active)
        if eqn.effects or not all(is_inexact(v.aval) or v.aval.dtype == bool for v in eqn.outvars):
            # An effect happens once, and a choice by value (an index, an expert) is the forward pass's.
            assert not any(formats), "integers are not packed"
            once = [_one(x) for x in given]
            return bind_named(eqn, once, names, active) if any(names) else bind(eqn, once)
        forward = bind(eqn, [_without_derivative(x) for x in given])
        supplied = [_supplied(*kept) for kept in zip(forward, names, formats)]
        backward = bind_supplied(eqn, [_backward(x) for x in given], supplied, active)
        return [Two(*both) for both in zip(forward, backward)]

    def _kept(self, out: Any, name: str | None, form: Decision | None, active: Sequence[Any]) -> Two:
        forward = _without_derivative(out)
        return Two(forward, with_derivative_of(_supplied(forward, name, form), _backward(out), *active))

    def _inside(self, eqn: Any, given: Sequence[Any], key: str) -> list[Any]:
        """A loop or a branch that keeps values of its inside, with both passes in it."""
        bodies = [jaxpr for jaxpr, _ in inner_jaxprs(eqn)]
        prefixes = [f"{key}/{f'{k}.' if len(bodies) > 1 else ''}" for k in range(len(bodies))]
        if eqn.primitive.name == COND:
            run = lambda body, prefix: (
                lambda *own: [_as_two(x) for x in self.run(opened(body), consts_of(body), own, prefix)]
            )
            return lax.switch(_forward(given[0]), [*map(run, bodies, prefixes)], *given[1:])
        if eqn.primitive.name != SCAN:
            raise ValueError(
                f"policy: compresses a value inside of a {eqn.primitive.name} that places its arguments; "
                "put jremat.checkpoint on the function inside"
            )
        num_shared, num_carry = loop_parts(eqn)
        shared, carry, rows = given[:num_shared], given[num_shared:][:num_carry], given[num_shared + num_carry :]

        def turn(carry: Any, rows: Any) -> Any:
            outs = self.run(opened(bodies[0]), consts_of(bodies[0]), [*shared, *carry, *rows], prefixes[0])
            return [_as_two(x) for x in outs[:num_carry]], outs[num_carry:]

        how = {option: eqn.params[option] for option in ("length", "reverse", "unroll")}
        carry, made = lax.scan(turn, [_as_two(x) for x in carry], rows, **how)
        return [*carry, *made]


def _supplied(forward: Any, name: str | None, form: Decision | None) -> Any:
    """What the backward pass reads of a value: kept as it is, packed and unpacked, or nothing."""
    if form is None:
        return checkpoint_name(forward, name) if name else None
    assert name is not None, "what is packed has a mark"
    parts = pack(checkpoint_name(forward, PACKED), form)
    kept = tuple(checkpoint_name(part, f"{name}{OF_FORMAT}{form.value}") for part in parts)
    return unpack(kept, forward.shape, forward.dtype, form)


def _forward(x: Any) -> Any:
    return x.forward if isinstance(x, Two) else x


def _without_derivative(x: Any) -> Any:
    return x.forward if isinstance(x, Two) else lax.stop_gradient(x)


def _backward(x: Any) -> Any:
    return x.backward if isinstance(x, Two) else x


def _one(x: Any) -> Any:
    """The exact value, with the derivative of the backward pass."""
    return with_derivative_of(x.forward, x.backward) if isinstance(x, Two) else x


def _as_two(x: Any) -> Any:
    """A floating-point value in both passes; others as the forward pass has them."""
    if not is_inexact(_forward(x)):
        return _forward(x)
    return x if isinstance(x, Two) else Two(_without_derivative(x), x)
