"""What a live PyTorch program keeps for its backward pass, and what the backward does again; on any device.

Three ways of counting what is kept agree to the byte on these stacks: the storages alive after the forward (this one),
PyTorch's MemTracker, and saved-tensor hooks joined with what selective checkpoint holds, which hooks don't see.
"""

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

Forward = Callable[[Callable[[str, Tensor], Tensor]], Tensor]
"""A forward pass that shows its named tensors to a tag: ``forward(tag)`` to its output."""

# Outputs beside the first that an op keeps for itself: statistics and the log-sum-exp.
_STATISTICS = {"native_layer_norm": "norm_stats", "_fused_rms_norm": "norm_stats"}
_COPIES = ("clone", "_to_copy", "contiguous")


@dataclass(frozen=True)
class Kept:
    """One storage alive between the forward and the backward pass.

    Args:
        name: of the tensor that it holds, or of the op that made it, in brackets.
        shape: of the op's output.
        bytes: of the storage.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int


def kept(forward: Forward) -> tuple[Kept, ...]:
    """Every storage that the forward made and that is alive after it, the output's left out, each once."""
    gc.collect()
    watch = _Storages()
    with watch:
        out = forward(watch.name)
    gc.collect()
    last = out.untyped_storage()._cdata
    return tuple(row for key, (ref, row) in watch.rows.items() if key != last and not ref.expired())


class _Storages(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        # A weak reference holds a storage's address, though not its memory, so no key comes twice.
        self.rows: dict[int, tuple[StorageWeakRef, Kept]] = {}
        self.given: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self.given |= {_key(t) for t in read} - self.rows.keys()
        out = func(*args, **(kwargs or {}))
        op = func._schema.name.rpartition("::")[2]
        for place, value in enumerate(tree_leaves(out)):
            if isinstance(value, Tensor) and _key(value) not in self.rows and _key(value) not in self.given:
                name = "norm_stats" if op == "rsqrt" else f"({op})"  # RMSNorm on a CPU is written out
                if op in _COPIES and read and _key(read[0]) in self.rows:
                    name = self.rows[_key(read[0])][1].name
                if place:
                    name = "attn_lse" if "attention" in op else _STATISTICS.get(op, name)
                storage = value.untyped_storage()
                row = Kept(name, tuple(value.shape), storage.nbytes())
                self.rows[_key(value)] = StorageWeakRef(storage), row
        return out

    def name(self, name: str, value: Tensor) -> Tensor:
        found = self.rows.get(_key(value))
        if found is not None and name not in ("attn_fused", "attn_lse"):  # one value, one name
            ref, row = found
            self.rows[_key(value)] = ref, Kept(name, row.shape, row.bytes)
        return value


def _key(value: Tensor) -> int:
    return value.untyped_storage()._cdata


@dataclass(frozen=True)
class Work:
    """Matmul FLOPs and matmuls of a forward pass, and of its backward pass.

    A backward pass without recompute does twice the forward's: the rest was done before.
    """

    forward_flops: int
    backward_flops: int
    forward_matmuls: int
    backward_matmuls: int

    @property
    def recomputed_flops(self) -> int:
        """Done again."""
        return self.backward_flops - 2 * self.forward_flops

    @property
    def recomputed_matmuls(self) -> int:
        """Done again; a fused attention is none."""
        return self.backward_matmuls - 2 * self.forward_matmuls


def work(forward: Callable[[], Tensor]) -> Work:
    """Count a forward pass and the backward pass of its sum; all inputs of its matmuls must require gradients."""
    counted = []
    for run in (forward, None):
        counter, calls = FlopCounterMode(display=False, custom_mapping=_FUSED_ON_CPU), _Calls()
        with counter, calls:
            if run is not None:
                out = run().sum()
            else:
                out.backward()
        counted.append((counter.get_total_flops(), sum(calls.counts[op] for op in _MATMULS)))
    (forward_flops, forward_matmuls), (backward_flops, backward_matmuls) = counted
    return Work(forward_flops, backward_flops, forward_matmuls, backward_matmuls)


_MATMULS = ("mm", "addmm", "bmm", "baddbmm")


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.rpartition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def _fused_forward(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    b, n, s, d = query
    return 2 * 2 * b * n * s * key[-2] * d  # scores and context, masked scores counted


def _fused_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * _fused_forward(query, key, value)  # without the kernel's own rerun of the scores, as jremat.flops


# PyTorch's counter doesn't know the CPU's kernel.
_FUSED_ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _fused_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _fused_backward,
}


def peak_bytes(step: Callable[[], Any], *modules: torch.nn.Module) -> int:
    """Most bytes alive at once while ``step`` runs, parameters and gradients included; an op's workspace isn't seen."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(*modules)
    with tracker:
        step()
    return max(sum(snapshot.values()) for snapshot in _totals(tracker))


def _totals(tracker: Any) -> list[dict[Any, int]]:
    """The snapshot at the peak, a device at a time, less the totals that stand beside their parts."""
    at_peak = tracker.get_tracker_snapshot("peak")
    return [{kind: size for kind, size in one.items() if "Total" not in str(kind)} for one in at_peak.values()]
