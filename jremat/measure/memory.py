"""How much memory a program needs, as its compiler planned it."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jremat.graph import Graph, trace
from jremat.graph.arguments import held
from jremat.jax_internals import REMAT_SCOPE, SCAN, WHILE, cpu_drops_barriers, inner_jaxprs, opened, scopes
from jremat.measure import worker
from jremat.measure.buffers import tags_of
from jremat.measure.compile import is_array, lower
from jremat.measure.memory_analysis import Memory, local_bytes, measured
from jremat.measure.targets import BackendTooEarly, Target, TargetError, pip_line, target
from jremat.policy.shown import human


@dataclasses.dataclass(frozen=True)
class MemoryCheck:
    """Whether a program fits a device.

    Attributes:
        memory: the program's.
        limit_bytes: device memory less the margin.
    """

    memory: Memory
    limit_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit."""
        return self.free_bytes >= 0

    @property
    def free_bytes(self) -> int:
        """What is left under the limit; negative where it does not fit."""
        return self.limit_bytes - self.memory.peak_bytes

    def __str__(self) -> str:
        left = f"{human(abs(self.free_bytes))} {'left' if self.fits else 'too much'}"
        verdict = f"{'fits' if self.fits else 'does not fit'} in {human(self.limit_bytes)}, the margin left out: {left}"
        return f"{verdict}\n{self.memory}"

    __repr__ = __str__


def compiled_memory(
    fn: Callable[..., Any],
    *args: Any,
    target: str | Target | Path = "local",
    xla_remat: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    timeout_seconds: float | None = None,
    num_buffers: int = 12,
) -> Memory:
    """What ``fn(*args)`` needs on a device, which need not be here: compiled, never run.

    Args:
        fn: a whole step or any function, jitted or not; a jitted one's donation and shardings are honoured.
        args: arrays or ``jax.ShapeDtypeStruct``s, in any pytrees; ``NamedSharding``s on them are kept, with the
            target's devices in place of their mesh's. Static arguments of a jitted ``fn`` as they are.
        target: see ``jremat.measure.target``.
        xla_remat: leave XLA's own rematerialization pass on; off, the program keeps what the policy says.
        compiler_options: XLA's flags for this compile.
        timeout_seconds: compile in a process of its own and give up after so long; a compiler that crashes then
            costs that process alone. Without it the compile runs here, and in a process of its own only where this
            one's backend started too early for the CUDA plugin.
        num_buffers: how many of the largest buffers to name.

    Returns:
        The figures of one device, the largest buffers alive at the peak, versions and flags.

    Raises:
        ValueError: an unknown target, shardings that do not match it.
        TargetError: what compiles for the target is not installed; the message has the pip line.
        CompileError: XLA refuses, crashes or outruns ``timeout_seconds``.

    >>> import jax.numpy as jnp
    >>> found = compiled_memory(lambda x: x @ x, jax.ShapeDtypeStruct((64, 64), jnp.float32), target="cpu")
    >>> found.argument_bytes, found.output_bytes, found.peak_bytes >= 2 * 64 * 64 * 4
    (16384, 16384, True)
    """
    kind = _target(target)
    with _cudnn_named(kind):
        request = _request(fn, args, kind, xla_remat, compiler_options, num_buffers)
        if timeout_seconds is None:
            try:
                return measured(lower(fn, args, kind), kind, **request)[0]
            except BackendTooEarly:
                timeout_seconds = worker.PATIENCE_SECONDS
        return worker.run(fn, args, kind, timeout_seconds, request)


def program(
    fn: Callable[..., Any],
    *args: Any,
    target: str | Target | Path = "local",
    xla_remat: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    num_buffers: int = 12,
) -> tuple[Memory, jax.stages.Compiled]:
    """``compiled_memory`` and the program itself, which can be called where the device is here, from one compile.

    Args:
        fn, args, target, xla_remat, compiler_options, num_buffers: as ``compiled_memory``.

    >>> import jax.numpy as jnp
    >>> found, double = program(lambda x: 2 * x, jnp.ones(3), target="cpu")
    >>> double(jnp.ones(3)).tolist(), found.output_bytes
    ([2.0, 2.0, 2.0], 12)
    """
    kind = _target(target)
    with _cudnn_named(kind):
        request = _request(fn, args, kind, xla_remat, compiler_options, num_buffers)
        return measured(lower(fn, args, kind), kind, **request)


def _request(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kind: Target,
    xla_remat: bool,
    compiler_options: Mapping[str, Any] | None,
    num_buffers: int,
) -> dict[str, Any]:
    """What ``measured`` needs beside the program: read from the function's graph, and what the caller chose."""
    graph = _graph(fn, args)
    backend = jax.default_backend() if kind.platform == "local" else kind.platform
    if kind.platform == "cpu" and any(words in str(graph.program.jaxpr) for words in _OFFLOADS):
        warnings.warn(
            "memory: the program offloads to the host, and a CPU has one memory only: host_bytes shows nothing; "
            "compile for a GPU or TPU, e.g. target='h200'",
            stacklevel=3,
        )
    options = dict(compiler_options or {})
    notes = (UNDONE,) if backend == "cpu" and undone_on_cpu(graph.program.jaxpr) else ()
    return {
        "xla_remat": xla_remat, "compiler_options": options, "num_buffers": num_buffers, "tags": tags_of(graph),
        "notes": notes,
    }  # fmt: skip


def check_memory(
    fn: Callable[..., Any], *args: Any, target: str | Target | Path, margin: float = 0.05, **options: Any
) -> MemoryCheck:
    """Whether ``fn(*args)`` fits the target's memory.

    Args:
        fn, args, target, options: as ``compiled_memory``.
        margin: the share of the device's memory to leave free, 0 to 1: the allocator's fragmentation, collectives'
            and libraries' workspaces are in no compiler's figures.

    Returns:
        Whether it ``fits``, ``free_bytes`` under the limit, and the program's ``memory``.

    Raises:
        ValueError: the target's memory is unknown (``cpu``, an unknown GPU), or ``margin`` is out of range.

    >>> check_memory(lambda x: x, 1.0, target="cpu")
    Traceback (most recent call last):
    ...
    ValueError: target: cpu has no memory size to fit in; name a chip or a description's file
    """
    kind = _target(target)
    if not 0 <= margin < 1:
        raise ValueError(f"margin: expected a share from 0 to 1, got {margin}")
    limit_bytes = kind.hbm_bytes if kind.described else local_bytes(kind)
    if limit_bytes is None:
        raise ValueError(f"target: {kind.name} has no memory size to fit in; name a chip or a description's file")
    return MemoryCheck(compiled_memory(fn, *args, target=kind, **options), int(limit_bytes * (1 - margin)))


UNDONE = (
    "remat is undone outside of loops: XLA for CPU drops optimization barriers and takes the forward pass's values for "
    "the recomputed ones; a GPU or TPU target keeps remat"
)


def undone_on_cpu(jaxpr: Any) -> bool:
    """Whether XLA for CPU undoes remat of a program: outside of loops, before jax 0.12."""
    return cpu_drops_barriers() and _recomputes_outside_loops(jaxpr)


def _recomputes_outside_loops(jaxpr: Any, around: str = "") -> bool:
    """Whether a program recomputes anything for a backward pass outside of loops."""
    for eqn in opened(jaxpr).eqns:
        name, scope = eqn.primitive.name, f"{around}/{scopes(eqn)}"
        if name == WHILE or (name == SCAN and eqn.params["length"] > 1):
            continue
        inner = inner_jaxprs(eqn)
        if (not inner and REMAT_SCOPE in scope) or any(_recomputes_outside_loops(j, scope) for j, _ in inner):
            return True
    return False


@contextlib.contextmanager
def _cudnn_named(kind: Target) -> Iterator[None]:
    """JAX asks for cuDNN while it traces cuDNN attention, and says only that it was not found."""
    try:
        yield
    except RuntimeError as error:
        if "cuDNN not found" not in str(error):
            raise
        raise TargetError(f"{kind.name}: cuDNN attention needs cuDNN here; {pip_line('cudnn')}") from error


# How a jaxpr spells a transfer to the host: a device_put to a memory space, or to a memory kind.
_OFFLOADS = ("MemorySpace.Host", "pinned_host")


def _graph(fn: Callable[..., Any], args: tuple[Any, ...]) -> Graph:
    leaves, tree = jax.tree.flatten(args)
    arrays = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves if is_array(leaf)]

    def flat(*values: Any) -> Any:
        rest = iter(values)
        return held(fn(*jax.tree.unflatten(tree, [next(rest) if is_array(leaf) else leaf for leaf in leaves])))

    return trace(flat, *arrays)


_target = target
