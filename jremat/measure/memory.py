"""How much memory a program needs, as its compiler planned it."""

import contextlib
import dataclasses
import importlib.metadata
import os
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jremat.graph import Graph, trace
from jremat.graph.flops import REMAT_SCOPE
from jremat.graph.trace import inner_jaxprs, opened, scopes
from jremat.measure import worker
from jremat.measure.buffers import Buffer, Tags, largest_at_peak, tags_of
from jremat.measure.compile import compiled, is_array, lower
from jremat.measure.schedule import Schedule
from jremat.measure.targets import BackendTooEarly, Target, TargetError, pip_line, target
from jremat.policy.shown import WIDTH, aligned, human


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of one compiled program on one device of its target, in bytes.

    ``peak_bytes`` is what must be free for it: arguments, results and temporaries, less results that take over a
    donated argument's place. (XLA's own ``peak_memory_in_bytes`` leaves the temporaries out on CPU.)

    Attributes:
        target: what it was compiled for; ``label`` says whether that is here.
        num_devices: of the target; the figures are of one of them.
        argument_bytes, output_bytes, temp_bytes, alias_bytes: in device memory.
        host_bytes: arguments, results and temporaries in the host's memory (offload).
        code_bytes: of the program itself, not in the peak.
        compile_seconds: of XLA alone.
        hbm_bytes: the device's memory, or None where unknown.
        buffers: the largest alive at the peak, largest first.
        versions: of JAX and of what compiled.
        flags: that change what the compiler does.
        label: ``compiled for h200, not run``.
        notes: what to know of the figures, a sentence each.

    >>> import jax.numpy as jnp
    >>> found = memory(jnp.sin, jax.ShapeDtypeStruct((1024,), jnp.float32), target="cpu")
    >>> found.argument_bytes, found.total_peak_bytes == found.peak_bytes
    (4096, True)
    """

    target: str
    num_devices: int
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    host_bytes: int
    code_bytes: int
    compile_seconds: float
    hbm_bytes: int | None
    buffers: tuple[Buffer, ...]
    versions: Mapping[str, str]
    flags: Mapping[str, str]
    label: str
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Of one device."""
        return self.temp_bytes + self.argument_bytes + self.output_bytes - self.alias_bytes

    @property
    def total_peak_bytes(self) -> int:
        """Of all devices together."""
        return self.peak_bytes * self.num_devices

    def __str__(self) -> str:
        figures = {"arguments": self.argument_bytes, "results": self.output_bytes, "temporaries": self.temp_bytes}
        figures |= {"donated": -self.alias_bytes, "host": self.host_bytes}
        compiled = self.label if "compiled" in self.label else f"compiled for {self.label}"
        each = f", each of {self.num_devices} devices" if self.num_devices > 1 else ""
        rows = [("peak", human(self.peak_bytes), compiled + each)]
        table = aligned([*rows, *((name, human(n)) for name, n in figures.items() if n)], right=[1])
        return "\n".join([table, *(textwrap.fill(note, WIDTH) for note in self.notes)])

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Every figure by name, ready for JSON."""
        return dataclasses.asdict(self) | {"peak_bytes": self.peak_bytes, "total_peak_bytes": self.total_peak_bytes}


@dataclasses.dataclass(frozen=True)
class Fit:
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
        said = f"{'fits' if self.fits else 'does not fit'} in {human(self.limit_bytes)}, the margin left out: {left}"
        return f"{said}\n{self.memory}"

    __repr__ = __str__


def memory(
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
    >>> found = memory(lambda x: x @ x, jax.ShapeDtypeStruct((64, 64), jnp.float32), target="cpu")
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
    """``memory`` together with the program itself, which can be called where the device is here: one compile for both.

    Args:
        fn, args, target, xla_remat, compiler_options, num_buffers: as ``memory``.

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
    notes = (UNDONE,) if backend == "cpu" and recomputes_outside_loops(graph.program.jaxpr) else ()
    return {
        "xla_remat": xla_remat, "compiler_options": options, "num_buffers": num_buffers, "tags": tags_of(graph),
        "notes": notes,
    }  # fmt: skip


def fits(fn: Callable[..., Any], *args: Any, target: str | Target | Path, margin: float = 0.05, **options: Any) -> Fit:
    """Whether ``fn(*args)`` fits the target's memory.

    Args:
        fn, args, target, options: as ``memory``.
        margin: the share of the device's memory to leave free, 0 to 1: the allocator's fragmentation, collectives'
            and libraries' workspaces are in no compiler's figures.

    Returns:
        Whether it ``fits``, ``free_bytes`` under the limit, and the program's ``memory``.

    Raises:
        ValueError: the target's memory is unknown (``cpu``, an unknown GPU), or ``margin`` is out of range.

    >>> fits(lambda x: x, 1.0, target="cpu")
    Traceback (most recent call last):
    ...
    ValueError: target: cpu has no memory size to fit in; name a chip or a description's file
    """
    kind = _target(target)
    if not 0 <= margin < 1:
        raise ValueError(f"margin: expected a share from 0 to 1, got {margin}")
    limit_bytes = kind.hbm_bytes if kind.described else _local_bytes(kind)
    if limit_bytes is None:
        raise ValueError(f"target: {kind.name} has no memory size to fit in; name a chip or a description's file")
    return Fit(memory(fn, *args, target=kind, **options), int(limit_bytes * (1 - margin)))


def measured(
    lowered: jax.stages.Lowered,
    kind: Target,
    *,
    xla_remat: bool,
    compiler_options: Mapping[str, Any],
    num_buffers: int,
    tags: Tags,
    notes: tuple[str, ...] = (),
) -> tuple[Memory, jax.stages.Compiled]:
    """Compile what was lowered for ``kind``, and read its memory; the program can be run where the device is here.

    Raises:
        RuntimeError: this compiler gives no memory figures.
    """
    with tempfile.TemporaryDirectory(prefix="jremat-") as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True} if num_buffers else {}
        start = time.perf_counter()
        program = compiled(lowered, kind, xla_remat=xla_remat, compiler_options=dump | dict(compiler_options))
        seconds = time.perf_counter() - start
        schedule = _dumped(Path(folder))
    buffers = largest_at_peak(schedule, tags, num_buffers) if schedule else ()
    m = program.memory_analysis()
    if m is None:
        raise RuntimeError(f"memory: {kind.name}'s compiler gives no memory figures")
    host_bytes = (
        m.host_temp_size_in_bytes
        + m.host_argument_size_in_bytes
        + m.host_output_size_in_bytes
        - m.host_alias_size_in_bytes
    )
    found = Memory(
        target=kind.name,
        num_devices=kind.num_devices,
        argument_bytes=m.argument_size_in_bytes,
        output_bytes=m.output_size_in_bytes,
        temp_bytes=m.temp_size_in_bytes,
        alias_bytes=m.alias_size_in_bytes,
        host_bytes=host_bytes,
        code_bytes=m.generated_code_size_in_bytes,
        compile_seconds=seconds,
        hbm_bytes=kind.hbm_bytes if kind.described else _local_bytes(kind),
        buffers=buffers,
        versions=versions(kind),
        flags=_flags(xla_remat, compiler_options),
        label=kind.label,
        notes=notes,
    )
    return found, program


UNDONE = (
    "remat is undone outside of loops: XLA for CPU drops optimization barriers and takes the forward pass's values for "
    "the recomputed ones; a GPU or TPU target keeps remat"
)


def recomputes_outside_loops(jaxpr: Any, around: str = "") -> bool:
    """Whether a program recomputes anything for a backward pass outside of loops, where XLA for CPU undoes it."""
    for eqn in opened(jaxpr).eqns:
        name, scope = eqn.primitive.name, f"{around}/{scopes(eqn)}"
        if name == "while" or (name == "scan" and eqn.params["length"] > 1):
            continue
        inner = inner_jaxprs(eqn)
        if (not inner and REMAT_SCOPE in scope) or any(recomputes_outside_loops(j, scope) for j, _ in inner):
            return True
    return False


def versions(kind: Target) -> dict[str, str]:
    """Versions of JAX and of what compiles for ``kind``; jaxlib or the plugin holds XLA."""
    names = ["jax", "jaxlib"]
    if kind.platform in ("cuda", "local"):
        names += [f"jax-cuda{major}-pjrt" for major in (12, 13)] + [f"nvidia-cudnn-cu{major}" for major in (12, 13)]
    if kind.platform in ("tpu", "local"):
        names += ["libtpu"]
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _flags(xla_remat: bool, compiler_options: Mapping[str, Any]) -> dict[str, str]:
    found = {"jax_compiler_enable_remat_pass": str(xla_remat)}
    found |= {name: os.environ[name] for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") if os.environ.get(name)}
    if precision := getattr(jax.config, "jax_default_matmul_precision", None):
        found["jax_default_matmul_precision"] = str(precision)
    return found | {name: str(value) for name, value in compiler_options.items()}


def _dumped(folder: Path) -> Schedule | None:
    """The main program among what XLA dumped: helpers that it compiles on the side are smaller."""
    found = sorted(folder.glob("*after_optimizations.hlo.pb"), key=lambda path: path.stat().st_size)
    return Schedule(found[-1].read_bytes()) if found else None


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
        return fn(*jax.tree.unflatten(tree, [next(rest) if is_array(leaf) else leaf for leaf in leaves]))

    return trace(flat, *arrays)


def _local_bytes(kind: Target) -> int | None:
    """What the allocator of the device that is here may use."""
    device = (jax.devices() if kind.platform == "local" else jax.devices(kind.platform))[0]
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")


_target = target
