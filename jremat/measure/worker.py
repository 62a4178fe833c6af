"""A compile in a process of its own: one that crashes or hangs costs a row, not the session.

The function is exported here (``jax.export``: StableHLO with its platforms, effects and shardings) and compiled there.
The file between the two is a pickle, since JAX's own serialization wants flatbuffers; both ends are the same Python
and the same JAX. Figures are those of a compile in this process, with one exception: where shardings of the results
are left to XLA, it may choose others, because the exported function is one call inside the compiled one.
"""

import dataclasses
import os
import pickle
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax import export

from jremat.child_process import last_error, run_logged
from jremat.measure.buffers import Buffer
from jremat.measure.compile import CompileError, as_jitted, explained, is_array, lower
from jremat.measure.memory_analysis import Memory, measured
from jremat.measure.targets import Target, TargetError, require_plugin

PATIENCE_SECONDS = 1800.0
"""How long a compile may take where the caller set no limit: an 8B model's takes a minute or two."""

# Custom calls that jax.export holds back because their meaning may change between versions; both ends are one version.
_KERNELS = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxDropout", "__cudnn$fmhaSoftmaxBackward",
            "__cudnn$fmhaSoftmaxDropoutBackward", "__cudnn$fmhaScaleBiasSoftmax",
            "__cudnn$fmhaScaleBiasSoftmaxBackward", "__gpu$xla.gpu.triton", "triton_kernel_call",
            "mosaic_gpu", "mosaic_gpu_v2", "tpu_custom_call")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """What the other process gets.

    Attributes:
        program: the exported function of flat arrays.
        args: shape, dtype, partition and mesh of each.
        donated: which of them.
        target, request: as ``measured`` takes them.
    """

    program: export.Exported
    args: tuple[jax.ShapeDtypeStruct, ...]
    donated: tuple[int, ...]
    target: Target
    request: Mapping[str, Any]


def run(
    fn: Callable[..., Any], args: tuple[Any, ...], kind: Target, timeout_seconds: float, request: Mapping[str, Any]
) -> Memory:
    """``memory`` of ``fn(*args)`` from another process.

    Raises:
        CompileError: XLA refuses, crashes or outruns ``timeout_seconds``; or ``fn`` does not export.
        TargetError: what compiles for the target is not installed.
    """
    if kind.described:
        require_plugin(kind)
    job = _job(fn, args, kind, request)
    with tempfile.TemporaryDirectory(prefix="jremat-") as folder:
        (Path(folder) / "job").write_bytes(pickle.dumps(job))
        code = _in_process(folder, timeout_seconds, kind)
        answer = Path(folder) / "answer"
        if not answer.exists():
            line = last_error(Path(folder) / "stderr")
            raise CompileError("crashed", f"{kind.name}: the compiler's process {_ended(code)}: {line}")
        found = pickle.loads(answer.read_bytes())
    if isinstance(found, Exception):
        raise found
    paths = jax.tree_util.tree_flatten_with_path(args)[0]
    names = [jax.tree_util.keystr(path) for path, leaf in paths if is_array(leaf)]
    return dataclasses.replace(found, buffers=tuple(_as_here(buffer, names) for buffer in found.buffers))


def _as_here(buffer: Buffer, names: list[str]) -> Buffer:
    """A buffer's words without the wrapping that the other process adds."""
    what = buffer.what.replace("jit(call)/call_exported/jit(flat)/", "")
    if buffer.kind == "argument" and (match := re.fullmatch(r"args\[(\d+)\]", what)):
        what = f"args{names[int(match[1])]}"
    return dataclasses.replace(buffer, what=what)


def _job(fn: Callable[..., Any], args: tuple[Any, ...], kind: Target, request: Mapping[str, Any]) -> Job:
    jitted, args = as_jitted(fn, args)
    leaves, tree = jax.tree.flatten(args)
    chosen = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def flat(*arrays: Any) -> list[Any]:
        given = dict(zip(chosen, arrays, strict=True))
        return jax.tree.leaves(jitted(*jax.tree.unflatten(tree, [given.get(i, leaf) for i, leaf in enumerate(leaves)])))

    shapes = tuple(_portable(leaves[i], kind) for i in chosen)
    platform = {"local": jax.default_backend()}.get(kind.platform, kind.platform)
    platform = "cuda" if platform == "gpu" else platform
    try:
        donated = _donated(jitted, args)
        program = export.export(
            jax.jit(flat),
            platforms=[platform],
            disabled_checks=[export.DisabledSafetyCheck.custom_call(name) for name in _KERNELS],
        )(*shapes)
    except (ValueError, NotImplementedError) as error:
        raise explained(error, kind) from error
    return Job(dataclasses.replace(program, _get_vjp=None), shapes, donated, kind, request)


def _portable(leaf: Any, kind: Target) -> jax.ShapeDtypeStruct:
    """The shape of ``leaf`` with its partition over a mesh that names no device."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
        if sharding.mesh.size != kind.num_devices:
            raise ValueError(f"args: a sharding over {sharding.mesh.size} devices, {kind.name} has {kind.num_devices}")
        mesh = jax.sharding.AbstractMesh(
            sharding.mesh.axis_sizes, sharding.mesh.axis_names, axis_types=sharding.mesh.axis_types
        )
        host = "pinned_host" if sharding.memory_kind == "pinned_host" else None
        sharding = jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=host)
    elif kind.num_devices > 1:
        mesh = jax.sharding.AbstractMesh((kind.num_devices,), ("devices",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    else:
        sharding = None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _donated(jitted: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Which arrays, counted among the arrays, the function gives up."""
    infos = jax.tree.leaves(jitted.trace(*args).args_info)
    return tuple(i for i, info in enumerate(infos) if info.donated)


def _in_process(folder: str, timeout_seconds: float, kind: Target) -> int:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # this process may hold the device's memory already
    if kind.described or kind.platform == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, "-m", "jremat.measure.worker", folder]
    code = run_logged(command, environment, Path(folder) / "stderr", timeout_seconds)
    if code is None:
        raise CompileError("timed_out", f"{kind.name}: the compile outran its {timeout_seconds:g} s and was stopped")
    return code


def _ended(code: int) -> str:
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def main(folder: str) -> None:
    """Read the job in ``folder``, compile it, leave the answer there."""
    job: Job = pickle.loads((Path(folder) / "job").read_bytes())
    answer: Any
    try:
        call = jax.jit(job.program.call, donate_argnums=job.donated)
        answer, _ = measured(lower(call, job.args, job.target), job.target, **job.request)
    except (CompileError, TargetError, ValueError) as error:
        answer = error.with_traceback(None)
        answer.__cause__ = None
    (Path(folder) / "answer").write_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
