"""What would make a run fit: every way does fit, is the least of its kind, and comes in its order."""

from dataclasses import replace

import policies
from jremat.estimator.config import TransformerConfig
from jremat.estimator.fit import ways_to_fit
from jremat.estimator.parallel import Parallel, read_mesh
from jremat.estimator.training_step import TrainingStep
from jremat.estimator.transformer import ledger_of
from jremat.policy import FULL, NONE

CONFIG = TransformerConfig(
    vocab_size=32000, num_layers=8, hidden=1024, heads=16, kv_heads=16, head_dim=64, mlp_hidden=4096, max_seq=2048,
    compute_dtype="bfloat16",
)  # fmt: skip
RUN = TrainingStep(config=CONFIG, policy=NONE, batch=8, seq=2048)
LEAN = [FULL, policies.get("save_only_matmuls"), policies.get("selective")]
GIB = 2**30


def changed(run: TrainingStep, change: str) -> TrainingStep:
    """The run with the flags of a change, read by hand."""
    words = change.split()
    values = dict(zip(words, [*words[1:], ""]))
    whole = lambda flag, default: int(values.get(flag, default))
    parallel = read_mesh(values["--mesh"]) if "--mesh" in words else Parallel()
    return replace(
        run,
        policy=policies.get(values["--policy"]) if "--policy" in words else run.policy,
        chunk=whole("--loss-chunk", 0) or run.chunk,
        config=replace(run.config, attention=values.get("--attention", "dot")),
        batch=whole("--batch", run.batch),
        accumulate=whole("--accumulate", run.accumulate),
        seq=whole("--seq", run.seq),
        parallel=parallel,
    )


def test_every_way_fits_and_says_its_peak():
    for limit in (2 * GIB, 4 * GIB, 8 * GIB, 12 * GIB, 20 * GIB):
        assert ledger_of(RUN).peak_bytes > limit
        ways = ways_to_fit(RUN, limit, LEAN)
        assert ways, limit
        for way in ways:
            ledger = ledger_of(changed(RUN, way.change))
            assert (ledger.peak_bytes, ledger.recompute_flops / ledger.forward_flops) == (way.peak_bytes, way.recompute)
            assert way.peak_bytes <= limit


def test_the_policy_comes_first_and_is_the_one_that_repeats_least():
    limit = ledger_of(replace(RUN, policy=LEAN[2])).peak_bytes
    first = ways_to_fit(RUN, limit, LEAN)[0]
    assert first.change == "--policy selective"
    assert first.recompute < ledger_of(replace(RUN, policy=FULL)).recompute_flops / ledger_of(RUN).forward_flops


def test_the_least_of_each_kind():
    ways = ways_to_fit(RUN, 12 * GIB, LEAN)
    (batch,) = [way for way in ways if way.change.startswith("--batch")]
    size = int(batch.change.split()[1])
    more = replace(RUN, batch=2 * size, accumulate=4 // size)  # accumulating costs a sum of gradients
    assert ledger_of(more).peak_bytes > 12 * GIB >= batch.peak_bytes
    assert batch.change == f"--batch {size} --accumulate {8 // size}"  # the step stays what it was


def test_where_nothing_is_enough_there_is_no_way():
    assert ways_to_fit(replace(RUN, batch=1), 2**20, LEAN) == ()


def test_no_way_is_one_that_was_there():
    ways = ways_to_fit(replace(RUN, policy=FULL, chunk=256), 6 * GIB, LEAN)
    assert not any(way.change == "--policy full" for way in ways)
    assert not any(way.change.startswith("--loss-chunk") for way in ways)
