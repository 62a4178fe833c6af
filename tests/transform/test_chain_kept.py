"""The layer-stack executor keeps just the bytes of its plan and runs just its matmuls again."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jremat
import policies
from jremat.policy import FULL, NONE, LayerPlan, Policy, Segment
from jremat.transform.chain import stack
from jremat.transform.reversal_schedule import simulate, tables
from jremat.transform.revolve import binomial, binomial_steps
from jremat.transform.scan import scan_stack
from tests.transform.chain_case import (
    DOTS,
    PLANS,
    ROUNDING,
    SCALE,
    STATE,
    UP,
    B,
    F,
    H,
    L,
    X,
    block,
    kept_bytes,
    largest_error,
    plain,
    reruns,
    value_and_gradients,
    weights,
)


class TestWhatItKeeps:
    @pytest.mark.parametrize("n", [1, 6, 7])
    def test_bytes_by_hand(self, n):
        assert kept_bytes("full", n) == n * STATE
        assert kept_bytes("save:up", n) == n * (STATE + UP)
        for k in (2, 3):
            assert kept_bytes(f"every_k:{k}", n) == kept_bytes(f"every_k:{k},full", n) == math.ceil(n / k) * STATE
        for slots in (1, 2, 3, 8):
            states = min(slots + 1, n)  # the schedule's, and the last layer's input
            assert kept_bytes(f"revolve:{slots}", n) == states * STATE

    def test_a_mix_is_the_sum_of_its_parts(self):
        whole = kept_bytes("mix:3*full,2*every_k:2,2*save:up")
        assert whole == 3 * STATE + STATE + 2 * (STATE + UP)

    @pytest.mark.parametrize("spec", ["none", DOTS, "save:up", "alternate:2"])
    def test_no_more_than_a_scan(self, spec):
        """What is kept of a parameter is a copy in a scan; everything else is the same."""
        run = scan_stack(block, policies.get(spec), num_layers=L)
        scanned = jremat.residuals(lambda p, x: run(p, x, SCALE), weights(), X).total_bytes
        assert kept_bytes(spec) <= scanned

    @pytest.mark.parametrize("jitted", [False, True])
    def test_casts_of_parameters_are_made_again(self, jitted):
        def cast(p, x):
            w = {n: p[n].astype(jnp.bfloat16) for n in ("in", "out")}
            inner = lambda x, w: jnp.tanh(x @ w["in"]) @ w["out"]
            return x + (jax.jit(inner) if jitted else inner)(x, w)

        x, p = X.astype(jnp.bfloat16), weights()
        kept = jremat.residuals(lambda p, x: stack(cast, NONE, num_layers=L)(p, x), p, x).kept
        assert kept and all(row.shape[-2:] not in ((H, F), (F, H)) for row in kept)
        scanned = jremat.residuals(lambda p, x: scan_stack(cast, NONE, num_layers=L)(p, x), p, x).total_bytes
        copies = L * 2 * H * F * 2  # bytes of the bfloat16 weights
        assert scanned - sum(row.bytes for row in kept) == copies

    def test_a_dropout_mask_is_kept_as_its_policy_says(self):
        """Made from a key, not from a parameter: ``none`` reruns no random bits."""
        rows = jremat.residuals(lambda p, x: stack(block, NONE, num_layers=L)(p, x, SCALE), weights(), X)
        assert L * B * F in [row.bytes for row in rows.kept if row.dtype == "bool"]

    @pytest.mark.parametrize("spec", ["none", "full", "every_k:3", "revolve:2"])
    def test_what_the_carry_hands_on_unchanged_is_kept_once(self, spec):
        """As a step's positions and keys: no copy a layer, and their gradients are right."""

        def handing_on(p, carry):
            x, scale, count = carry
            return block(p, x, scale), scale, count

        run = stack(handing_on, policies.get(spec), num_layers=L)
        p, count = weights(), jnp.arange(3)
        found = jremat.residuals(lambda p, x, s: run(p, (x, s, count))[0], p, X, SCALE)
        shared = stack(block, policies.get(spec), num_layers=L)
        assert found.total_bytes == jremat.residuals(shared, p, X, SCALE).total_bytes
        gradient = jax.jit(jax.grad(lambda s: (lambda y, s, _: y.sum() + s.sum())(*run(p, (X, s, count)))))(SCALE)
        expected = jax.jit(jax.grad(lambda s: plain(p, X, s).sum() + s.sum()))(SCALE)
        assert largest_error(gradient, expected) <= ROUNDING

    def test_frozen_parameters_have_no_gradient_buffer(self):
        p, run = weights(), stack(block, FULL, num_layers=L)

        def step(frozen):
            return lambda w, x: run(p | {frozen: w}, x, SCALE).sum()

        for chosen, other in (("in", "out"), ("out", "in")):
            text = str(jax.make_jaxpr(jax.grad(step(chosen)))(p[chosen], X))
            buffers = [f"f32[{','.join(map(str, p[n].shape))}] = broadcast_in_dim" for n in (chosen, other)]
            assert [text.count(b) for b in buffers] == [1, 0]


class TestWhatItRuns:
    @pytest.mark.parametrize("spec", ["none", "full", "save:up", DOTS, "alternate:2"])
    def test_as_many_matmuls_again_as_a_scan(self, spec):
        again = [reruns(make(block, policies.get(spec), num_layers=L)) for make in (stack, scan_stack)]
        assert again[0] == again[1]

    def test_matmuls_by_hand(self):
        """A block has two; the second is not rerun by its own remat, and a replay runs both."""
        count = {spec: reruns(stack(block, policies.get(spec), num_layers=L)) for spec in PLANS}
        assert count["none"] == 0
        assert count["full"] == L
        assert count["alternate:2"] == math.ceil(L / 2)
        assert count["block:2"] == 2
        assert count["torchtitan:3"] == 2
        assert count["save:up"] == 0

    @pytest.mark.parametrize(("num_layers", "slots"), [(7, 1), (7, 2), (16, 3), (5, 5)])
    def test_a_schedule_costs_its_steps(self, num_layers, slots):
        """The simulator's steps beyond the first forward, and each layer's own rerun as under ``full``."""
        steps = simulate(binomial(num_layers, slots)).forward_steps - (num_layers - 1)
        p = weights(num_layers)

        def flops(spec):
            run = stack(block, policies.get(spec), num_layers=num_layers)
            loss = lambda real: (run(real | {"key": p["key"]}, X, SCALE) ** 2).sum()
            return jremat.flops(jax.value_and_grad(loss), {n: p[n] for n in ("in", "out")})

        found, full, layer = flops(f"revolve:{slots}"), flops("full"), 2 * 2 * B * H * F
        assert found.recompute == steps * layer + full.recompute
        assert found.count.recompute == 2 * steps + num_layers
        assert found.model == full.model

    @pytest.mark.parametrize("k", [2, 3, 7])
    def test_a_group_costs_one_forward_or_two(self, k):
        forward = 2 * L
        last = 2 * math.ceil(L / k) - math.ceil(L / k)  # a group's last layer: its output is not needed
        once = reruns(stack(block, policies.get(f"every_k:{k}"), num_layers=L))
        assert forward - last <= once <= forward
        assert reruns(stack(block, policies.get(f"every_k:{k},full"), num_layers=L)) <= 2 * forward

    @pytest.mark.parametrize("slots", [1, 2, 7])
    def test_a_schedule_runs_as_many_layers_as_it_says(self, slots):
        """Counted as it runs, by a callback in every forward."""
        ran = []

        def seen(p, x):
            jax.debug.callback(lambda: ran.append(1))
            return jnp.tanh(x * p)

        plan = LayerPlan((Segment((NONE,), slots=slots),), label="a layer's rerun keeps all")
        run = stack(seen, plan, num_layers=L)
        jax.block_until_ready(jax.jit(jax.grad(lambda p: run(p, jnp.float32(0.3))))(jnp.linspace(0.5, 1, L)))
        jax.effects_barrier()
        # The sweep and its last layer, the replay, and each layer's own rerun.
        assert len(ran) == binomial_steps(L, slots) + 1 + L
        assert len(tables(binomial(L, slots)).replay) == binomial_steps(L, slots) - (L - 1)

    @pytest.mark.parametrize("spec", ["full", "every_k:4", "every_k:4,full", "revolve:3", "mix:4*full,rest*none"])
    def test_the_program_does_not_grow_with_depth(self, spec):
        def equations(num_layers):
            p = weights(num_layers)
            run = stack(block, policies.get(spec), num_layers=num_layers)
            step = jax.grad(lambda w, x: run(p | {"in": w}, x, SCALE).sum())
            return str(jax.make_jaxpr(step)(p["in"], X)).count(" = ")

        assert equations(12) == equations(96)


@st.composite
def plans(draw: Any) -> tuple[int, LayerPlan]:
    """Any plan over a few layers."""
    segments = []
    for _ in range(draw(st.integers(1, 3))):
        pattern = tuple(draw(st.lists(st.sampled_from([FULL, NONE, Policy.save("up")]), min_size=1, max_size=2)))
        kind = draw(st.sampled_from(["plain", "group", "slots"]))
        group = draw(st.integers(2, 3)) * len(pattern) if kind == "group" else 1
        slots = draw(st.integers(1, 3)) if kind == "slots" else None
        pattern = pattern[:1] if kind == "slots" else pattern
        segments.append(Segment(pattern, draw(st.integers(1, 3)), group, slots))
    return sum(len(s.pattern) * s.repeats for s in segments), LayerPlan(tuple(segments), label="drawn")


class TestAnyPlan:
    @settings(max_examples=8, deadline=None)
    @given(plans())
    def test_same_gradients_and_the_bytes_of_its_parts(self, drawn):
        n, plan = drawn
        run = stack(block, plan, num_layers=n)
        assert largest_error(value_and_gradients(run, n), value_and_gradients(plain, n)) <= ROUNDING
        found = jremat.residuals(lambda p, x: run(p, x, SCALE), weights(n), X).total_bytes
        alone = {p: kept_bytes(p.spec, 1) for p in {p for s in plan.segments for p in s.pattern}}
        total = 0
        for segment in plan.segments:
            length = len(segment.pattern) * segment.repeats
            if segment.slots is not None:
                total += min(segment.slots + 1, length) * STATE
            elif segment.group > 1:
                total += math.ceil(length / segment.group) * STATE
            else:
                total += segment.repeats * sum(alone[p] for p in segment.pattern)
        assert found == total
