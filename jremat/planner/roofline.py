"""How long an operation takes at best: the larger of its arithmetic and its traffic, fused chains charged once.

A model, not a measurement: good for comparing what to recompute, and called modelled wherever it is shown.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jremat.calibration import ROOFLINE
from jremat.estimator.hardware import Chip
from jremat.graph import Graph
from jremat.graph.graph import Op
from jremat.jax_internals import COND, CUSTOM_JVP, PALLAS

Cost = Callable[[Graph], tuple[float, ...]]
"""The cost of each operation of a graph, in its order."""


@dataclass(frozen=True)
class Roofline:
    """Seconds of each operation of a graph on a chip.

    A matmul takes the longer of its arithmetic and of reading and writing its arrays. Pointwise operations and changes
    of layout run fused: a chain of them reads what it starts from and writes what others than the chain read, once.
    A reduction reads its chain's start and writes its result. Communication takes its bytes over the chip's links.

    Args:
        chip: of ``jremat.estimator.hardware``.
        matmul_share, bandwidth_share: of the chip's peaks that a large matmul and a streaming kernel reach.

    Source: Williams et al. 2009, CACM 52(4), for the roofline.
    """

    chip: Chip
    matmul_share: float = ROOFLINE.matmul
    bandwidth_share: float = ROOFLINE.bandwidth

    def __call__(self, graph: Graph) -> tuple[float, ...]:
        """Seconds of one run of each operation, in order."""
        chains = _Chains.of(graph)
        return tuple(self._seconds(op, graph, chains) for op in graph.ops)

    def total(self, graph: Graph) -> float:
        """Seconds of one run of the whole graph."""
        return sum(self(graph))

    def _seconds(self, op: Op, graph: Graph, chains: "_Chains") -> float:
        if op.inner and op.primitive not in (CUSTOM_JVP, PALLAS):
            parts = [self.total(inner) * times for inner, times in _turns(op, graph)]
            return max(parts, default=0.0) if op.primitive == COND else sum(parts)
        traffic = chains.traffic_bytes(op) / (self.chip.hbm_bytes_per_second * self.bandwidth_share)
        if op.matmul_flops:
            rate = self.chip.matmul_flops_per_second(_dtype(op, graph)) * self.matmul_share
            return max(op.matmul_flops / rate, traffic)
        if "collective" in op.families:
            moved = sum(graph.values[o].nbytes for o in op.outputs)
            return max(moved / self.chip.chip_link_bytes_per_second, traffic)
        rate = self.chip.f32_flops_per_second or self.chip.bf16_flops_per_second / 16  # a TPU's vector unit
        return max(op.other_flops / rate, traffic)


def written(graph: Graph) -> frozenset[str]:
    """Ids of the values that memory holds; all others are made inside of the kernels that read them."""
    return _Chains.of(graph).written


def fuses(op: Op) -> bool:
    """Whether an operation is done inside of the kernels that read its result."""
    return op.primitive in _FUSED or ("pointwise" in op.families and not op.matmul_flops)


def matmul_flops(graph: Graph) -> tuple[float, ...]:
    """A cost that counts matmul FLOPs alone.

    Everything else costs a trifle, its FLOPs by a millionth, so that of plans with equal matmuls the lighter one is
    chosen.
    """
    return tuple(op.matmul_flops + 1e-6 * (op.other_flops + 1) for op in graph.ops)


def _turns(op: Op, graph: Graph) -> Iterator[tuple[Graph, int]]:
    """The graphs inside an operation, with how often one run of it runs each."""
    for inner in op.inner:
        repeats = next((inside.repeats for inside in inner.ops), op.repeats)
        yield inner, max(repeats // max(op.repeats, 1), 1)


def _dtype(op: Op, graph: Graph) -> str:
    """The dtype that decides a matmul's rate: its narrowest floating input's."""
    dtypes = {graph.values[i].dtype for i in op.inputs}
    return "float32" if dtypes and dtypes.isdisjoint({"bfloat16", "float16"}) else "bfloat16"


# Layout and indexing that XLA folds into the kernels around them; pointwise families and tags beside these.
_FUSED = frozenset(
    (
        *(
            "broadcast_in_dim",
            "reshape",
            "transpose",
            "convert_element_type",
            "name",
            "iota",
            "squeeze",
            "split",
            "pad",
        ),
        *(
            "expand_dims",
            "slice",
            "concatenate",
            "rev",
            "split",
            "copy",
            "copy_p",
            "reduce_precision",
        ),
        *(
            "dynamic_slice",
            "gather",
            "rsqrt",
            "random_wrap",
            "random_unwrap",
            "bitcast_convert_type",
            "optimization_barrier",
        ),
    )
)


@dataclass(frozen=True)
class _Chains:
    """Which values of a graph are written to memory, and what each fused chain starts from.

    Args:
        graph: whose.
        maker: value id -> the operation that makes it.
        written: ids of values that memory holds.
    """

    graph: Graph
    maker: dict[str, Op]
    written: frozenset[str]

    @classmethod
    def of(cls, graph: Graph) -> "_Chains":
        maker = {out: op for op in graph.ops for out in op.outputs}
        written = set(graph.outputs)
        for op in graph.ops:
            if not fuses(op):
                written |= set(op.outputs)
                if "reduction" not in op.families:  # a reduction takes the chain before it in
                    written |= set(op.inputs)
        # A tag or a reshape of a written value is that value.
        for op in reversed(graph.ops):
            if op.primitive in ("name", "reshape") and written & set(op.outputs):
                written |= set(op.inputs)
        return cls(graph, maker, frozenset(written))

    def traffic_bytes(self, op: Op) -> int:
        """Bytes that an operation reads and writes; nothing for one in the middle of a chain."""
        if op.primitive in ("name", "reshape"):
            return 0
        writes = sum(self.graph.values[o].nbytes for o in op.outputs if o in self.written)
        if not writes:
            return 0
        return writes + sum(self.graph.values[i].nbytes for i in self._starts(op))

    def _starts(self, op: Op) -> frozenset[str]:
        """Ids of the written values that the chain which ends in ``op`` reads."""
        found: set[str] = set()
        seen: set[str] = set()
        todo = list(op.inputs)
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            maker = self.maker.get(value)
            if maker is None or value in self.written or not fuses(maker):
                found.add(value)
            else:
                todo += maker.inputs
        return frozenset(found)
