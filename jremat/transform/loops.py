"""A stack of layers as a few loops, each with a forward and a backward pass; parameters are indexed, never copied."""

import contextlib
import itertools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jremat.graph.flops import trips_scope
from jremat.jax_internals import REMAT_SCOPE
from jremat.transform.layer import Flat, Leaves, SplitLayer
from jremat.transform.offload import from_host, to_host
from jremat.transform.reversal_schedule import Tables


@dataclass(frozen=True)
class Weights:
    """What every layer reads: parameters stacked on their first axis, and what all layers share."""

    stacked: Leaves
    shared: Leaves

    def layer(self, i: Any) -> Leaves:
        """The parameters of layer ``i``."""
        return [lax.dynamic_index_in_dim(leaf, i, keepdims=False) for leaf in self.stacked]


@dataclass(frozen=True)
class Gradients:
    """What the backward loops carry: of the state between two layers, of the stacked and of the shared leaves."""

    carry: Leaves
    stacked: Leaves
    shared: Leaves

    def after(self, split: SplitLayer, weights: Weights, kept: Leaves, i: Any) -> "Gradients":
        """One layer further back; its parameters' gradient is written in place."""
        own, shared, carry = split.backward(weights.layer(i), weights.shared, kept, self.carry)
        stacked = [_written(all_, one, i) for all_, one in zip(self.stacked, own)]
        carry = [_resharded(one, jax.typeof(before).sharding.spec) for one, before in zip(carry, self.carry)]
        return Gradients(carry, stacked, [total + one for total, one in zip(self.shared, shared)])


def _written(stacked: Any, layer: Any, i: Any) -> Any:
    """``stacked`` with its entry ``i`` replaced, in place."""
    layer = _resharded(layer, jax.P(*jax.typeof(stacked).sharding.spec[1:]))
    return lax.dynamic_update_index_in_dim(stacked, layer, i, 0)


def _resharded(cotangent: Any, spec: Any) -> Any:
    """A cotangent with the sharding of its primal in its type, which JAX may leave out on a mesh of Explicit axes."""
    sharding = jax.typeof(cotangent).sharding
    return cotangent if sharding.spec == spec else jax.sharding.reshard(cotangent, sharding.update(spec=spec))


jax.tree_util.register_dataclass(Gradients, data_fields=["carry", "stacked", "shared"], meta_fields=[])


@dataclass(frozen=True, eq=False)
class Repeat:
    """A pattern of layers, repeated; each keeps what its own policy says.

    Args:
        splits: the layer cut in two, under each policy of the pattern.
        repeats: how often the pattern is repeated.
    """

    splits: tuple[SplitLayer, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        """Of all repeats."""
        return len(self.splits) * self.repeats

    @property
    def carried(self) -> tuple[int | None, ...]:
        """For each carry leaf, which of the saved leaves holds the loop's first one as its first entry; None: none."""
        return self.splits[0].carried

    def forward(self, weights: Weights, start: Any, carry: Leaves) -> tuple[Leaves, Any]:
        """Forward, with what the backward pass needs, stacked over the repeats."""

        def turn(carry: Leaves, r: Any) -> tuple[Leaves, list[Leaves]]:
            kept = []
            for k, split in enumerate(self.splits):
                with _turn(self, k):
                    own = weights.layer(start + r * len(self.splits) + k)
                    carry, residuals = split.forward(own, weights.shared, carry)
                kept.append(residuals)
            return carry, kept

        if self.repeats == 1:  # no loop: where nobody reads the last carry, what makes it alone is dead code
            carry, kept = turn(carry, 0)
            return carry, jax.tree.map(lambda leaf: leaf[None], kept)
        return lax.scan(turn, carry, jnp.arange(self.repeats))

    def backward(self, weights: Weights, start: Any, saved: Any, gradients: Gradients) -> Gradients:
        """Backward from what ``forward`` kept."""

        def turn(gradients: Gradients, given: Any) -> tuple[Gradients, None]:
            r, kept = given
            for k in reversed(range(len(self.splits))):
                i = start + r * len(self.splits) + k
                if k < len(self.splits) - 1:
                    i, gradients = _in_turn(i, gradients)
                with _turn(self, k):
                    gradients = gradients.after(self.splits[k], weights, kept[k], i)
            return gradients, None

        return lax.scan(turn, gradients, (jnp.arange(self.repeats), saved), reverse=True)[0]


@dataclass(frozen=True, eq=False)
class Group:
    """Groups of layers, each replayed as a whole: only a group's input is kept.

    Args:
        block: the layer as written, to run a group where nothing is kept.
        inside: the loops of one group.
        repeats: how many groups.
        host: whether the groups' inputs are kept in pinned host memory.
    """

    block: Flat
    inside: tuple["Loop", ...]
    repeats: int
    host: bool = False

    @property
    def size(self) -> int:
        """Layers of one group."""
        return sum(loop.num_layers for loop in self.inside)

    @property
    def num_layers(self) -> int:
        """Of all groups."""
        return self.size * self.repeats

    @property
    def carried(self) -> tuple[int | None, ...]:
        """For each carry leaf, which of the saved leaves holds the loop's first one as its first entry; None: none."""
        inner = self.inside[0].carried
        return (None,) * len(inner) if self.host else tuple(range(len(inner)))

    def forward(self, weights: Weights, start: Any, carry: Leaves) -> tuple[Leaves, Any]:
        """Forward, with the input of every group."""

        def turn(carry: Leaves, g: Any) -> tuple[Leaves, Leaves]:
            boundary = to_host(carry) if self.host else carry
            return run(self.block, weights, start + g * self.size, carry, self.size), boundary

        return lax.scan(turn, carry, jnp.arange(self.repeats))

    def backward(self, weights: Weights, start: Any, saved: Any, gradients: Gradients) -> Gradients:
        """Backward: each group is run again from its input, then taken back."""

        def turn(gradients: Gradients, given: Any) -> tuple[Gradients, None]:
            g, boundary = given
            boundary = from_host(boundary) if self.host else boundary
            if self.repeats == 1:  # a loop of one turn is unrolled, and XLA would merge the replay with the forward
                boundary, carry = _in_turn(lax.optimization_barrier(boundary), gradients.carry)
                gradients = replace(gradients, carry=carry)
            with jax.named_scope(REMAT_SCOPE):
                _, kept = forward_all(self.inside, weights, start + g * self.size, boundary)
            return backward_all(self.inside, weights, start + g * self.size, kept, gradients), None

        return lax.scan(turn, gradients, (jnp.arange(self.repeats), saved), reverse=True)[0]


@dataclass(frozen=True, eq=False)
class Scheduled:
    """Layers reversed by a schedule: two tables drive one loop, so compile time doesn't grow with the schedule.

    Args:
        block, split: the layer as it is run, and cut in two.
        tables: the schedule for a machine of registers.
    """

    block: Flat
    split: SplitLayer
    tables: Tables

    @property
    def num_layers(self) -> int:
        """Of the schedule."""
        return len(self.tables.turns)

    @property
    def carried(self) -> tuple[int | None, ...]:
        """For each carry leaf, which of the saved leaves holds the loop's first one as its first entry; None: none."""
        return tuple(range(len(self.split.carried)))

    def forward(self, weights: Weights, start: Any, carry: Leaves) -> tuple[Leaves, Any]:
        """Forward, with the states that the schedule stores on its way."""
        # Made from the input itself, so that they have its whole type: sharding, manual axes, a key's kind.
        states = [lax.broadcast(x, (self.tables.registers,)) for x in carry]

        def turn(states: Leaves, row: Any) -> tuple[Leaves, None]:
            i, read, write = row
            after = self.block(weights.layer(start + i), weights.shared, _read(states, read))
            return _write(states, after, write), None

        rows = (
            jnp.arange(self.num_layers - 1),
            jnp.asarray(self.tables.sweep[:, 0]),
            jnp.asarray(self.tables.sweep[:, 1]),
        )
        states, _ = lax.scan(turn, states, rows)
        last = weights.layer(start + self.num_layers - 1)
        return self.block(last, weights.shared, _read(states, int(self.tables.turns[0, 2]))), states

    def backward(self, weights: Weights, start: Any, saved: Any, gradients: Gradients) -> Gradients:
        """Backward: before each layer's turn, the steps that bring its input back."""
        table = jnp.asarray(self.tables.replay)

        def step(t: Any, states: Leaves) -> Leaves:
            i, read, write = table[t]
            after = self.block(weights.layer(start + i), weights.shared, _read(states, read))
            return _write(states, after, write)

        def turn(state: tuple[Leaves, Gradients], given: Any) -> tuple[Any, None]:
            (states, gradients), (i, (begin, end, read)) = state, given
            with jax.named_scope(REMAT_SCOPE):
                if len(self.tables.replay):
                    with jax.named_scope(trips_scope(len(self.tables.replay), self.num_layers)):
                        states = lax.fori_loop(begin, end, step, states)
                _, kept = self.split.forward(weights.layer(start + i), weights.shared, _read(states, read))
            return (states, gradients.after(self.split, weights, kept, start + i)), None

        layers = jnp.arange(self.num_layers)[::-1]
        return lax.scan(turn, (saved, gradients), (layers, tuple(jnp.asarray(self.tables.turns).T)))[0][1]


Loop = Repeat | Group | Scheduled


def run(block: Flat, weights: Weights, start: Any, carry: Leaves, num_layers: int) -> Leaves:
    """Forward through ``num_layers`` layers, nothing kept."""

    def turn(carry: Leaves, i: Any) -> tuple[Leaves, None]:
        return block(weights.layer(start + i), weights.shared, carry), None

    return lax.scan(turn, carry, jnp.arange(num_layers))[0]


def forward_all(loops: tuple[Loop, ...], weights: Weights, start: Any, carry: Leaves) -> tuple[Leaves, list[Any]]:
    """Forward through loop after loop, with what each keeps."""
    saved = []
    for loop in loops:
        with _layers(start, loop):
            carry, kept = loop.forward(weights, start, carry)
        saved.append(kept)
        start = start + loop.num_layers
    return carry, saved


def backward_all(
    loops: tuple[Loop, ...], weights: Weights, start: Any, saved: list[Any], gradients: Gradients
) -> Gradients:
    """Back through loop after loop, last first."""
    ends = list(itertools.accumulate(loop.num_layers for loop in loops))
    for k in reversed(range(len(loops))):
        begin = start + ends[k] - loops[k].num_layers
        with _layers(begin, loops[k]):
            if k < len(loops) - 1:
                begin, gradients = _in_turn(begin, gradients)
            gradients = loops[k].backward(weights, begin, saved[k], gradients)
    return gradients


def _in_turn(start: Any, gradients: Any) -> tuple[Any, Any]:
    """What the next backward pass starts from (its layer's number, a replay's input), once the gradients are there.

    Where two layers stand in one body, XLA else fetches the parameters of both at once, writes the gradients of both
    at the end, and replays a group while the loss's memory is still held.
    """
    given = jax.tree.map(jnp.asarray, start), gradients
    tied = lax.optimization_barrier(given)
    # In a shard_map older JAX takes all that a barrier hands on as different from device to device: none there, then.
    kept = all(jax.typeof(a) == jax.typeof(b) for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(tied)))
    return tied if kept else given


def _layers(start: Any, loop: Loop) -> contextlib.AbstractContextManager[Any]:
    """A name scope, ``layers_4_7``, by which profiles and those who read the program tell the loops apart."""
    if not isinstance(start, int):
        return contextlib.nullcontext()  # inside a group: the group bears the name
    return jax.named_scope(f"layers_{start}_{start + loop.num_layers - 1}")


def _turn(loop: Repeat, k: int) -> contextlib.AbstractContextManager[Any]:
    """Likewise ``turn_1`` for the second layer of a pattern."""
    return jax.named_scope(f"turn_{k}") if len(loop.splits) > 1 else contextlib.nullcontext()


def _read(states: Leaves, register: Any) -> Leaves:
    return [lax.dynamic_index_in_dim(state, register, keepdims=False) for state in states]


def _write(states: Leaves, carry: Leaves, register: Any) -> Leaves:
    return [lax.dynamic_update_index_in_dim(state, x, register, 0) for state, x in zip(states, carry)]
