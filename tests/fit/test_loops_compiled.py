"""Loops planned in place, compiled for an H200: the peak is within the budget, bytes and matmuls are as planned."""

import jax
import jax.numpy as jnp
import pytest

import jremat
from tests.fit.loops import encoder_decoder, encoder_decoder_arguments, gpt, gpt_arguments, recurrence

F32 = jnp.float32
RECURRENCE = {name: jax.ShapeDtypeStruct((32, 32), F32) for name in ("in", "state", "gate")}
PROGRAMS = {
    "a stack between an embedding and logits": (gpt, gpt_arguments(8, 64, 128, 8, 512)),
    "a recurrence": (recurrence, (RECURRENCE, jax.ShapeDtypeStruct((512, 64, 32), F32))),
    "an encoder and a decoder": (encoder_decoder, encoder_decoder_arguments(8, 64, 16, 128)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiled_peak_is_within_the_budget(name):
    f, args = PROGRAMS[name]
    compiled = lambda f: jremat.compiled_memory(jax.value_and_grad(f), *args, target="h200", num_buffers=0)
    plain = compiled(f)
    budget = int(plain.peak_bytes - 0.6 * plain.temp_bytes)
    ours = jremat.fit(f, *args, hbm_bytes=budget, target="h200", margin=0.0, compiles=1)
    inside = [own for segment in ours.plan.segments for own in segment.inside]
    assert inside and {own.primitive for own in inside} == {"scan"}
    assert compiled(ours).peak_bytes == ours.plan.peak_bytes <= budget < plain.peak_bytes
    assert jremat.flops(jax.grad(ours), *args).recompute == ours.plan.recompute_flops
    if all(own.group == 1 for own in inside):
        held, kept = sum(s.held_bytes for s in ours.plan.segments), jremat.residuals(ours, *args).total_bytes
        assert abs(held - kept) <= 0.1 * kept
    assert 0 <= ours.plan.overhead < 0.35
