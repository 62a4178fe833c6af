import jax
import jax.numpy as jnp
import pytest

from jremat.measure import DeviceMemory, PeakFlops, Timing, device_memory, measured_peak, peak_of, throughput, time_step


def test_every_call_is_counted_and_the_warmup_left_out():
    calls = []

    def step(x):
        calls.append(x)
        return x

    done = []
    timing = time_step(step, 1, steps=4, warmup=3, on_step=done.append)
    assert len(calls) == 7
    assert len(timing.seconds) == 4
    assert done == list(range(1, 8))


def test_the_device_is_waited_for():
    n = 400
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda _, y: y @ y * 1e-3, x))
    timing = time_step(slow, jnp.ones((n, n)), steps=3)
    # 40 matmuls of 400 rows are 5 GFLOP; no CPU does that in the tens of microseconds that a dispatch takes.
    assert timing.median_seconds > 40 * 2 * n**3 / 5e12


def test_a_donated_state_needs_advance():
    step = jax.jit(lambda state, x: (state + x, x.sum()), donate_argnums=0)
    make = lambda: (jnp.zeros(8), jnp.ones(8))
    with pytest.raises(
        ValueError, match=r"args: call 1 of the step took an argument over \(donation\); give `advance`"
    ):
        time_step(step, *make())
    seen = []

    def advance(result, args):
        seen.append(float(result[0][0]))
        return result[0], args[1]

    time_step(step, *make(), steps=3, warmup=1, advance=advance)
    assert seen == [1.0, 2.0, 3.0, 4.0]


def test_counts_below_one_are_refused():
    with pytest.raises(ValueError, match="steps, warmup: expected at least 1 of each, got 0 and 2"):
        time_step(lambda: 0, steps=0)


def test_throughput_by_hand():
    # 4 devices of 100 FLOP/s for 2 s could do 800 FLOP.
    found = throughput(Timing(5.0, (1.0, 2.0, 9.0)), tokens=6, model_flops=400, model_flops_half=200,
                       total_flops=600, peak=PeakFlops(100.0, "chip"), num_devices=4)  # fmt: skip
    assert (found.step_seconds, found.tokens_per_second) == (2.0, 3.0)
    assert (found.mfu_full, found.mfu_half, found.hfu) == (0.5, 0.25, 0.75)


def test_flops_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match=r"expected model_flops_half <= model_flops, got 3 and 2"):
        throughput(Timing(1, (1.0,)), tokens=1, model_flops=2, model_flops_half=3, total_flops=9, peak=PeakFlops(1, ""))


def test_a_chip_outside_the_table_is_measured():
    device = jax.devices("cpu")[0]
    peak = peak_of(device, "float32")
    assert peak.source == "measured matmul"
    assert 1e8 < peak.flops_per_second < 1e14
    assert 1e8 < measured_peak("bfloat16", size=256) < 1e14


def test_a_known_chip_comes_from_the_table():
    class Device:
        device_kind = "NVIDIA H200"

    assert peak_of(Device(), "bfloat16") == PeakFlops(989.4e12, "h200")


def test_device_memory_keeps_its_figures_apart():
    class Device:
        def memory_stats(self):
            return {"bytes_in_use": 60, "peak_bytes_in_use": 80, "pool_bytes": 90, "bytes_limit": 100,
                    "largest_free_block_bytes": 25}  # fmt: skip

    found = device_memory(Device())
    assert found == DeviceMemory(60, 80, 90, 100, 25)
    assert found.fragmented_bytes == 15  # 40 are free, 25 in one piece


def test_a_cpu_reports_nothing():
    if jax.devices("cpu")[0].memory_stats() is not None:
        pytest.skip("this JAX reports a CPU's memory")
    assert device_memory(jax.devices("cpu")[0]) is None
