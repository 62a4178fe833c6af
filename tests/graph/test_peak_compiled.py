"""The traced peak against the compiler: small train steps with AdamW and donated state, compiled for an H200."""

import json
import re
import statistics
from pathlib import Path

import jax
import optax
import pytest
from flax import linen as nn

from benchmarks import estimate_peak as benchmark
from benchmarks import estimate_peak_others_images as images
from jremat.graph.peak import predicted_memory
from jremat.measure.memory import compiled_memory
from tests import needs

SMALL = {"num_layers": 4, "hidden": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "mlp_hidden": 1024}
BF16 = {"compute_dtype": "bfloat16", "dropout": 0.0}
FUSED = {"attention": "blockwise"}
GQA = {"kv_heads": 2, "mlp_hidden": 512}
PINNED = pytest.mark.skipif(jax.__version__ != "0.10.2", reason="held on the pinned JAX; the benchmark reports others")
CUDNN = {"attention": "cudnn"}
# Scans, plans over layers, dropout, grouped queries, chunks; the recorded steps hold every other kind.
STEPS = [
    ("gpt2", {}, "selective", 2048, None),
    ("gpt2", {"dropout": 0.1}, "none", 2048, None),
    ("gpt2", FUSED, "every_k:2", 2048, None),
    ("gpt2", FUSED, "mix:3*full,1*none", 2048, None),
    ("llama-1b", GQA | FUSED, "full", 32000, 128),
]
CUDNN_STEPS = [("llama-1b", GQA | CUDNN, "full", 8192, None)]


def errors_of(steps):
    """Of each step the error of the peak, and of the peak less the arguments."""
    found = {}
    for size, changes, spec, vocab, chunk in steps:
        config = SMALL | BF16 | {"vocab_size": vocab, "max_seq": 512} | changes
        case = benchmark.Case(size, size, config, spec, batch=4, seq=512, chunk=chunk)
        compiled, predicted = benchmark.measure(case), benchmark.traced(case, jax.__version__)
        difference = predicted - compiled["peak_bytes"]
        beyond = compiled["peak_bytes"] - compiled["argument_bytes"]
        found[size, *changes, spec, vocab, chunk] = difference / compiled["peak_bytes"], difference / beyond
    return found


@PINNED
def test_small_steps_are_met():
    errors = errors_of(STEPS)
    assert len(errors) == len(STEPS)
    assert {key: error for key, error in errors.items() if not -0.05 < error[0] < 0.10} == {}
    assert {key: error for key, error in errors.items() if not -0.10 < error[1] < 0.20} == {}


@PINNED
@needs.CUDNN
def test_small_steps_with_cudnn_attention_are_met():
    errors = errors_of(CUDNN_STEPS)
    assert {key: error for key, error in errors.items() if not -0.05 < error[0] < 0.10} == {}
    assert {key: error for key, error in errors.items() if not -0.10 < error[1] < 0.20} == {}


# By version: worst under, worst over, worst of the peak less arguments either way, and the medians of both.
BOUNDS = {"0.10.2": (0.05, 0.06, 0.08, 0.005, 0.015), "0.12.0.1": (0.04, 0.11, 0.19, 0.008, 0.015)}
CALIBRATED = pytest.mark.skipif(jax.__version__ not in BOUNDS, reason="no peaks were recorded with this JAX")


@pytest.fixture(scope="module")
def recorded():
    """A third of the benchmark's steps with the peaks that the installed JAX compiled, predicted anew."""
    found = json.loads(benchmark.results(jax.__version__).read_text())
    assert {case.key for case in benchmark.cases()} == found.keys() and len(found) > 70
    chosen = list(benchmark.cases())[::3]
    return [benchmark.Row(c, found[c.key], benchmark.traced(c, jax.__version__), 0) for c in chosen]


@CALIBRATED
def test_large_steps_are_met_as_recorded(recorded):
    under, over, beyond, median, beyond_median = BOUNDS[jax.__version__]
    assert len(recorded) > 25 and {benchmark.kind_of(row.case) for row in recorded} == set(benchmark.KINDS)
    errors = {row.case.key: row.traced_bytes / row.peak_bytes - 1 for row in recorded}
    assert {key: error for key, error in errors.items() if not -under < error < over} == {}
    assert {row.case.key: row.beyond_arguments for row in recorded if abs(row.beyond_arguments) > beyond} == {}
    assert statistics.median(map(abs, errors.values())) < median
    assert statistics.median(abs(row.beyond_arguments) for row in recorded) < beyond_median


@PINNED
def test_the_documents_tell_of_no_smaller_errors(recorded):
    text = " ".join((Path(benchmark.__file__).parents[1] / "docs" / "limits.md").read_text().split())
    pattern = (
        r"worst by ([\d.]+)% under and ([\d.]+)% over; of the peak less arguments by [\d.]+%, ([\d.]+)% and ([\d.]+)%"
    )
    under, over, beyond_under, beyond_over = (float(n) / 100 + 5e-4 for n in re.search(pattern, text).groups())
    assert all(-under < row.traced_bytes / row.peak_bytes - 1 < over for row in recorded)
    assert all(-beyond_under < row.beyond_arguments < beyond_over for row in recorded)


def test_scores_beside_their_softmax_are_met():
    """Both are alive where one kernel does the whole softmax."""
    shapes = [jax.ShapeDtypeStruct(axes, "float32") for axes in ((4096, 64), (64, 1024))]
    step = jax.jit(lambda x, w: jax.nn.softmax(x @ w) @ w.T)
    compiled = compiled_memory(step, *shapes, target="h200").peak_bytes
    assert compiled > 2 * 4096 * 1024 * 4
    assert abs(predicted_memory(step, *shapes).peak_bytes / compiled - 1) < 0.005


class Pooled(nn.Module):
    """The zeros that the pooling's gradient is scattered into are those of the ReLU, copied."""

    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(nn.Conv(64, (3, 3), dtype="bfloat16")(x)), (2, 2), strides=(2, 2))
        return nn.relu(nn.Conv(64, (3, 3), dtype="bfloat16")(nn.relu(nn.Conv(64, (3, 3), dtype="bfloat16")(x))))


class Transposed(nn.Module):
    """Zeros between the elements are written; the kernel's gradient reads the elements alone."""

    @nn.compact
    def __call__(self, x):
        for width in (32, 64):
            x = nn.relu(nn.Conv(width, (4, 4), (2, 2))(x))
        return nn.ConvTranspose(3, (4, 4), (2, 2))(nn.relu(nn.ConvTranspose(32, (4, 4), (2, 2))(x)))


@pytest.mark.parametrize("model", [Pooled(), Transposed()], ids=lambda model: type(model).__name__)
def test_what_convolutions_write_beside_their_results_is_met(model):
    loss = lambda out, images: (out.astype("float32") ** 2).mean()
    step, args = images.linen(model, optax.sgd(0.1), loss, images.shape(64, 64, 64, 3))
    compiled = compiled_memory(step, *args, target="h200", num_buffers=0).peak_bytes
    assert abs(predicted_memory(step, *args).peak_bytes / compiled - 1) < 0.005
