import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import measured_stack as stack
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jremat.graph.flops import flops
from jremat.measure import CompileError, TargetError, check_memory, compiled_memory, target
from jremat.measure.compile import explained
from jremat.measure.descriptions import GPUS, describe
from jremat.policy.names import tag


def figures(found):
    return found.temp_bytes, found.argument_bytes, found.output_bytes, found.alias_bytes, found.host_bytes


def test_equals_jaxs_own_figures(on_h200):
    """Against JAX alone, none of our placing, lowering or flags' handling in between."""
    text = describe(GPUS["h200"])
    (device,) = topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x1").devices
    where = jax.sharding.SingleDeviceSharding(device)
    args = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), stack.shapes())
    jax.config.update("jax_compiler_enable_remat_pass", False)
    try:
        m = stack.step("full").lower(*args).compile().memory_analysis()
    finally:
        jax.config.update("jax_compiler_enable_remat_pass", True)
    found = on_h200["full"]
    assert figures(found) == (m.temp_size_in_bytes, m.argument_size_in_bytes, m.output_size_in_bytes, 0, 0)
    assert found.peak_bytes == m.temp_size_in_bytes + m.argument_size_in_bytes + m.output_size_in_bytes


def test_arguments_and_results_by_hand(on_h200):
    params = 2 * stack.LAYERS * stack.HIDDEN * 4 * stack.HIDDEN * 2
    x = stack.BATCH * stack.SEQ * stack.HIDDEN * 2
    assert on_h200["full"].argument_bytes == params + x
    assert on_h200["full"].output_bytes == pytest.approx(params, abs=256)  # and a scalar, and the tuple of them


def test_keeping_a_tensor_costs_its_bytes(on_h200):
    more = on_h200["keep_up"].temp_bytes - on_h200["full"].temp_bytes
    assert stack.UP_BYTES * 0.7 <= more <= stack.UP_BYTES * 1.05  # full remat holds one layer's copy for a while


def test_offloaded_bytes_are_host_bytes_on_a_gpu(on_h200):
    assert on_h200["keep_up"].host_bytes == 0
    assert on_h200["offload_up"].host_bytes == stack.UP_BYTES
    assert on_h200["offload_up"].peak_bytes <= on_h200["keep_up"].peak_bytes - stack.UP_BYTES / 2


def test_offload_shows_nothing_on_a_cpu_and_says_so():
    with pytest.warns(UserWarning, match="a CPU has one memory only.*target='h200'"):
        found = compiled_memory(stack.step("offload_up"), *stack.shapes(), target="cpu")
    assert found.host_bytes == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled_memory(stack.step("keep_up"), *stack.shapes(), target="cpu")


def test_peak_on_a_cpu_counts_the_temporaries():
    found = compiled_memory(stack.step("keep_up"), *stack.shapes(), target="cpu")
    m = stack.step("keep_up").lower(*stack.shapes()).compile().memory_analysis()
    # The fact that makes our own sum necessary; where it stops being one, JAX's figure can be used.
    assert m.peak_memory_in_bytes < found.peak_bytes - found.temp_bytes / 2
    assert found.temp_bytes > stack.UP_BYTES
    assert found.peak_bytes == found.temp_bytes + found.argument_bytes + found.output_bytes - found.alias_bytes


def test_arrays_and_shapes_give_the_same():
    arrays = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), stack.shapes())
    numpy = jax.tree.map(np.asarray, arrays)
    want = figures(compiled_memory(stack.step("full"), *stack.shapes(), target="cpu"))
    assert figures(compiled_memory(stack.step("full"), *arrays, target="cpu")) == want
    assert figures(compiled_memory(stack.step("full"), *numpy, target="cpu")) == want
    assert figures(compiled_memory(lambda p, x: stack.step("full")(p, x), *stack.shapes(), target="cpu")) == want


@pytest.mark.parametrize("apart", [{}, {"timeout_seconds": 120}], ids=["here", "worker"])
def test_donated_arguments_are_aliased(apart):
    add = jax.jit(lambda n, state, x, key: ({"w": state["w"] + n * x}, key), static_argnums=0, donate_argnums=1)
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    found = compiled_memory(add, 3, {"w": w}, w, jax.random.key(0), target="cpu", **apart)
    assert found.alias_bytes == w.size * 4
    assert found.argument_bytes == 2 * w.size * 4 + 8  # the key's two words
    assert found.peak_bytes < 2.1 * w.size * 4


def test_a_worker_gives_the_same_figures(on_h200):
    found = compiled_memory(stack.step("keep_up"), *stack.shapes(), target="h200", timeout_seconds=120)
    here = on_h200["keep_up"]
    assert figures(found) == figures(here)
    wide = lambda m: [(b.nbytes, b.kind, b.shape, b.tag) for b in m.buffers if b.nbytes > stack.UP_BYTES // 8]
    assert wide(found) == wide(here)
    names = {b.what for b in found.buffers if b.kind == "argument"}
    assert names >= {"args[0]['up']", "args[0]['down']"}


def test_works_where_the_backend_started_first(on_h200):
    """The CUDA plugin has refused to register by then, so topologies are closed to this process for good."""
    code = (
        "import jax; jax.devices(); import json, measured_stack as s; from jremat.measure import compiled_memory; "
        "print(json.dumps(compiled_memory(s.step('keep_up'), *s.shapes(), target='h200').to_dict()))"
    )
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    plain["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    said = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True, check=True)
    found = json.loads(said.stdout.splitlines()[-1])
    assert found["peak_bytes"] == on_h200["keep_up"].peak_bytes


def test_largest_buffers_bear_the_users_line_and_tag(on_h200):
    largest = on_h200["keep_up"].buffers[0]
    assert largest.nbytes == stack.UP_BYTES
    assert largest.shape == (stack.LAYERS, stack.BATCH, stack.SEQ, 4 * stack.HIDDEN)
    assert (largest.kind, largest.dtype, largest.tag) == ("temp", "bfloat16", "mlp_up")
    line = next(n for n, text in enumerate(Path(stack.__file__).read_text().splitlines(), 1) if "tag(x @" in text)
    assert largest.source == f"measured_stack.py:{line} (block)"
    assert not any(b.tag == "mlp_up" and not b.recomputed for b in on_h200["full"].buffers)
    assert not any(b.nbytes >= stack.UP_BYTES for b in on_h200["offload_up"].buffers)


def test_one_line_that_makes_two_tensors():
    """Where line and size are shared, the path of scopes tells which is which, or both names are given."""

    def tags(scopes):
        def two(x, w):
            made = []
            for name, scope in zip(("left", "right"), scopes, strict=True):
                with jax.named_scope(scope):
                    made.append(tag(x @ w[name], name))
            return jnp.sort(made[0]) @ jnp.sort(made[1])  # both are alive at once, each in a buffer of its own

        x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        return {b.tag for b in compiled_memory(two, x, {"left": x, "right": x}, target="cpu").buffers}

    assert {"left", "right"} <= tags(("left", "right"))
    assert "left or right" in tags(("same", "same"))


def test_buffers_are_largest_first_and_as_many_as_asked():
    found = compiled_memory(stack.step("full"), *stack.shapes(), target="cpu", num_buffers=3)
    sizes = [b.nbytes for b in found.buffers]
    assert len(sizes) == 3
    assert sizes == sorted(sizes, reverse=True)
    assert compiled_memory(stack.step("full"), *stack.shapes(), target="cpu", num_buffers=0).buffers == ()


def test_sharded_over_eight_described_gpus(on_h200):
    mesh = AbstractMesh((8,), ("data",))
    params, x = stack.shapes()
    by = lambda s, spec: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec))
    params = jax.tree.map(lambda s: by(s, P(None, "data")), params)
    x = by(jax.ShapeDtypeStruct((8, *x.shape[1:]), x.dtype), P("data"))
    found = compiled_memory(stack.step("full"), params, x, target="h200x8")
    one = on_h200["full"].argument_bytes
    assert found.argument_bytes == one // 8 + x.size * 2 // 8 - stack.BATCH * stack.SEQ * stack.HIDDEN * 2 // 8
    assert found.total_peak_bytes == 8 * found.peak_bytes
    with pytest.raises(ValueError, match="args: a sharding over 8 devices, the target has 1"):
        compiled_memory(stack.step("full"), params, x, target="h200")
    with pytest.raises(ValueError, match="args: a sharding over 8 devices, h200x4 has 4"):
        compiled_memory(stack.step("full"), params, x, target="h200x4", timeout_seconds=60)


def test_replicated_without_shardings():
    found = compiled_memory(lambda x: x + 1, jax.ShapeDtypeStruct((1024,), jnp.float32), target="cpux8")
    assert found.argument_bytes == 4096
    assert found.total_peak_bytes == 8 * found.peak_bytes


def test_xlas_own_remat_is_off_unless_asked_for(on_h200):
    assert on_h200["full"].flags["jax_compiler_enable_remat_pass"] == "False"
    before = jax.config.jax_compiler_enable_remat_pass
    found = compiled_memory(lambda x: x + 1, 1.0 * np.ones(3, np.float32), target="cpu", xla_remat=True)
    assert found.flags["jax_compiler_enable_remat_pass"] == "True"
    assert jax.config.jax_compiler_enable_remat_pass == before


def test_says_with_what_it_was_measured(on_h200):
    found = on_h200["full"]
    assert found.label == "compiled for h200, not run"
    assert found.versions["jax"] == jax.__version__
    assert found.versions["jax-cuda12-pjrt"] == jax.lib.__version__
    assert json.loads(json.dumps(found.to_dict()))["buffers"][0]["nbytes"] == found.buffers[0].nbytes


def test_fits_leaves_a_margin():
    n = 120_000  # n² floats are 53.6 GiB; two of them and one result need 161
    x = jax.ShapeDtypeStruct((n, n), jnp.float32)
    no = check_memory(lambda x, y: x + y, x, x, target="h200")
    assert not no.fits
    assert no.free_bytes == int(target("h200").hbm_bytes * 0.95) - 3 * n * n * 4
    assert check_memory(lambda x, y: x + y, x, x, target="b200").fits
    assert not check_memory(lambda x, y: x + y, x, x, target="b200", margin=0.2).fits
    with pytest.raises(ValueError, match="target: cpu has no memory size to fit in"):
        check_memory(lambda x: x, x, target="cpu")
    with pytest.raises(ValueError, match=r"margin: expected a share from 0 to 1, got 5"):
        check_memory(lambda x: x, x, target="h200", margin=5)


def test_a_compile_that_fails_is_one_line():
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    for apart in ({}, {"timeout_seconds": 60}):
        with pytest.raises(CompileError, match=r"cpu: compile failed: .*xla_no_such_flag") as caught:
            compiled_memory(lambda x: x, x, target="cpu", compiler_options={"xla_no_such_flag": 1}, **apart)
        assert caught.value.reason == "failed"
        assert "\n" not in str(caught.value)


def test_out_of_memory_on_a_described_device_names_its_size():
    said = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (48.00G) exceeds "
        "available HBM (15.75G).\n\nmore"
    )
    error = explained(RuntimeError(said), target("v5e"))
    assert error.reason == "out_of_memory"
    assert str(error).startswith("v5e: the program does not fit the device (15.8 GiB): RESOURCE_EXHAUSTED: Ran out")
    assert "\n" not in str(error)


def test_a_compile_that_outruns_its_time():
    with pytest.raises(CompileError, match=r"cpu: the compile outran its 0\.2 s and was stopped") as caught:
        compiled_memory(lambda x: x, jax.ShapeDtypeStruct((4,), jnp.float32), target="cpu", timeout_seconds=0.2)
    assert caught.value.reason == "timed_out"


def test_a_compiler_that_crashes(monkeypatch, tmp_path):
    crash = tmp_path / "python"
    crash.write_text("#!/bin/sh\necho 'F0101 x.cc:1] Check failed: a == b' >&2\nkill -SEGV $$\n")
    crash.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crash))
    with pytest.raises(
        CompileError, match=r"cpu: the compiler's process died of SIGSEGV: F0101 .*Check failed: a == b"
    ) as e:
        compiled_memory(lambda x: x, jax.ShapeDtypeStruct((4,), jnp.float32), target="cpu", timeout_seconds=60)
    assert e.value.reason == "crashed"


def test_missing_cudnn_names_its_pip_line():
    def attention(x):
        raise RuntimeError("cuDNN not found. ")  # what JAX says while it traces

    with pytest.raises(TargetError, match="h200: cuDNN attention needs cuDNN here; pip install --no-deps nvidia-cudnn"):
        compiled_memory(attention, jax.ShapeDtypeStruct((4,), jnp.float32), target="h200")


def test_a_users_own_error_stays_as_it_is():
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        compiled_memory(lambda x: x @ x, jax.ShapeDtypeStruct((4, 5), jnp.float32), target="h200")


@pytest.mark.filterwarnings("ignore:.*Pallas Triton:DeprecationWarning", "ignore:.*pallas_call:DeprecationWarning")
def test_pallas_knows_the_described_gpu():
    from jax.experimental import pallas as pl

    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    def call(x):
        spec = pl.BlockSpec((128, 128), lambda i: (i, 0))
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(double, out_shape=out, grid=(2,), in_specs=[spec], out_specs=spec)(x)

    found = compiled_memory(call, jax.ShapeDtypeStruct((256, 128), jnp.float32), target="h200")
    assert (found.argument_bytes, found.output_bytes) == (256 * 128 * 4, 256 * 128 * 4)


def test_flops_never_come_from_cost_analysis():
    """It counts a loop body once: a sixteenth of what runs here; without a device it says nothing."""
    args = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), stack.shapes())
    step = stack.step("full")
    counted = flops(step, *args)
    per_layer = 2 * stack.BATCH * stack.SEQ * stack.HIDDEN * 4 * stack.HIDDEN
    # Two matmuls forward, four backward, and the first again: remat reruns it for tanh's and the second's gradient.
    assert counted.total == stack.LAYERS * 7 * per_layer
    said = step.lower(*args).compile().cost_analysis()["flops"]
    assert said < counted.total / 8


# What the prototype that this grew from gives for its stack of 8 blocks, h 1024, b 4, s 1024, bf16, in MiB of
# temporaries: full remat, then dots without batch dimensions.
PROTOTYPE = {"0.10.2": (608.5, 1150.5), "0.12.0.1": (678.5, 1150.5)}


@pytest.mark.skipif(jax.__version__ not in PROTOTYPE, reason="figures are known for jax 0.10.2 and 0.12.0.1")
def test_figures_of_the_prototype():
    layers, b, s, h, heads = 8, 4, 1024, 1024, 16

    def norm(x):
        x32 = x.astype(jnp.float32)
        return ((x32 - x32.mean(-1, keepdims=True)) * jax.lax.rsqrt(x32.var(-1, keepdims=True) + 1e-5)).astype(x.dtype)

    def block(p, x):
        y = norm(x)
        q, k, v = ((y @ p[n]).reshape(b, s, heads, h // heads) for n in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (h // heads) ** 0.5
        probs = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(x.dtype)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(b, s, h) @ p["o"]
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]

    at = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
    params = {n: at(layers, h, h) for n in "qkvo"} | {"up": at(layers, h, 4 * h), "down": at(layers, 4 * h, h)}
    policies = (None, jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    for policy, mib in zip(policies, PROTOTYPE[jax.__version__], strict=True):
        body = jax.checkpoint(block, policy=policy, prevent_cse=False)

        def loss(params, x, body=body):
            x, _ = jax.lax.scan(lambda x, p: (body(p, x), None), x, params)
            return x.astype(jnp.float32).mean()

        found = compiled_memory(jax.value_and_grad(loss), params, at(b, s, h), target="h200")
        assert found.temp_bytes == pytest.approx(mib * 2**20, rel=0.01)


@pytest.mark.parametrize("wrap", [jax.checkpoint, lambda f: f])
def test_a_cpu_says_whether_remat_outside_of_loops_is_undone(wrap):
    """Counted on the compiled program: three matmuls, five backward, two again where it holds."""
    block = wrap(lambda x, w: x + jnp.sin(jnp.tanh(x @ w)))
    step = jax.grad(lambda ws, x: block(block(block(x, ws[0]), ws[1]), ws[2]).sum())
    args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3, jax.ShapeDtypeStruct((128, 64), jnp.float32)
    found = compiled_memory(step, *args, target="cpu", num_buffers=0)
    rematted, matmuls = wrap is jax.checkpoint, jax.jit(step).lower(*args).compile().as_text().count(" dot(")
    undone = rematted and matmuls == 8
    assert matmuls == (10 if rematted and jax.__version_info__ >= (0, 12) else 8)
    assert ("undone" in str(found)) is undone and bool(found.notes) is undone


def test_remat_in_a_loop_holds_on_a_cpu_too():
    body = jax.checkpoint(lambda x, w: jnp.sin(jnp.tanh(x @ w)))
    step = jax.grad(lambda ws, x: jax.lax.scan(lambda c, w: (body(c, w), None), x, ws)[0].sum())
    args = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32), jax.ShapeDtypeStruct((128, 64), jnp.float32)
    assert compiled_memory(step, *args, target="cpu", num_buffers=0).notes == ()
