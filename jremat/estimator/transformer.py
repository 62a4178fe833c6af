"""The ledger of a training run, read off its program: traced once with letters for its sizes, numbers put in after."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import jax

from jremat.estimator.collectives import Spread
from jremat.estimator.config import TransformerConfig
from jremat.estimator.decoder.model import plain_block
from jremat.estimator.decoder.stage import Stage, block_shapes, first_alike, lettered, numbers_of
from jremat.estimator.function import run_of, trace_function
from jremat.estimator.ledger import Ledger, Optimizer
from jremat.estimator.parallel import Parallel
from jremat.estimator.step import OPTIMIZERS
from jremat.estimator.traced import Run, Traced, trace_step
from jremat.estimator.training_step import TrainingStep
from jremat.policy.layers import LayerPlan, NeedsShapes
from jremat.policy.policy import Policy
from jremat.policy.whole_number import whole_number

CALIBRATED_ON = "0.10.2"
"""The version of JAX whose compiler is taken where none is named."""


def estimate(
    model: TransformerConfig | Callable[..., Any],
    policy: Policy | LayerPlan | None = None,
    *args: Any,
    batch: int = 1,
    seq: int = 0,
    num_layers: int | None = None,
    sizes: Mapping[str, int] | None = None,
    chunk: int | None = None,
    optimizer: Optimizer = "adamw",
    master_weights: bool = False,
    accumulate: int = 1,
    parallel: Parallel | None = None,
    stack: Literal["auto", "scan", "chain"] = "auto",
    jax_version: str = CALIBRATED_ON,
) -> Ledger:
    """The memory of one training step, line by line, read off its program.

    The step is traced once, with letters for its sizes, and kept for the next estimate of the same kind; what is asked
    for is put in their place. Kept for the backward pass is what ``jremat.residuals`` counts, to the byte; the peak is
    that of ``jremat.predicted_memory`` on one device and rests on the ledger's ``assumptions``. Nothing is compiled.

    Args:
        model: a decoder's config, or a function of one's own: a loss ``f(params, *batch)``, or with ``num_layers`` a
            block ``f(layer_params, carry, *shared)`` to the next carry.
        policy: of every layer, or a plan over the layers (of each pipeline stage).
        args: of a function alone: its arguments, parameters first, by shape. A size may be a letter
            (``jax.export.symbolic_shape``); those that devices split are called b (batch), s (sequence), n and m (heads
            of queries, of keys and values), f (MLP width) and v (vocabulary).
        batch: sequences that go through a decoder at a time, over all data replicas.
        seq: tokens of each, at most ``config.max_seq`` where positions are learned.
        num_layers: how often a block is repeated.
        sizes: of a function alone: the number for each letter.
        chunk: of a decoder: positions whose logits are alive at a time; None keeps all logits.
        optimizer: ``adamw`` (two moments), ``momentum`` (one) or ``sgd`` (none); moments have the dtype of what they
            update, as optax makes them: the weights, or their float32 masters.
        master_weights: a float32 copy of weights that are bfloat16.
        accumulate: micro-batches of one step; above 1 there is a float32 sum of their gradients.
        parallel: degrees of parallelism; None: one device.
        stack: ``auto`` takes a scan where one policy holds for all layers and the executor elsewhere, as training does;
            ``scan`` and ``chain`` insist. Of a decoder.
        jax_version: by whose compiler the peak is reckoned, e.g. ``0.12.0``; what is kept is the same.

    Returns:
        The ledger of the device where the peak is highest.

    Raises:
        ValueError: an argument out of range, degrees that don't divide, a policy that doesn't fit the block or a plan
            that doesn't fit the layers.

    >>> from jremat.policy import FULL, NONE
    >>> config = TransformerConfig(vocab_size=256, num_layers=4, hidden=64, heads=4, kv_heads=4, head_dim=16,
    ...                            mlp_hidden=256, max_seq=128)
    >>> full, none = (estimate(config, p, batch=2, seq=128) for p in (FULL, NONE))
    >>> full.kept_bytes, none.kept_bytes  # 4 b s h L, and (64 b s h + 4 b n s² + 16 b s) L
    (262144, 6307840)
    >>> full.kept[0].formula
    '4·L·b·h·s'
    >>> import jax, jax.numpy as jnp
    >>> b, h, f = jax.export.symbolic_shape("b, h, f")
    >>> weights = {"up": jax.ShapeDtypeStruct((h, f), "float32"), "down": jax.ShapeDtypeStruct((f, h), "float32")}
    >>> mlp = lambda w, x: x + jnp.sin(x @ w["up"]) @ w["down"]
    >>> ledger = estimate(mlp, FULL, weights, jax.ShapeDtypeStruct((b, h), "float32"), num_layers=3,
    ...                   sizes={"b": 8, "h": 16, "f": 64})
    >>> [(line.formula, line.total_bytes) for line in ledger.kept]
    [('4·L·b·h', 1536)]
    """
    p = parallel or Parallel()
    _check_options(policy, optimizer, accumulate)
    if isinstance(model, TransformerConfig):
        if policy is None:
            raise ValueError("policy: expected a Policy or a LayerPlan, e.g. policies.get('full'), got None")
        step = TrainingStep(
            config=model, policy=policy, batch=batch, seq=seq, chunk=chunk, optimizer=optimizer,
            master_weights=master_weights, accumulate=accumulate, parallel=p, stack=stack,
        )  # fmt: skip
        return ledger_of(step, jax_version)
    if not callable(model):
        raise ValueError(f"model: expected a TransformerConfig or a function, got {model!r}")
    how: dict[str, Any] = {"optimizer": optimizer, "master_weights": master_weights, "accumulate": accumulate}
    traced = trace_function(model, policy, args, num_layers, **how)
    return run_of(traced, sizes or {}, p, jax_version, num_layers).ledger()


def ledger_of(step: TrainingStep, jax_version: str = CALIBRATED_ON) -> Ledger:
    """The ledger of the device where the peak of ``step`` is highest.

    Raises:
        ValueError: as ``estimate``.
    """
    return max((run.ledger() for run in runs(step, jax_version)), key=lambda ledger: ledger.peak_bytes)


def runs(step: TrainingStep, jax_version: str = CALIBRATED_ON) -> tuple[Run, ...]:
    """The traced steps of the stages that may have the highest peak: the first and the last of the pipeline.

    ``Run.peak_bytes`` is the peak under any other layout of the same stages, a substitution.

    Raises:
        ValueError: as ``estimate``.
    """
    config, policy, seq, p = step.config, step.policy, step.seq, step.parallel
    _check_options(policy, step.optimizer, step.accumulate)
    step.check()
    found = []
    for stage in sorted({0, p.pipeline - 1}):
        layers = p.layers_on(stage, config.num_layers)
        chosen: Policy | LayerPlan = policy
        if step.stack != "chain" and isinstance(policy, LayerPlan):
            chosen = policy.uniform(layers) or policy  # a plan of one policy needs no executor
        chain = step.stack == "chain" or isinstance(chosen, LayerPlan)
        if chain and step.stack == "scan":
            raise ValueError(f"stack: a scan runs one policy for all layers, {policy.spec!r} has several")
        chunk = step.chunk and min(step.chunk, seq)
        part = Stage(_kind(config, layers, seq), chosen, chain, chunk, stage == 0, stage == p.pipeline - 1)
        constraints = _constraints(part, seq)
        if isinstance(chosen, Policy):
            part = replace(part, policy=first_alike(part.config, constraints, chosen))
        traced = _traced(part, constraints, step.optimizer, step.master_weights, step.accumulate)
        found.append(_run(config, part, traced, step.batch, seq, stage, p, jax_version))
    return tuple(found)


def _kind(config: TransformerConfig, layers: int, seq: int) -> TransformerConfig:
    """The config with the least sizes that have its kinds: equal for all that share a trace."""
    c = config
    if c.attention == "cudnn":  # a kernel of NVIDIA's keeps the same, and needs no array a block of keys
        c = replace(c, attention="blockwise", attention_block=1)
    elif c.attention == "blockwise":
        c = replace(c, attention_block=min(c.attention_block, -(-seq // 2)))
    else:
        c = replace(c, attention_block=1)
    return replace(
        c, vocab_size=1, num_layers=layers, hidden=1, heads=c.group, kv_heads=1, head_dim=2, mlp_hidden=1, max_seq=1
    )  # fmt: skip


def _constraints(stage: Stage, seq: int) -> tuple[str, ...]:
    """What holds for the sequence and what JAX couldn't decide without: whole blocks and chunks."""
    blocks = {stage.config.attention_block} if stage.config.attention == "blockwise" else set()
    blocks |= {stage.chunk} if stage.chunk else set()
    return tuple(sorted(f"s >= {n}" for n in blocks)) + tuple(
        sorted(f"mod(s,{n}) == 0" for n in blocks if seq % n == 0)
    )


@functools.lru_cache(maxsize=256)
def _traced(
    stage: Stage, constraints: tuple[str, ...], optimizer: str, master_weights: bool, accumulate: int
) -> Traced:
    config, letters = lettered(stage.config, constraints)
    params, batch = stage.params(config), stage.batch(config, letters["b"], letters["s"])
    _, stream, key, _ = layer = block_shapes(config, letters["b"], letters["s"])
    out = jax.ShapeDtypeStruct((), "float32") if stage.last else stream
    return trace_step(
        stage.apply(config), params, batch, out, (stage.layers(config), (params["blocks"], stream, key)),
        (plain_block(config), layer), config.num_layers, optimizer=optimizer, master_weights=master_weights,
        accumulate=accumulate, chunked=stage.chunk is not None,
    )  # fmt: skip


def _run(
    config: TransformerConfig, part: Stage, traced: Traced, batch: int, seq: int, stage: int, p: Parallel, version: str
) -> Run:
    numbers = numbers_of(config, batch, seq)
    run = Run(
        traced, numbers, p, version, stage, config.num_layers, config.num_params(), None, config.group > 1,
        (f"layers run by {'the stack executor' if part.chain else 'a scan'}",),
    )  # fmt: skip
    # The matmuls that make keys and values, 2·b·s·h·m·d FLOPs each; with one group a head query and output's too.
    projected = dict(traced.recompute.terms).get(("b", "d", "h", "m", "s"), 0)
    held, again = traced.num_params.at(run.own), projected >= 2 * 2 * traced.num_layers
    return replace(run, spread=Spread(config, p, run.own, part.chunk, held, traced.moments, again))


def _check_options(policy: object, optimizer: str, accumulate: int) -> None:
    if isinstance(policy, NeedsShapes):
        raise ValueError(
            f"policy: {policy.spec!r} needs shapes before it is a policy; resolve it first: "
            "policies.get(spec).resolve(block, *args, num_layers=L)"
        )
    if not isinstance(policy, Policy | LayerPlan | None):
        raise ValueError(f"policy: expected a Policy or a LayerPlan, e.g. policies.get('full'), got {policy!r}")
    whole_number("accumulate", accumulate)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer: expected {' or '.join(map(repr, OPTIMIZERS))}, got {optimizer!r}")
