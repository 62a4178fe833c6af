"""Reports as they stand in logs and files: figures, buffers and causes; damaged ones end in one line."""

import gzip
import json
import random
import re

import pytest

import policies
from jremat.measure.buffers import Buffer
from jremat.oom import Dump, find_causes
from jremat.oom.read import read_bytes
from tests.oom.reports import BFC, GPU_LOGITS, GPU_SMALL, REPORTS, TPU_PADDED, TPU_SCORES, VIEWER

GIB = 2**30


@pytest.mark.parametrize(("text", "cause"), REPORTS)
def test_the_cause_of_a_report_is_among_the_first_three(text, cause):
    assert cause in [found.slug for found in find_causes(read_bytes(text.encode()))[:3]]


def test_figures_of_a_gpu_error():
    found = read_bytes(GPU_LOGITS.encode())
    assert found.requested_bytes == 29995136128 and found.temp_bytes == int(27.93 * GIB)
    assert found.buffers[0].shape == (128, 128, 32128) and found.buffers[0].dtype == "float32"
    assert found.buffers[0].source == "losses.py:139" and found.buffers[-1].kind == "argument"


def test_figures_of_a_tpu_error():
    found = read_bytes(TPU_SCORES.encode())
    assert found.limit_bytes == int(30.75 * GIB) and found.requested_bytes == int(63.8 * GIB)
    assert found.fragmentation_bytes == int(210.89 * 2**20)
    assert found.buffers[0].what.startswith("jit(train_step)") and found.buffers[0].shape == (32, 4096, 4096)
    assert read_bytes(TPU_PADDED.encode()).padding_bytes == 31 * GIB


def test_figures_of_the_allocators_report():
    found = read_bytes(BFC.encode())
    assert found.limit_bytes == 77309411328 and found.in_use_bytes == 70000000000 and found.requested_bytes == 4 * GIB


def test_lines_of_a_log_may_begin_with_its_stamps():
    stamp = "2026-01-04 09:05:40.721: E    1578 xla/client.cc:76] "
    stamped = "\n".join(stamp + line for line in GPU_LOGITS.splitlines())
    assert read_bytes(stamped.encode()) == read_bytes(GPU_LOGITS.encode())


def test_the_memory_viewers_json():
    found = read_bytes(json.dumps(VIEWER).encode())
    assert [buffer.nbytes for buffer in found.buffers] == [96 * 2**20, 2**20]
    assert found.buffers[0].source == "model.py:7" and found.buffers[1].kind == "argument"
    snake = {re.sub("(?<=[a-z])[A-Z]", lambda m: f"_{m[0].lower()}", name): value for name, value in VIEWER.items()}
    assert read_bytes(json.dumps(snake).encode()).temp_bytes == found.temp_bytes


@pytest.mark.parametrize("text", [GPU_LOGITS, GPU_SMALL, TPU_SCORES, TPU_PADDED, BFC, json.dumps(VIEWER)])
def test_garbled_reports_end_in_one_line(text):
    data, rng = text.encode(), random.Random(0)
    for _ in range(500):
        _read_or_one_line(_garbled(data, rng))
        _read_or_one_line(gzip.compress(_garbled(data, rng))[: rng.randrange(10, 400)])


def test_garbled_programs_end_in_one_line(program):
    rng = random.Random(1)
    for _ in range(300):
        _read_or_one_line(_garbled(program, rng))


def _garbled(data, rng):
    """A few bytes changed, a part cut out, the end cut off."""
    found = bytearray(data)
    for _ in range(rng.randrange(1, 8)):
        found[rng.randrange(len(found))] = rng.randrange(256)
    start = rng.randrange(len(found))
    del found[start : start + rng.randrange(40)]
    return bytes(found[: rng.randrange(1, len(found) + 1)] if rng.random() < 0.5 else found)


def _read_or_one_line(data):
    try:
        found = read_bytes(data)
    except ValueError as error:
        assert "\n" not in str(error) and str(error).startswith("dump: ")
    else:
        find_causes(found)


@pytest.mark.parametrize(
    ("buffers", "policy", "freed"),
    [
        ((("dot_general", None), ("dot_general", None), ("tanh", None)), "full", 3),
        ((("dot_general", None), ("tanh", None), ("sin", None)), "dots_saveable", 2),
        ((("dot_general", "mlp_up"), ("tanh", "mlp_act"), ("sin", None)), "but:mlp_up,mlp_act", 2),
    ],
)
def test_the_policy_that_drops_what_is_saved_is_named(buffers, policy, freed):
    saved = tuple(
        Buffer(GIB, "temp", "float32", (8, 64), f"jit(f)/jvp()/while/body/{operation}", "", tag, "fusion")
        for operation, tag in buffers
    )
    cause = find_causes(Dump("a program", saved))[0]
    assert f"policies.get('{policy}')" in cause.cure and cause.freed_bytes == freed * GIB
    policies.get(policy)  # is a policy
