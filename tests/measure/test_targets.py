import importlib.util
import subprocess
import sys

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jremat.measure import TargetError, devices, mesh, target, targets
from jremat.measure.descriptions import GPUS, describe, describe_local, dumped_description, parse


def test_described_targets():
    for name in ("a100", "h100", "h200", "b200"):
        kind = target(f"{name}x8")
        assert (kind.platform, kind.num_devices, kind.described, kind.chip.name) == ("cuda", 8, True, name)
        assert kind.label == f"compiled for {name}x8, not run"
        device = devices(name)[0]
        assert device.platform in ("gpu", "cuda")
    assert len(devices("h200x8")) == 8
    assert target("h200x8x4").num_devices == len(devices("h200x8x4")) == 32
    assert len({device.process_index for device in devices("h200x8x4")}) >= 4
    assert mesh("h200x8", data=4, model=2).shape == {"data": 4, "model": 2}


def test_targets_that_are_here():
    for name in ("cpu", "local"):
        kind = target(name)
        assert not kind.described
        assert kind.label == name
        assert kind.hbm_bytes is None
    assert devices("cpu") == tuple(jax.devices("cpu")[:1])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("h20", r"target: 'h20' is unknown; near: h200"),
        ("", r"target: '' is unknown"),
        ("h200x0", r"target: 'h200x0' asks for no device"),
        ("h200x8x0", r"target: 'h200x8x0' asks for no device"),
        ("cpux4x2", r"target: several hosts are described of GPUs alone, got 'cpux4x2'"),
        ("v5ex3", r"target: v5e comes in 1, 4, 8 chips of one host, got 3"),
        ("none.pbtxt", r"target: cannot read none.pbtxt: .*No such file"),
    ],
)
def test_mistakes(spec, message):
    with pytest.raises(ValueError, match=message):
        target(spec)


def test_more_devices_than_are_here():
    with pytest.raises(ValueError, match=r"needs 64 devices, here (is|are) \d+; set XLA_FLAGS="):
        devices("cpux64")
    with pytest.raises(ValueError, match=r"mesh: axes \{'data': 4\} take 4 devices, h200x8 has 8"):
        mesh("h200x8", data=4)


def test_a_description_from_a_file(tmp_path):
    path = tmp_path / "mine.pbtxt"
    path.write_text(describe(GPUS["h100"]))
    kind = target(path)
    assert (kind.name, kind.platform, kind.hbm_bytes) == ("mine", "cuda", GPUS["h100"].memory_bytes)
    assert kind.chip.name == "h100"
    assert target(f"{path}x4").num_devices == 4
    assert devices(kind)[0].device_kind == GPUS["h100"].kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu_device_info {", r"is no description in XLA's text form: line 1: 'gpu_device_info \{' is never closed"),
        ("gpu_device_info { core_count: 1 }", r"lacks gpu_device_info's device_memory_size"),
        ('{"core_count": 1}', r"is no description .* line 1: expected a field's name, got '\{'"),
        ("", r"lacks gpu_device_info's core_count and device_memory_size"),
    ],
)
def test_a_file_that_is_no_description(tmp_path, text, message):
    path = tmp_path / "bad.pbtxt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        target(path)


def test_a_description_that_xla_refuses(tmp_path):
    path = tmp_path / "bad.pbtxt"
    path.write_text("gpu_device_info { core_count: 1 device_memory_size: 1 no_such_field: 3 }")
    with pytest.raises(TargetError, match="bad: XLA does not take this description"):
        devices(path)


def test_every_description_reads_back():
    for name, gpu in GPUS.items():
        info = parse(describe(gpu))["gpu_device_info"]
        assert (info["core_count"], info["device_memory_size"]) == (gpu.cores, gpu.memory_bytes), name


_scalars = st.one_of(st.integers(-(10**9), 10**9), st.sampled_from(["ON", "off_1"]), st.just(1.5))
_messages = st.recursive(
    st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), _scalars, max_size=4),
    lambda inner: st.dictionaries(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.one_of(_scalars, inner), max_size=4
    ),
    max_leaves=12,
)


@given(_messages)
def test_text_form_reads_back(message):
    def written(m):
        return " ".join(f"{k} {{ {written(v)} }}" if isinstance(v, dict) else f"{k}: {v}" for k, v in m.items())

    assert parse(written(message)) == message


@given(st.text(alphabet='ab:{}" \n1', max_size=30))
def test_any_text_is_read_or_refused(text):
    try:
        assert isinstance(parse(text), dict)
    except ValueError as error:
        assert str(error).startswith("line ")


def test_description_of_the_gpu_that_is_here(tmp_path):
    with pytest.raises(ValueError, match=r"expected an NVIDIA GPU as the default device, got 'cpu'"):
        describe_local()
    # A described GPU's compile leaves the same file as a real one's.
    where = jax.sharding.SingleDeviceSharding(devices("h200")[0])
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), "float32", sharding=where))
    lowered.compile(compiler_options={"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True})
    info = parse(dumped_description(tmp_path))["gpu_device_info"]
    assert info["core_count"] == GPUS["h200"].cores


def test_the_command_that_writes_a_description_is_one_line_without_a_gpu():
    said = subprocess.run(
        [sys.executable, "-m", "jremat.measure.descriptions"], capture_output=True, text=True, check=False
    )
    assert said.returncode == 2
    assert said.stderr.splitlines()[-1].startswith("descriptions: error: describe_local: expected an NVIDIA GPU")
    assert said.stdout == ""


def test_a_missing_plugin_names_its_pip_line(monkeypatch):
    monkeypatch.setattr(targets, "_exists", lambda module: False)
    jaxlib = jax.lib.__version__
    with pytest.raises(
        TargetError, match=rf"pip install --no-deps jax-cuda12-plugin=={jaxlib} jax-cuda12-pjrt=={jaxlib}"
    ):
        devices("h200")
    with pytest.raises(TargetError, match=r"v5e: libtpu is missing; pip install --no-deps 'libtpu==0\.0\.\d+\.\*'"):
        devices("v5e")


def test_a_plugin_of_another_version(monkeypatch):
    version = targets._version
    monkeypatch.setattr(targets, "_version", lambda name: "0.1.0" if name.endswith("plugin") else version(name))
    with pytest.raises(TargetError, match=r"the CUDA plugin is 0\.1\.0, jaxlib is .*pip install --no-deps"):
        devices("h200")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_described_tpus():
    assert len(devices("v5ex8")) == 8


def test_importing_starts_no_backend():
    code = "import jremat.measure; from jax._src import xla_bridge; print(len(xla_bridge._backends))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "0"
