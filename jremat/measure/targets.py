"""Devices to compile for: the ones that are here, and described ones that are not.

XLA compiles for a *described* device with no driver and no hardware, and its memory figures for the program are then
those of that device. Nothing runs there and nothing is autotuned, so such figures are "compiled for h200, not run".
"""

import dataclasses
import difflib
import functools
import importlib.metadata
import importlib.util
import math
import os
import re
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies

from jremat.estimator.hardware import CHIPS, Chip, chip_of
from jremat.measure.descriptions import GPUS, describe, parse
from jremat.policy.shown import human


class TargetError(RuntimeError):
    """A target that cannot be compiled for here; the message holds the cure."""


class BackendTooEarly(TargetError):
    """The CUDA plugin refused to register when this process's first backend started; another process can do it."""


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of device, and how many of it.

    Attributes:
        name: as the user spells it, ``h200x8`` or ``h200x8x64``.
        platform: JAX's platform: ``cpu``, ``cuda``, ``tpu``; ``local`` for the default backend, whatever it is.
        num_devices: of all hosts together.
        description: XLA's text for a GPU, the topology's name for a TPU, nothing for devices that are here.
        chip: its row in the table of chips, or None.
        hbm_bytes: device memory that a program may use, or None where that is unknown or means nothing (cpu).
        num_hosts: that have the devices, as many each; more than one of described GPUs alone.
    """

    name: str
    platform: str
    num_devices: int = 1
    description: str = ""
    chip: Chip | None = None
    hbm_bytes: int | None = None
    num_hosts: int = 1

    @property
    def described(self) -> bool:
        """Whether the device is described, not held."""
        return bool(self.description)

    @property
    def label(self) -> str:
        """What stands beside figures of this target.

        >>> target("h200x8").label
        'compiled for h200x8, not run'
        """
        return f"compiled for {self.name}, not run" if self.described else self.name

    def __str__(self) -> str:
        devices = f"{self.num_devices} device{'s' * (self.num_devices != 1)}"
        size = f" of {human(self.hbm_bytes)}" if self.hbm_bytes else ""
        return f"{self.name}: {self.platform}, {devices}{size}, {'described' if self.described else 'here'}"

    __repr__ = __str__


# The smallest topologies of one host or less, by number of chips: cloud.google.com/tpu/docs, "configurations".
_TPU_TOPOLOGIES = {
    "v5e": {1: "v5e:2x2", 4: "v5e:2x2", 8: "v5e:2x4"},
    "v5p": {1: "v5p:2x2x1", 4: "v5p:2x2x1", 8: "v5p:2x2x2"},
    "v6e": {1: "v6e:2x2", 4: "v6e:2x2", 8: "v6e:2x4"},
}

NAMES = ("cpu", "local", *GPUS, *_TPU_TOPOLOGIES)
"""What ``target`` understands; each also with a count, as in ``h200x8``."""


def target(spec: "str | Target | Path") -> Target:
    """The target of that name, or of a description's file.

    Args:
        spec: one of ``NAMES``, with ``xN`` for N devices of one host, for GPUs also ``xNxM`` for N on each of M hosts;
            or a path (``Path``, or a string that ends in
            ``.pbtxt`` or ``.textproto`` or has a folder in it, also with ``xN``) of a description in XLA's text form;
            a ``Target`` is itself.

    Raises:
        ValueError: an unknown name (near ones are listed), a count that the kind does not come in, a file that is
            missing or no description.

    >>> target("h200x8").num_devices, target("h200x8").platform
    (8, 'cuda')
    >>> target("h20")
    Traceback (most recent call last):
    ...
    ValueError: target: 'h20' is unknown; near: h200, h100, b200; known: cpu, local, a100, h100, h200, b200, v5e, v5p, \
v6e, each also as NAMExCOUNT, or a file.pbtxt
    """
    if isinstance(spec, Target):
        return spec
    text = str(spec)
    base, count, hosts = _split(text)
    if isinstance(spec, Path) or base.endswith((".pbtxt", ".textproto")) or os.sep in base:
        return _from_file(Path(base), count, hosts)
    if base not in NAMES:
        near = difflib.get_close_matches(base, NAMES, cutoff=0.5)
        hint = f"near: {', '.join(near)}; " if near else ""
        raise ValueError(
            f"target: {text!r} is unknown; {hint}known: {', '.join(NAMES)}, each also as NAMExCOUNT, or a file.pbtxt"
        )
    if base in GPUS:
        chip = CHIPS[base]
        return Target(text, "cuda", count * hosts, describe(GPUS[base]), chip, chip.hbm_bytes, hosts)
    if hosts > 1:
        raise ValueError(f"target: several hosts are described of GPUs alone, got {text!r}")
    if base in _TPU_TOPOLOGIES:
        sizes = _TPU_TOPOLOGIES[base]
        if count not in sizes:
            raise ValueError(f"target: {base} comes in {', '.join(map(str, sizes))} chips of one host, got {count}")
        return Target(text, "tpu", count, sizes[count], CHIPS[base], CHIPS[base].hbm_bytes)
    return Target(text, base, count)


def devices(spec: "str | Target | Path") -> tuple[jax.Device, ...]:
    """The devices of a target, to build meshes and shardings for ``ShapeDtypeStruct``s from.

    Raises:
        ValueError: as ``target``; more devices than are here.
        TargetError: the plugin that compiles for it is missing: the message has the pip line.
        BackendTooEarly: this process's backend started before the CUDA plugin could register. Set
            ``JAX_PLATFORMS=cpu`` or ``JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1`` before it starts; ``memory`` itself then
            works anyway, in a process of its own.
    """
    kind = target(spec)
    if not kind.described:
        here = tuple(jax.devices() if kind.platform == "local" else jax.devices(kind.platform))
        if len(here) < kind.num_devices:
            cure = f"; set XLA_FLAGS=--xla_force_host_platform_device_count={kind.num_devices}, before JAX starts"
            raise ValueError(
                f"target: {kind.name} needs {kind.num_devices} devices, here {'is' if len(here) == 1 else 'are'} "
                f"{len(here)}{cure if here[0].platform == 'cpu' else ''}"
            )
        return here[: kind.num_devices]
    require_plugin(kind)
    for name, value in _environment(kind).items():
        os.environ.setdefault(name, value)
    return _described(kind)


@functools.cache  # a mesh of a target's devices must hold the very devices that a program is compiled for
def _described(kind: Target) -> tuple[jax.Device, ...]:
    try:
        if kind.platform == "tpu":
            described = topologies.get_topology_desc(platform="tpu", topology_name=kind.description)
        else:
            described = topologies.get_topology_desc(
                platform="cuda",
                target_config=kind.description,
                topology=f"{kind.num_hosts}x{kind.num_devices // kind.num_hosts}x1",
            )
    except NotImplementedError as error:
        raise BackendTooEarly(
            f"{kind.name}: this process started its backend before the {kind.platform} plugin could register; set "
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 or JAX_PLATFORMS=cpu before it starts"
        ) from error
    except Exception as error:  # XLA's own types differ by version
        raise TargetError(f"{kind.name}: XLA does not take this description: {_first_line(error)}") from error
    return tuple(described.devices[: kind.num_devices])


def mesh(spec: "str | Target | Path", **axes: int) -> jax.sharding.Mesh:
    """A mesh over a target's devices, for the shardings in a program that is compiled for it.

    Args:
        spec: see ``target``.
        axes: their sizes by name, as in ``mesh("h200x8", data=4, model=2)``.

    Returns:
        For ``NamedSharding``, ``with_sharding_constraint``, ``jax.shard_map`` and ``jax.set_mesh``. A mesh of other
        devices, e.g. of those that are here, is refused when the program is compiled; a ``jax.sharding.AbstractMesh``
        names no devices and serves every target.

    Raises:
        ValueError: the axes' product is not the number of devices; and as ``devices``.
    """
    kind = target(spec)
    if math.prod(axes.values()) != kind.num_devices:
        raise ValueError(
            f"mesh: axes {axes} take {math.prod(axes.values())} devices, {kind.name} has {kind.num_devices}"
        )
    return jax.sharding.Mesh(np.array(devices(kind)).reshape(tuple(axes.values())), tuple(axes))


def require_plugin(kind: Target) -> None:
    """Nothing, where what compiles for ``kind`` is installed.

    Raises:
        TargetError: it is not; the message has the pip line.
    """
    if kind.platform == "cuda":
        found = [module for module in ("xla_cuda12", "xla_cuda13") if _exists(f"jax_plugins.{module}")]
        if not found:
            raise TargetError(f"{kind.name}: the CUDA plugin is missing; {pip_line('cuda')}")
        plugin, jaxlib = _version(f"jax-{found[0][4:]}-plugin"), _version("jaxlib")
        if plugin and plugin != jaxlib:
            raise TargetError(f"{kind.name}: the CUDA plugin is {plugin}, jaxlib is {jaxlib}; {pip_line('cuda')}")
    if kind.platform == "tpu" and not _exists("libtpu"):
        raise TargetError(f"{kind.name}: libtpu is missing; {pip_line('tpu')}")


def pip_line(what: str) -> str:
    """The command that brings ``cuda``, ``cudnn`` or ``tpu`` for the JAX that is installed.

    ``--no-deps`` leaves out the CUDA libraries (gigabytes), which compiling needs none of.

    >>> pip_line("cudnn")
    'pip install --no-deps nvidia-cudnn-cu12'
    """
    jaxlib = _version("jaxlib")
    if what == "cuda":
        return f"pip install --no-deps jax-cuda12-plugin=={jaxlib} jax-cuda12-pjrt=={jaxlib} nvidia-cuda-nvcc-cu12"
    if what == "cudnn":
        return "pip install --no-deps nvidia-cudnn-cu12"
    wanted = [r for r in importlib.metadata.requires("jax") or () if r.startswith("libtpu")]
    return f"pip install --no-deps '{wanted[0].split(';')[0].strip() if wanted else 'libtpu'}'"


def _environment(kind: Target) -> dict[str, str]:
    """What the plugin of a described target must find in the environment when it registers or loads."""
    if kind.platform == "cuda":
        # Read when the plugin registers, before the first backend starts, and of no effect after. Without it the
        # plugin refuses to register where the CUDA libraries are missing, and there are no topologies then.
        return {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    if any(Path("/dev").glob("accel*")):
        return {}  # a real TPU: leave its library's settings alone
    # Without these libtpu waits for a metadata server that is not there, and lets one process in at a time.
    return {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}


def _from_file(path: Path, count: int, hosts: int) -> Target:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"target: cannot read {path}: {_first_line(error)}") from error
    try:
        message = parse(text)
    except ValueError as error:
        raise ValueError(f"target: {path} is no description in XLA's text form: {error}") from error
    info = message.get("gpu_device_info")
    missing = [f for f in ("core_count", "device_memory_size") if not isinstance(info, dict) or f not in info]
    if missing or not isinstance(info, dict):
        raise ValueError(f"target: {path} lacks gpu_device_info's {' and '.join(missing)}")
    chip = chip_of(str(message.get("device_description_str", "")))
    name = path.stem + (f"x{count}x{hosts}" if hosts > 1 else f"x{count}" if count > 1 else "")
    return Target(name, "cuda", count * hosts, text, chip, info["device_memory_size"], hosts)


def _split(text: str) -> tuple[str, int, int]:
    """Kind, devices of a host, and hosts.

    >>> _split("h200"), _split("h200x8"), _split("h200x8x64")
    (('h200', 1, 1), ('h200', 8, 1), ('h200', 8, 64))
    """
    match = re.fullmatch(r"(.+?)x(\d+)(?:x(\d+))?", text)
    if not match:
        return text, 1, 1
    count, hosts = int(match[2]), int(match[3] or 1)
    if not count * hosts:
        raise ValueError(f"target: {text!r} asks for no device")
    return match[1], count, hosts


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
