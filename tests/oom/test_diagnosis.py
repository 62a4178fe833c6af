"""The planted cause is the first that is named, in every form of report, and its cure lowers the compiled peak."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jremat
from jremat.measure import compiled_memory
from jremat.oom import find_causes, read_dump
from tests.oom.planted_steps import PLANTED, planted


@pytest.mark.parametrize(("name", "target"), PLANTED)
def test_the_planted_cause_is_named_first(name, target, tmp_path):
    case = planted(name, target)
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_proto": True, "xla_dump_hlo_as_text": True}
    compiled_memory(case.step, *case.args, target=case.target, num_buffers=0, compiler_options=options)
    [text] = [file for file in tmp_path.glob("*after_optimizations-buffer-assignment.txt") if "jit" in file.name]
    assert jremat.diagnose(tmp_path).causes[0].slug == case.cause  # of the compiled program
    assert (
        find_causes(read_dump(text))[0].slug == case.cause
    )  # of the buffer assignment with the program's text beside it


def test_donation_is_proved_by_a_compile():
    case = planted("not_donated", "h200")
    found = jremat.diagnose(None, case.step, *case.args, target="h200")
    saved = found.memory.peak_bytes - dict(found.proofs)["not-donated"]
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(case.args[0]))
    # Not all of it: without donation XLA puts temporaries where the results come to stand.
    assert found.causes[0].slug == "not-donated" and state / 2 < saved <= state


def test_full_remat_is_proved_where_the_step_takes_a_policy():
    layers, width = 6, 64

    def step(policy):
        run = jremat.stack(lambda w, x: x + jnp.sin(jnp.tanh(x @ w)), policy, num_layers=layers)
        shapes = (
            jax.ShapeDtypeStruct((layers, width, width), jnp.float32),
            jax.ShapeDtypeStruct((4096, width), jnp.float32),
        )
        return jax.jit(jax.grad(lambda w, x: run(w, x).sum())), shapes

    found = jremat.diagnose(None, step, target="h200")
    assert found.causes[0].slug == "saved-residuals"
    activation = 4096 * width * 4
    proof = dict(found.proofs)["saved-residuals"]
    assert found.memory.peak_bytes - proof > 0.8 * layers * activation  # a value of each layer at least
    assert compiled_memory(*_unpack(step(jremat.FULL)), target="h200").peak_bytes == proof


def _unpack(step):
    return step[0], *step[1]


def test_kinds_add_up_to_what_xla_allocates():
    case = planted("saved_residuals", "h200")
    found = jremat.diagnose(None, case.step, *case.args, target="h200")
    assert sum(found.by_kind.values()) == pytest.approx(found.dump.total_bytes, rel=0.02)
    tokens = case.args[1].shape[0]
    width, hidden = case.args[0]["up"].shape[1:]
    saved = found.by_kind["saved residuals"]
    assert saved >= 2 * tokens * (width + hidden) * case.args[0]["up"].shape[0]  # each layer's input and wide value


def test_a_profile_of_the_device_names_the_line(tmp_path):
    def make_table():
        return jax.block_until_ready(jnp.ones((1 << 22,)))

    held = make_table()
    jax.profiler.save_device_memory_profile(str(tmp_path / "memory.prof"))
    found = jremat.diagnose(tmp_path / "memory.prof")
    largest = found.dump.buffers[0]
    assert largest.nbytes >= held.nbytes
    assert any(Path(__file__).name in buffer.source and buffer.nbytes >= held.nbytes for buffer in found.dump.buffers)


def test_neither_report_nor_step():
    with pytest.raises(ValueError, match="dump: expected a report"):
        jremat.diagnose()
