"""The program that a lint reads: as written, with its gradient, with what it keeps, and without its remats."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jremat.check.sites import Site, bodies, graph_of_jaxpr, sites_of
from jremat.graph.arguments import Arguments, take_apart
from jremat.graph.differentiate import inexact_places, is_inexact, kept_by_pullback, of_places
from jremat.graph.flops import FlopCount, Flops, flops
from jremat.graph.graph import Graph
from jremat.graph.inlined import inlined
from jremat.graph.peak import PredictedMemory, predicted_memory
from jremat.graph.residuals import Residuals, read_residuals
from jremat.graph.trace import capture
from jremat.jax_internals import CUSTOM_JVP, bind, is_ref, live


class Subject:
    """A traced function under the eye of the lint; everything is read once, when first asked for.

    Args:
        closed: the function's program, a closed jaxpr.
        policy: the policy that the lint was given and put on the whole function, or None.
        bare: the program before that policy, where there is one.
        is_block: whether it is one layer of a stack, so that its remats are inside of the stack's loop.
    """

    def __init__(self, closed: Any, policy: Any = None, bare: "Subject | None" = None, is_block: bool = False):
        self.closed, self.policy, self.bare, self.is_block = closed, policy, bare, is_block
        self._without: dict[frozenset[int], Subject] = {}

    def of(self, policy: Any, is_block: bool) -> "Subject":
        """The same program, with the policy that it was put under."""
        return Subject(self.closed, policy, self.bare, is_block)

    @property
    def jaxpr(self) -> Any:
        """As written, open."""
        return self.closed.jaxpr

    @property
    def avals(self) -> list[Any]:
        """Of its inputs."""
        return [v.aval for v in self.jaxpr.invars]

    @cached_property
    def graph(self) -> Graph:
        """Its values and operations."""
        return graph_of_jaxpr(self.jaxpr)

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """Its remats."""
        return sites_of(self.jaxpr)

    @property
    def is_loss(self) -> bool:
        """Whether it returns numbers alone, so that its gradient is the whole step's; a block's are a small carry."""
        return not self.is_block and all(v.aval.size == 1 for v in self.jaxpr.outvars if is_inexact(v.aval))

    def __call__(self, *arrays: Any) -> list[Any]:
        return core.jaxpr_as_fun(self.closed)(*arrays)

    @cached_property
    def step(self) -> Callable[..., Any]:
        """Its value and its gradient by every floating-point input.

        Raises:
            NotImplementedError: as ``rows``.
        """
        self._refuse_refs()
        return gradient_of(self, self.avals)

    @cached_property
    def gradient(self) -> Any:
        """The live program of ``step``, calls entered."""
        closed = jax.make_jaxpr(self.step)(*self.avals)
        # Differentiated once, a rule for differentiating again is a call like others.
        rules = {id(eqn) for body in bodies(closed) for eqn in body.eqns if eqn.primitive.name == CUSTOM_JVP}
        flat = jax.make_jaxpr(lambda *arrays: inlined(closed.jaxpr, closed.consts, arrays, rules))(*self.avals)
        return live(flat.jaxpr)

    @cached_property
    def flops(self) -> Flops:
        """Of ``step``."""
        return flops(self.step, *self.avals)

    @cached_property
    def peak(self) -> PredictedMemory:
        """The memory of ``step``, predicted."""
        return predicted_memory(self.step, *self.avals)

    @property
    def recomputed(self) -> int:
        """FLOPs recomputed: of matmuls, or of everything where no matmul is in it."""
        return chosen(self.flops, self.graph)

    @cached_property
    def rows(self) -> Residuals:
        """What it keeps for its backward pass.

        Raises:
            NotImplementedError: it writes to a Ref, which can't be handed out.
        """
        self._refuse_refs()
        return read_residuals(take_apart(self, self.avals, {}))

    @cached_property
    def pullback(self) -> Any:
        """The program from its inputs to everything that its backward pass reads.

        Raises:
            NotImplementedError: as ``rows``.
        """
        self._refuse_refs()
        return jax.make_jaxpr(kept_by_pullback(self))(*self.avals).jaxpr

    def _refuse_refs(self) -> None:
        if any(is_ref(v.aval) for v in (*self.jaxpr.invars, *self.jaxpr.constvars)):
            raise NotImplementedError("a Ref can't be listed among what is kept")

    def without(self, sites: Sequence[Site]) -> "Subject":
        """The same program, some of its remats taken away."""
        drop = frozenset(id(eqn) for site in sites for eqn in site.eqns)
        if drop not in self._without:
            run = lambda *arrays: inlined(self.jaxpr, self.closed.consts, arrays, drop)
            self._without[drop] = Subject(jax.make_jaxpr(run)(*self.avals))
        return self._without[drop]


def subject_of(call: Arguments) -> Subject:
    """Trace a call."""
    program = capture(call)
    return Subject(core.ClosedJaxpr(program.jaxpr, program.consts))


def of_site(site: Site) -> Subject:
    """One run of a remat, alone, as it stands."""
    run = lambda *arrays: bind(site.eqn, arrays)
    return Subject(jax.make_jaxpr(run)(*(v.aval for v in site.eqn.invars)))


def of_body(site: Site) -> Subject:
    """One run of what a remat reruns, without the remat."""
    return Subject(core.ClosedJaxpr(site.body, ()))


def gradient_of(f: Callable[..., Any], avals: Sequence[Any]) -> Callable[..., Any]:
    """The gradient of the sum of ``f``'s outputs by every floating-point input."""
    active = inexact_places(avals)

    def total(*arrays: Any) -> jax.Array:
        return sum((jnp.real(out).astype(jnp.float32).sum() for out in f(*arrays) if is_inexact(out)), jnp.float32(0))

    def step(*arrays: Any) -> Any:
        by = of_places(total, arrays, active)
        return jax.value_and_grad(by, argnums=tuple(range(len(active))))(*(arrays[k] for k in active))

    return step


def chosen(counted: Flops, graph: Graph) -> int:
    """What of a count is recomputed: matmuls, or everything where there are none."""
    kind: FlopCount = counted.matmul if graph.matmul_flops else counted.other
    return kind.recompute


def work(graph: Graph) -> int:
    """FLOPs of a graph: of its matmuls, or of everything where there are none."""
    return graph.matmul_flops or graph.other_flops
