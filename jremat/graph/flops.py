"""FLOPs of a whole gradient computation, read from its program: model, recompute, and a kernel's own rerun."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from jremat.graph.arguments import take_apart
from jremat.graph.arithmetic import FUSED_RERUN, is_square, matmul_flops, other_flops
from jremat.graph.letters import Polynomial, lettered
from jremat.graph.trace import capture
from jremat.jax_internals import COND, REMAT_SCOPE, WHILE, inner_jaxprs, live, opened, scopes
from jremat.policy.names import RERUN_SCOPE
from jremat.policy.shown import aligned, human_flops

_TRIPS = re.compile(r"jremat_trips_(\d+)_in_(\d+)")


def trips_scope(trips: int, turns: int) -> str:
    """The scope of a ``while`` whose trip counts are data: how often it goes round in ``turns`` runs together.

    >>> trips_scope(18, 16)
    'jremat_trips_18_in_16'
    """
    return f"jremat_trips_{trips}_in_{turns}"


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one kind.

    Args:
        model: needed once: forward and backward.
        recompute: recomputed by remat.
        rerun: recomputed inside a fused kernel's backward; in HFU but no policy's doing.
    """

    model: int = 0
    recompute: int = 0
    rerun: int = 0

    @property
    def total(self) -> int:
        """All that the program does."""
        return self.model + self.recompute + self.rerun

    def __add__(self, other: "FlopCount") -> "FlopCount":
        return FlopCount(*(own if its == 0 else _plain(own + its) for own, its in zip(self._kinds, other._kinds)))

    def __mul__(self, times: int | Fraction) -> "FlopCount":
        return FlopCount(*(_plain(own * times) for own in self._kinds))

    @property
    def _kinds(self) -> tuple[int, int, int]:
        return self.model, self.recompute, self.rerun


def _plain(number: Any) -> Any:
    """A loop's average as an integer again, once its turns have made a whole number of it."""
    return int(number) if getattr(number, "denominator", 0) == 1 else number


_NO_FLOPS = FlopCount()


@dataclass(frozen=True)
class Flops:
    """What a gradient computation costs, exactly, scan lengths multiplied.

    Args:
        matmul: FLOPs of matmuls, convolutions and fused attention.
        other: FLOPs of the rest, by the convention above.
        square: the part of ``matmul`` in attention's batched matmuls between two axes of one length (materialised
            scores): the ``full`` convention counts all of it, the causal ``half`` convention half.
        count: the matmuls and convolutions themselves, not their FLOPs.
    """

    matmul: FlopCount = FlopCount()
    other: FlopCount = FlopCount()
    square: FlopCount = FlopCount()
    count: FlopCount = FlopCount()

    def __add__(self, other: "Flops") -> "Flops":
        if other.matmul == other.square == _NO_FLOPS:  # most equations
            return replace(self, other=self.other + other.other)
        return Flops(
            self.matmul + other.matmul, self.other + other.other, self.square + other.square, self.count + other.count
        )

    def __mul__(self, times: int | Fraction) -> "Flops":
        return Flops(self.matmul * times, self.other * times, self.square * times, self.count * times)

    @property
    def model(self) -> int:
        """Model matmul FLOPs, causal attention counted whole (PaLM, nanoGPT, torchtitan)."""
        return self.matmul.model

    @property
    def model_half(self) -> int:
        """Model matmul FLOPs, materialised causal attention counted by half (Megatron, MaxText since July 2025)."""
        return self.matmul.model - self.square.model // 2

    @property
    def recompute(self) -> int:
        """Matmul FLOPs recomputed by remat."""
        return self.matmul.recompute

    @property
    def total(self) -> int:
        """Matmul FLOPs that the program does, a fused kernel's own rerun included: what HFU counts."""
        return self.matmul.total

    def __str__(self) -> str:
        of_model = lambda flops: f"{flops / self.model:.1%} of the model's matmul FLOPs" if self.model else ""
        rows = [
            ("model", human_flops(self.model), f"in {self.count.model:,} matmuls"),
            (
                "recompute",
                human_flops(self.recompute),
                f"in {self.count.recompute:,} matmuls",
                of_model(self.recompute),
            ),
        ]
        if self.matmul.rerun:
            rows.append(("rerun", human_flops(self.matmul.rerun), "inside kernels", of_model(self.matmul.rerun)))
        rows.append(("other", human_flops(self.other.total), "not matmuls"))
        return aligned(rows, right=[1])

    __repr__ = __str__


def flops(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Flops:
    """What a gradient computation costs: FLOPs needed, recomputed by remat, and done in all.

    Counted on live code: what no output needs is not counted, so count ``jax.value_and_grad``, as a training step runs
    it; ``jax.grad`` of a block alone has no forward pass left. What remat does again is told by the scope under which
    JAX puts it. A ``while`` counts by its trip count where the program tells it (a schedule's replay does), else once;
    of a ``cond``'s branches the dearest counts.

    Args:
        f: a gradient computation, e.g. ``jax.value_and_grad(loss)``; policies are in the function.
        args, kwargs: arrays or ``jax.ShapeDtypeStruct``, in pytrees; sizes may be letters
            (``jax.export.symbolic_shape``), and what depends on them is then a ``Polynomial``.

    Returns:
        ``.model``, ``.model_half``, ``.recompute``, ``.total`` in matmul FLOPs, and each kind apart.

    >>> import jax, jax.numpy as jnp
    >>> x, w = jnp.ones((8, 4)), jnp.ones((4, 4))
    >>> f = lambda x, w: (jnp.sin(x @ w) @ w).sum()
    >>> [flops(jax.value_and_grad(g, (0, 1)), x, w).recompute for g in (f, jax.checkpoint(f))]
    [0, 256]
    """
    return count_in(capture(take_apart(f, args, kwargs)).jaxpr)


def count_in(jaxpr: Any) -> Flops:
    """The same of a program that is traced already."""
    return _count(live(jaxpr), _MODEL)


_MODEL, RECOMPUTE, _RERUN = "model", "recompute", "rerun"


def _count(jaxpr: Any, kind: str) -> Flops:
    return sum((flops_of(eqn, kind) for eqn in opened(jaxpr).eqns), Flops())


def flops_of(eqn: Any, kind: str = _MODEL) -> Flops:
    """One equation with all that it holds, told apart by scope; ``kind`` is of what is around it."""
    own = _kind(eqn, kind)
    parts = [_count(inner, own) * lettered(times) for inner, times in _inner(eqn)]
    if not parts:
        return _equation(eqn, own)
    branches = eqn.primitive.name == COND
    return max(parts, key=_dearest) if branches else sum(parts[1:], parts[0])


def _dearest(part: Flops) -> int:
    """What branches are compared by; letters at a size where the highest power decides."""
    total = part.total
    return total if not isinstance(total, Polynomial) else total.at(dict.fromkeys(total.letters, 1 << 12))


def _inner(eqn: Any) -> list[tuple[Any, Any]]:
    """The jaxprs that an equation holds, each with how often it runs: of a marked ``while`` on average."""
    marked = _TRIPS.search(scopes(eqn)) if eqn.primitive.name == WHILE else None
    if marked is None:
        return inner_jaxprs(eqn)
    trips = Fraction(int(marked[1]), int(marked[2]))
    return [(eqn.params["cond_jaxpr"], trips + 1), (eqn.params["body_jaxpr"], trips)]


def _kind(eqn: Any, outer: str) -> str:
    around = scopes(eqn)
    if outer == RECOMPUTE or REMAT_SCOPE in around:
        return RECOMPUTE
    return _RERUN if outer == _RERUN or RERUN_SCOPE in around else _MODEL


def _equation(eqn: Any, kind: str) -> Flops:
    name, inputs, outputs = eqn.primitive.name, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
    matmul = lettered(matmul_flops(name, eqn.params, inputs, outputs))
    if not matmul:
        return Flops(other=FlopCount(**{kind: lettered(other_flops(name, inputs, outputs))}))
    again, of = FUSED_RERUN.get(name, (0, 1))
    count = FlopCount(**{kind: matmul})
    if again and kind == _MODEL:
        count = FlopCount(model=matmul * (of - again) // of, rerun=matmul * again // of)
    square = count if is_square(name, eqn.params, inputs) else FlopCount()
    return Flops(matmul=count, square=square, count=FlopCount(**{kind: 1}))
