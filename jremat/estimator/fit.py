"""What would make a run fit: one change at a time, the smallest first."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jremat.calibration import ESTIMATE
from jremat.estimator.parallel import Parallel
from jremat.estimator.training_step import TrainingStep
from jremat.policy.layers import LayerPlan
from jremat.policy.policy import FULL, Policy

_MOST_DEVICES = 4096
_CHUNK = 512
_ENOUGH = 3  # ways to choose from


def fit(peak_bytes: int, hbm_bytes: int) -> Literal["fits", "tight", "no"]:
    """Whether an estimated peak fits a device's memory: surely, only without error and margin, or not.

    >>> fit(60, 80), fit(79, 80), fit(81, 80)
    ('fits', 'tight', 'no')
    """
    if peak_bytes * (1 + ESTIMATE.error) <= hbm_bytes * (1 - ESTIMATE.margin):
        return "fits"
    return "tight" if peak_bytes <= hbm_bytes else "no"


@dataclass(frozen=True)
class Way:
    """One way to fit.

    Args:
        change: what to change, in words.
        peak_bytes: with the change.
        recompute: matmul FLOPs repeated in the layers, as a share of their forward pass.
    """

    change: str
    peak_bytes: int
    recompute: float


def ways_to_fit(run: TrainingStep, hbm_bytes: int, policies: Sequence[Policy | LayerPlan]) -> tuple[Way, ...]:
    """Changes that make ``run`` fit in ``hbm_bytes`` of each device, smallest first.

    In this order: another policy (the one that repeats least), the loss in chunks, a fused attention, smaller
    micro-batches, more devices that share the state (ZeRO 1, then 3) or split the layers (tensor), a shorter sequence;
    of each the least that is enough. Where few are, each once more under full remat with the loss in chunks.

    Args:
        run: one that doesn't fit.
        hbm_bytes: device memory that a program may use.
        policies: that may be tried.

    Returns:
        Ways, none if nothing here is enough.

    >>> from jremat.estimator.config import TransformerConfig
    >>> config = TransformerConfig(vocab_size=1024, num_layers=8, hidden=256, heads=8, kv_heads=8, head_dim=32,
    ...                            mlp_hidden=1024, max_seq=512)
    >>> from jremat.policy.policy import NONE
    >>> run = TrainingStep(config=config, policy=NONE, batch=8, seq=512)
    >>> [way.change for way in ways_to_fit(run, 700_000_000, [FULL])][:2]
    ['--policy full', '--batch 2 --accumulate 4']
    """
    from jremat.estimator.transformer import ledger_of  # loads JAX, which no flag needs

    lasting = sum(line.device_bytes for line in ledger_of(run).lines if line.part == "state")
    shared = lasting > hbm_bytes  # fewer activations are not enough: more devices have to share the state
    single = [] if shared else _least(_policies(run, policies), hbm_bytes, cheapest=True)
    single += _others(run, hbm_bytes, shared)
    if len(single) >= _ENOUGH:
        return tuple(single)
    lean, words = replace(run, policy=FULL, stack="auto"), ["--policy full"] * (run.policy != FULL)
    if run.chunk is None and run.seq > _CHUNK:
        lean, words = replace(lean, chunk=_CHUNK), [*words, f"--loss-chunk {_CHUNK}"]
    if not words:
        return tuple(single)
    both = [] if shared else _least([(" ".join(words), lean)], hbm_bytes)
    if both and single:
        return tuple(single)  # less than this is enough
    others = _others(lean, hbm_bytes, shared)
    return (*single, *(both or [replace(way, change=f"{' '.join(words)} {way.change}") for way in others]))


def _others(run: TrainingStep, hbm_bytes: int, shared: bool) -> list[Way]:
    state = (_shards(run, "zero"), _shards(run, "fsdp"), _tensor(run))
    kinds = state if shared else (_chunks(run), _attention(run), _batches(run), *state, _sequences(run))
    return [way for kind in kinds for way in _least(kind, hbm_bytes)]


def _least(candidates: Iterable[tuple[str, TrainingStep]], hbm_bytes: int, *, cheapest: bool = False) -> list[Way]:
    """The first that fits, or of all that fit the one that repeats least; and none if none does."""
    from jremat.estimator.transformer import ledger_of  # loads JAX, which no flag needs

    found: list[Way] = []
    for change, run in candidates:
        try:
            ledger = ledger_of(run)
        except ValueError:
            continue  # such a change isn't possible here
        if ledger.peak_bytes <= hbm_bytes:
            found.append(Way(change, ledger.peak_bytes, ledger.recompute_flops / ledger.forward_flops))
            if not cheapest:
                break
    return sorted(found, key=lambda way: (way.recompute, way.peak_bytes))[:1]


def _policies(run: TrainingStep, policies: Iterable[Policy | LayerPlan]) -> Iterator[tuple[str, TrainingStep]]:
    for policy in policies:
        if policy != run.policy:
            yield f"--policy {policy.spec}", replace(run, policy=policy, stack="auto")


def _chunks(run: TrainingStep) -> Iterator[tuple[str, TrainingStep]]:
    if run.chunk is None and run.seq > _CHUNK:
        yield f"--loss-chunk {_CHUNK}", replace(run, chunk=_CHUNK)


def _attention(run: TrainingStep) -> Iterator[tuple[str, TrainingStep]]:
    if run.config.attention == "dot":
        yield "--attention blockwise", replace(run, config=replace(run.config, attention="blockwise"))


def _batches(run: TrainingStep) -> Iterator[tuple[str, TrainingStep]]:
    """Micro-batches of half and less, as many more of them that the step stays the same."""
    for parts in range(2, run.batch // run.parallel.batch_shards + 1):
        if run.batch % (parts * run.parallel.batch_shards) == 0:
            batch, accumulate = run.batch // parts, run.accumulate * parts
            yield f"--batch {batch} --accumulate {accumulate}", replace(run, batch=batch, accumulate=accumulate)


def _shards(run: TrainingStep, axis: Literal["zero", "fsdp"]) -> Iterator[tuple[str, TrainingStep]]:
    """Twice the devices and more that share the batch, which grows with them, and hold a shard of the state each."""
    p, each, more = run.parallel, run.batch // run.parallel.batch_shards, 1
    if axis == "zero" and p.zero:
        return
    while (more := 2 * more) * p.devices <= _MOST_DEVICES:
        changed = {"data": p.data * more, "zero": 1} if axis == "zero" else {"fsdp": p.fsdp * more}
        parallel: Parallel = replace(p, **changed)  # type: ignore[arg-type]
        batch = each * parallel.batch_shards
        yield f"--mesh {parallel} --batch {batch}", replace(run, parallel=parallel, batch=batch)


def _tensor(run: TrainingStep) -> Iterator[tuple[str, TrainingStep]]:
    for tensor in (2, 4, 8):  # beyond eight the links between machines are in the way
        if tensor > run.parallel.tensor:
            parallel = replace(run.parallel, tensor=tensor, sequence=True)
            yield f"--mesh {parallel}", replace(run, parallel=parallel)


def _sequences(run: TrainingStep) -> Iterator[tuple[str, TrainingStep]]:
    seq = run.seq
    while (seq := seq // 2) >= 1:
        yield f"--seq {seq}", replace(run, seq=seq)
