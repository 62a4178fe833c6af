"""GPUs as XLA describes them: the text that lets it compile for a device that is not here.

XLA reads a ``GpuTargetConfigProto`` in text form. The rows below hold what differs between the chips; the rest is the
same on all of them. A description from a real GPU is better than ours and is used the same way; on that machine

    python -m jremat.measure.descriptions > mine.pbtxt

writes it, and ``target="mine.pbtxt"`` compiles for that GPU anywhere.
"""

import dataclasses
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The numbers of one GPU that XLA's compiler asks for (``DeviceDescription`` in its stream executor).

    Attributes:
        kind: the device's name as the driver gives it.
        capability: compute capability, major and minor.
        accelerated: whether the ``a`` features of that capability exist (sm_90a, sm_100a: warp-group matmul).
        cores: streaming multiprocessors.
        memory_bytes, memory_bytes_per_second: device memory.
        clock_ghz: boost clock.
        l2_bytes: second-level cache.
        shared_bytes_per_core, shared_bytes_per_block: shared memory, the second with opt-in.
        fpus_per_core: float32 lanes.
    """

    kind: str
    capability: tuple[int, int]
    accelerated: bool
    cores: int
    memory_bytes: int
    memory_bytes_per_second: int
    clock_ghz: float
    l2_bytes: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    fpus_per_core: int


# Compute capabilities and limits: CUDA C++ programming guide, table "technical specifications per compute capability";
# cores, clocks and memory: NVIDIA's architecture papers of the three generations.
GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), False, 108, 85_100_068_864, 2_039_040_000_000, 1.41,
                41_943_040, 167_936, 166_912, 64),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), True, 132, 84_942_979_072, 3_352_320_000_000, 1.98,
                52_428_800, 233_472, 232_448, 128),
    "h200": Gpu("NVIDIA H200", (9, 0), True, 132, 151_397_597_184, 4_800_000_000_000, 1.98,
                52_428_800, 233_472, 232_448, 128),
    "b200": Gpu("NVIDIA B200", (10, 0), True, 148, 191_514_411_008, 7_672_320_000_000, 1.965,
                132_644_864, 233_472, 232_448, 128),
}  # fmt: skip


def describe(gpu: Gpu) -> str:
    """The description of ``gpu`` in XLA's text form.

    >>> parse(describe(GPUS["h200"]))["gpu_device_info"]["core_count"]
    132
    """
    major, minor = gpu.capability
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {gpu.shared_bytes_per_block}
  shared_memory_per_core: {gpu.shared_bytes_per_core}
  core_count: {gpu.cores} fpus_per_core: {gpu.fpus_per_core} clock_rate_ghz: {gpu.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {gpu.memory_bytes_per_second} l2_cache_size: {gpu.l2_bytes} device_memory_size: {gpu.memory_bytes}
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: {"ACCELERATED_FEATURES" if gpu.accelerated else "NONE"}
  }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{gpu.kind}"
"""


def describe_local() -> str:
    """The description of the GPU that this process holds, as XLA wrote it; save it and compile for it anywhere.

    XLA leaves the description beside each program that it is asked to dump, so a program of one addition is compiled.

    Raises:
        ValueError: the default device is no NVIDIA GPU.
    """
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        raise ValueError(f"describe_local: expected an NVIDIA GPU as the default device, got {device.device_kind!r}")
    with tempfile.TemporaryDirectory() as folder:
        lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros((), jnp.float32))
        lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        return dumped_description(Path(folder))


def dumped_description(folder: Path) -> str:
    """The description among the files that XLA dumped into ``folder``.

    Raises:
        ValueError: there is none.
    """
    found = sorted(folder.glob("*gpu_target_config.pbtxt"))
    if not found:
        raise ValueError("describe_local: XLA dumped no description; is this an NVIDIA GPU?")
    return found[0].read_text()


def parse(text: str) -> dict[str, Any]:
    """Protobuf's text form as nested dicts: enough of it for a target description.

    Raises:
        ValueError: the text is not of that form; the line is named.

    >>> parse('a { b: 1 c: "x" } d: NONE')
    {'a': {'b': 1, 'c': 'x'}, 'd': 'NONE'}
    >>> parse("a { b: }")
    Traceback (most recent call last):
    ...
    ValueError: line 1: expected a value after 'b:', got '}'
    """
    tokens = [(m.group(), text.count("\n", 0, m.start()) + 1) for m in _TOKEN.finditer(_COMMENT.sub("", text))]
    tokens.append(("", text.count("\n") + 1))
    message, at = _message(tokens, 0)
    token, line = tokens[at]
    if token:
        raise ValueError(f"line {line}: unexpected {token!r}")
    return message


_COMMENT = re.compile(r"#[^\n]*")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}:;,]|[^\s{}:;,"]+|"')
_KEY = re.compile(r"[A-Za-z_]\w*\Z")
_VALUE = re.compile(r'"|[\w.+-]+\Z')


def _message(tokens: list[tuple[str, int]], at: int) -> tuple[dict[str, Any], int]:
    message: dict[str, Any] = {}
    while tokens[at][0] not in ("}", ""):
        key, line = tokens[at]
        if key in (";", ","):
            at += 1
            continue
        if not _KEY.match(key):
            raise ValueError(f"line {line}: expected a field's name, got {key!r}")
        at += 1
        if tokens[at][0] == ":":
            at += 1
            if tokens[at][0] != "{":
                token, line = tokens[at]
                if not _VALUE.match(token) or token == '"':
                    raise ValueError(f"line {line}: expected a value after '{key}:', got {token!r}")
                message[key] = _scalar(token)
                at += 1
                continue
        token, line = tokens[at]
        if token != "{":
            raise ValueError(f"line {line}: expected ':' or '{{' after {key!r}, got {token!r}")
        message[key], at = _message(tokens, at + 1)
        token, line = tokens[at]
        if token != "}":
            raise ValueError(f"line {line}: '{key} {{' is never closed")
        at += 1
    return message, at


def _scalar(token: str) -> str | int | float:
    if token.startswith('"'):
        return token[1:-1]
    for kind in (int, float):
        try:
            return kind(token)
        except ValueError:
            pass
    return token


if __name__ == "__main__":
    try:
        print(describe_local(), end="")
    except ValueError as error:
        print(f"descriptions: error: {error}", file=sys.stderr)
        sys.exit(2)
