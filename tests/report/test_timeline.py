"""The timeline: its lines sum to what is alive, its peak is the peak's."""

import jax
import jax.numpy as jnp
import pytest

from jremat.command.step import gradient_step
from jremat.graph.peak import predicted_memory
from jremat.policy import FULL, NONE, tag
from jremat.report.explain import explain
from jremat.report.timeline import LINES, peak_line, timeline
from jremat.transform.chain import stack


def block(w, x):
    return x + jnp.sin(tag(x @ w, "up"))


def scanned(ws, x):
    return jax.lax.scan(lambda x, w: (block(w, x), None), x, ws)[0]


ARGS = jnp.ones((4, 64, 64)), jnp.ones((32, 64))
FUNCTIONS = {
    "scan": scanned,
    "rematted": lambda ws, x: jax.lax.scan(lambda x, w: (jax.checkpoint(block)(w, x), None), x, ws)[0],
    "chain, none": stack(block, NONE, num_layers=4),
    "chain, full": stack(block, FULL, num_layers=4),
    "no loop": lambda ws, x: block(ws[1], block(ws[0], x)).sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_lines_sum_to_what_is_alive_and_reach_the_peak(name):
    step, args = gradient_step(FUNCTIONS[name], ARGS, {})
    peak = predicted_memory(step, *args)
    found = timeline(peak, updates=False)
    sums = [sum(values) for values in zip(*(values for _, values in found.lines), strict=True)]
    assert sums == [point.alive_bytes for point in found.points]
    assert max(sums) == found.peak_bytes == peak.peak_bytes == sums[found.peak_step]
    assert all(n >= 0 for _, values in found.lines for n in values)
    assert {line for line, _ in found.lines} <= set(LINES.values())
    assert {point.phase for point in found.points} <= {"forward", "backward", "recompute"}
    assert found.points[found.peak_step].operation in peak_line(found)


def test_buffers_are_alive_within_the_step_and_are_part_of_their_line():
    step, args = gradient_step(scanned, ARGS, {})
    found = timeline(predicted_memory(step, *args), updates=False)
    lines = dict(found.lines)
    for buffer in found.buffers:
        assert 0 <= buffer.born <= buffer.dies < len(found.points)
        assert all(n >= buffer.nbytes for n in lines[LINES[buffer.kind]][buffer.born : buffer.dies + 1])


def test_stacks_bear_the_names_of_what_is_in_them():
    step, args = gradient_step(scanned, ARGS, {})
    rows = explain(scanned, *ARGS)
    found = timeline(predicted_memory(step, *args), rows, updates=False)
    kept = [buffer for buffer in found.buffers if buffer.kind == "kept activation" and buffer.shape == (4, 32, 64)]
    values = [row.value for row in rows.of("kept") if row.copies == 4 and row.shape == (32, 64)]
    assert {buffer.name for buffer in kept} <= {*values, "stack of a loop"}
    assert {buffer.name for buffer in kept} & set(values)
    assert {"argument 0", "argument 1", "cotangent 0"} <= {buffer.name for buffer in found.buffers}
