"""What the allocator reserves and where XLA starts to recompute, against what XLA itself does at several limits."""

import dataclasses
import json

import jax
import jax.numpy as jnp

from jremat.__main__ import main
from jremat.measure import compiled_memory, target
from jremat.measure.descriptions import GPUS, describe
from jremat.oom import check_launch
from jremat.oom.xla_remat import xla_limit_bytes

LAYERS, ROWS, WIDTH = 16, 1 << 13, 64
VALUE = ROWS * WIDTH * 4


def _step():
    def loss(ws, x):
        for w in ws:
            x = jnp.sin(jnp.tanh(x @ w))
        return x.mean()

    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.jit(jax.grad(loss)), ([array(WIDTH, WIDTH)] * LAYERS, array(ROWS, WIDTH))


def _gpu(memory_bytes):
    """An H200 with less memory."""
    gpu = describe(dataclasses.replace(GPUS["h200"], memory_bytes=memory_bytes))
    return dataclasses.replace(target("h200"), description=gpu, hbm_bytes=memory_bytes)


def test_xla_starts_to_recompute_at_the_limit_that_is_computed_and_stops_just_under_it():
    step, args = _step()
    plain = compiled_memory(step, *args, target="h200", num_buffers=0)
    planned = plain.temp_bytes + plain.output_bytes
    kind = _gpu(int((planned / 0.95 + plain.argument_bytes + plain.output_bytes) / 0.8))
    for slop in (96, 85, 75):
        limit = xla_limit_bytes(kind, plain, slop)
        options = {"xla_gpu_memory_limit_slop_factor": slop}
        under = compiled_memory(step, *args, target=kind, num_buffers=0, xla_remat=True, compiler_options=options)
        assert (planned > limit) == (under.temp_bytes < plain.temp_bytes)
        if planned > limit:
            assert limit - 2 * VALUE < under.temp_bytes + under.output_bytes <= limit


def test_what_xla_would_recompute_is_counted():
    step, args = _step()
    roomy = check_launch(step, *args, target=_gpu(40 * LAYERS * VALUE))
    assert not roomy.reserves and not roomy.fits  # a GPU so small has no room for CUDA's context
    assert not roomy.xla_rematerializes and roomy.rematted is None
    tight = check_launch(step, *args, target=_gpu(int(1.2 * LAYERS * VALUE)))
    freed = tight.memory.temp_bytes - tight.rematted.temp_bytes
    assert tight.xla_rematerializes and 0 < freed <= tight.recomputed.nbytes
    assert tight.recomputed.nbytes % VALUE == 0  # whole values of layers
    # Each is written once, and one as large is read for it.
    assert tight.recomputed.seconds >= 2 * tight.recomputed.nbytes / target("h200").chip.hbm_bytes_per_second


def test_the_command_says_whether_it_fits_by_its_exit_code(capsys, tmp_path, monkeypatch):
    (tmp_path / "big.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def step():\n"
        "    return jax.jit(lambda x: jnp.sin(x) @ x), (jax.ShapeDtypeStruct((1 << 16, 1 << 16), jnp.float32),)\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["check", "big.py:step", "--target", "h100", "--json", "found.json"]  # 32 GiB
    assert main(arguments) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["fits"] and found["needed_bytes"] >= 2 * 2**34
    assert main([*arguments, "--memory-fraction", "0.3"]) == 1
    assert "MEM_FRACTION" in capsys.readouterr().out
    assert main([*arguments, "--memory-fraction", "1"]) == 1  # the pool leaves nothing for CUDA
    assert main([*arguments, "--memory-fraction", "7"]) == 2
    assert "memory_fraction: expected a share" in capsys.readouterr().err
