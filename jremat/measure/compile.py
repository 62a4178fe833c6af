"""A function compiled for a target, in this process."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jremat.graph.arguments import take_apart
from jremat.jax_internals import no_compilation_cache
from jremat.measure.targets import Target, TargetError, devices, pip_line


class CompileError(RuntimeError):
    """A compile that gave no program.

    Attributes:
        reason: ``failed``, ``out_of_memory`` (XLA itself says that the program does not fit), ``crashed`` (the
            compiler took its process with it) or ``timed_out``.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)  # both, so that it survives a pickle
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[1])


def lower(fn: Callable[..., Any], args: tuple[Any, ...], kind: Target) -> jax.stages.Lowered:
    """``fn`` lowered for ``kind``: arrays and shapes in ``args`` are placed on the target's devices.

    An argument with a ``NamedSharding`` keeps its partition and gets the target's devices for its mesh, so that a mesh
    without devices (``jax.sharding.AbstractMesh``) or of other devices will do. Without one it lies on the device, or
    is replicated where there are several. A ``pinned_host`` memory kind is kept. What is no array (a static argument, a
    number) passes through; of a function that isn't jitted, it is held fixed as ``jremat.checkpoint`` does.

    Raises:
        ValueError: a sharding over another number of devices than the target has; a mesh in ``fn`` or a context mesh
            (``jax.set_mesh``) of other devices than the target's.
    """
    here = devices(kind)
    placed = jax.tree.map(lambda leaf: place(leaf, here), args)
    jitted, placed = as_jitted(fn, placed)
    with _of_this_target(kind), take_apart(fn, args, {}).naming_parameters():
        if not kind.described:
            return jitted.lower(*placed)
        lowered = lambda traced: traced.lower(lowering_platforms=(kind.platform,))  # by name: "gpu" is what is here
        traced = jitted.trace(*placed)
        with _on_mesh_of(placed, here):
            try:
                return lowered(traced)
            except RuntimeError as error:  # jax 0.12 lowers each operation on the mesh that it was traced on
                if "AbstractDevice" not in str(error):
                    raise
                return lowered(jitted.trace(*placed))


@contextlib.contextmanager
def _of_this_target(kind: Target) -> Iterator[None]:
    """Turn JAX's error about a mesh of other devices into one that names the mesh to use."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        if not any(words in message for words in _OTHER_DEVICES):
            raise
        found = re.search(r"(sharding_constraint|shard_map)\b.*? at (\S+)", message)
        what = f"{found[1]} at {found[2]} has" if found else "the program or jax.set_mesh has"
        raise ValueError(
            f"fn: {what} a mesh of other devices than those of target {kind.name!r}; expected one "
            f"without devices, jax.sharding.AbstractMesh, or of the target's, such as "
            f"jremat.measure.mesh({kind.name!r}, data={kind.num_devices})"
        ) from error


_OTHER_DEVICES = "Received incompatible devices", "should match the mesh passed to"


def as_jitted(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """``fn`` under ``jax.jit``, and what to give it: what is no array is held fixed, unless it is jitted already.

    Another library's jit, such as Equinox's, is traced into ours, and what it would donate counts as kept.
    """
    if hasattr(fn, "lower") and hasattr(fn, "trace"):
        return fn, args
    call = take_apart(fn, args, {})
    return (jax.jit(fn), args) if all(call.traced) else (jax.jit(call.over_arrays(call.call)), call.to_trace()[0])


def compiled(
    lowered: jax.stages.Lowered, kind: Target, *, xla_remat: bool, compiler_options: Mapping[str, Any]
) -> jax.stages.Compiled:
    """``lowered`` compiled, with XLA's own rematerialization pass off unless asked for.

    Raises:
        CompileError: XLA refuses; the message is its first line, with the size where it ran out of memory.
    """
    with _xla_remat(xla_remat), no_compilation_cache():
        try:
            return lowered.compile(compiler_options=dict(compiler_options) or None)
        except Exception as error:  # XLA's own types differ by version
            raise explained(error, kind) from error


def explained(error: Exception, kind: Target) -> CompileError:
    """An error of XLA's as one line, with the cure where it is known."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    message = lines[0].removeprefix("INTERNAL: ").strip()[:300]
    everything = str(error).lower()
    if "resource_exhausted" in everything or "out of memory" in everything:
        room = f" ({kind.hbm_bytes / 2**30:.1f} GiB)" if kind.hbm_bytes else ""
        return CompileError("out_of_memory", f"{kind.name}: the program does not fit the device{room}: {message}")
    if "cudnn" in everything:
        return CompileError("failed", f"{kind.name}: {message}; is cuDNN here? {pip_line('cudnn')}")
    if any(word in everything for word in ("libdevice", "ptxas", "nvlink")):
        return CompileError("failed", f"{kind.name}: {message}; is the CUDA compiler here? {pip_line('cuda')}")
    return CompileError("failed", f"{kind.name}: compile failed: {message}")


def is_array(leaf: Any) -> bool:
    """Whether an argument's leaf is an array or the shape of one, not a static value or a number."""
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def place(leaf: Any, here: tuple[jax.Device, ...]) -> Any:
    """The shape of ``leaf`` with its sharding on the devices ``here``; what is no array as it is."""
    if not is_array(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_moved(getattr(leaf, "sharding", None), here))


def _moved(sharding: Any, here: tuple[jax.Device, ...]) -> jax.sharding.Sharding:
    host = "pinned_host" if getattr(sharding, "memory_kind", None) == "pinned_host" else None
    if isinstance(sharding, jax.sharding.NamedSharding):
        old = sharding.mesh
        if old.size != len(here):
            raise ValueError(f"args: a sharding over {old.size} devices, the target has {len(here)}")
        new = jax.sharding.Mesh(np.array(here).reshape(old.axis_sizes), old.axis_names, axis_types=old.axis_types)
        return jax.sharding.NamedSharding(new, sharding.spec, memory_kind=host)
    if sharding is not None and len(sharding.device_set) not in (1, len(here)):
        raise ValueError(f"args: a sharding over {len(sharding.device_set)} devices, the target has {len(here)}")
    if len(here) == 1:
        return jax.sharding.SingleDeviceSharding(here[0], memory_kind=host)
    return jax.sharding.NamedSharding(_flat(here), jax.sharding.PartitionSpec(), memory_kind=host)


def _flat(here: tuple[jax.Device, ...]) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(here), ("devices",))


@contextlib.contextmanager
def _on_mesh_of(placed: Any, here: tuple[jax.Device, ...]) -> Iterator[None]:
    """A mesh without devices that knows their kind, unless the caller has set a mesh.

    Lowering rules that ask which GPU they are for (Pallas') find it there; otherwise they ask the backend, which here
    is a CPU.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        yield
        return
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(placed)]
    meshes = [s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding)]
    with jax.sharding.use_abstract_mesh((meshes[0] if meshes else _flat(here)).abstract_mesh):
        yield


@contextlib.contextmanager
def _xla_remat(on: bool) -> Iterator[None]:
    """XLA's rematerialization pass on or off for the compiles inside."""
    before = getattr(jax.config, _XLA_REMAT)
    jax.config.update(_XLA_REMAT, on)
    try:
        yield
    finally:
        jax.config.update(_XLA_REMAT, before)


_XLA_REMAT = "jax_compiler_enable_remat_pass"


__all__ = ["CompileError", "TargetError", "as_jitted", "compiled", "explained", "is_array", "lower", "place"]
