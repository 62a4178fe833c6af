"""A case as a program: the step, the shapes of its arguments, and its FLOPs."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

import jremat
import policies
from jremat.estimator.config import TransformerConfig
from jremat.estimator.parallel import Parallel, read_mesh
from jremat.measure import target
from models.config import get
from models.remat import Remat, resolved
from models.sharding import Sharding
from models.transformer import Transformer, block_apply, init_params, mean_loss
from scripts.benchmark.config import Case
from scripts.flags import MOST_TOKENS, dtype_on
from scripts.training.cost import model_flops


@dataclass(frozen=True)
class Built:
    """A step that can be compiled for any target.

    Attributes:
        step: jitted; ``step(state, tokens) -> (state, loss)``, the state donated, for ``train``; for ``gradient``
            ``step(params, tokens) -> (loss, gradient)``.
        state, tokens: shapes of its arguments, sharded where the target is several devices.
        config: the model's.
        policy: what the spec came to.
        stack: ``scan`` or ``chain``.
    """

    step: Any
    state: Any
    tokens: jax.ShapeDtypeStruct
    config: TransformerConfig
    policy: str
    stack: str
    model: Transformer
    optimizer: optax.GradientTransformation | None


def build(case: Case) -> Built:
    """The program of a case.

    Raises:
        ValueError: an unknown model or policy, a plan that does not fit, a sequence beyond the model's context.
    """
    config = config_of(case)
    seq = seq_of(case, config)
    if seq > config.max_seq:
        raise ValueError(f"seq: {case.model} takes at most {config.max_seq} tokens, got {seq}")

    def step(chosen: Remat) -> tuple[Any, tuple[Any, Any]]:
        built = built_under(case, chosen)
        return built.step, (built.state, built.tokens)

    policy, block = policies.get(case.policy), layer_of(case)
    chosen = resolved(policy, config, case.batch, seq, case.stack, case.target, step, block)
    return built_under(case, chosen)


def built_under(case: Case, chosen: Remat) -> Built:
    """The program of a case, whose layers run under ``chosen``."""
    config = config_of(case)
    seq = seq_of(case, config)
    sharding = sharding_of(case)
    model = chosen.model(config, sharding)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    adamw = optax.adamw(1e-4)
    optimizer = adamw if case.step == "train" else None

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return mean_loss(model, params, tokens[:, :-1], tokens[:, 1:], chunk=case.loss_chunk or None)

    state = (params, jax.eval_shape(optimizer.init, params)) if optimizer else params
    tokens = jax.ShapeDtypeStruct((case.batch, seq + 1), jnp.int32)
    kept = lambda result: result
    if sharding is not None:
        role = ("weights", "optimizer state") if optimizer else ("gradients",)
        parts = state if optimizer else (state,)
        layouts = tuple(map(sharding.tree, parts, role))
        laid = lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
        cut: Any = layouts if optimizer else layouts[0]
        state = jax.tree.map(laid, state, cut)
        tokens = laid(tokens, NamedSharding(sharding.mesh, sharding.batch))
        # The new state, or the gradient: XLA may lay results out otherwise, or not at all.
        kept = lambda result: jax.lax.with_sharding_constraint(result, cut)
    gradients = lambda tree: tree if sharding is None else sharding.constrain_tree(tree, "gradients")

    def train(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, inner = state
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, inner = adamw.update(gradients(gradient), inner, params)
        return kept((optax.apply_updates(params, updates), inner)), value

    def gradient(params: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        return value, kept(gradient)

    step = jax.jit(train, donate_argnums=0) if optimizer else jax.jit(gradient)
    return Built(step, state, tokens, config, chosen.policy.spec, chosen.stack, model, optimizer)


def config_of(case: Case) -> TransformerConfig:
    """The model's config with the case's changes; no dropout, as in pretraining today.

    Raises:
        ValueError: cuDNN's attention on what is no NVIDIA GPU.
    """
    config = get(case.model)
    platform = target(case.target).platform
    platform = jax.default_backend() if platform == "local" else platform
    if case.attention == "cudnn" and platform not in ("cuda", "gpu"):
        raise ValueError(f"attention: cudnn needs an NVIDIA GPU, target {case.target!r} is none; use blockwise")
    changed: dict[str, Any] = {"attention": case.attention, "dropout": 0.0}
    changed["compute_dtype"] = dtype_on(case.compute_dtype, platform)
    return replace(config, num_layers=case.layers or config.num_layers, **changed)


def seq_of(case: Case, config: TransformerConfig) -> int:
    """Tokens in a sequence of the case."""
    return case.seq or min(config.max_seq, MOST_TOKENS)


def initial(built: Built) -> tuple[Any, jax.Array]:
    """State and tokens to run the step on: fresh parameters, random tokens."""

    def make() -> Any:
        params = init_params(built.config, jax.random.key(0))
        return (params, built.optimizer.init(params)) if built.optimizer else params

    tokens = np.random.default_rng(0).integers(0, built.config.vocab_size, built.tokens.shape, np.int32)
    return jax.jit(make)(), jnp.asarray(tokens)


def flops_of(built: Built, case: Case) -> dict[str, int]:
    """FLOPs of one step: model FLOPs by both conventions in closed form, recompute and the whole counted."""
    batch, seq = built.tokens.shape[0], built.tokens.shape[1] - 1
    params = built.state[0] if built.optimizer else built.state

    def gradient(params: Any, tokens: jax.Array) -> Any:
        loss = lambda p: mean_loss(built.model, p, tokens[:, :-1], tokens[:, 1:], chunk=case.loss_chunk or None)
        return jax.value_and_grad(loss)(params)

    bare = lambda tree: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    counted = jremat.flops(gradient, bare(params), bare(built.tokens))
    needed = model_flops(built.config, batch * seq, seq)
    return {
        "model_flops": needed.full,
        "model_flops_half": needed.half,
        "counted_model_flops": counted.model,
        "recompute_flops": counted.recompute,
        "total_flops": counted.total,
    }


def sharding_of(case: Case) -> Sharding | None:
    """How the step is spread over the target's devices: as the case says, or by FSDP over all of them.

    Raises:
        ValueError: a mesh of another number of devices, or one that doesn't divide the model or the batch.
    """
    devices = target(case.target).num_devices
    parallel = read_mesh(case.mesh) if case.mesh else Parallel(fsdp=devices)
    if parallel.devices != devices:
        raise ValueError(f"mesh: {parallel} takes {parallel.devices} devices, the target {case.target} has {devices}")
    if devices == 1:
        return None
    config, sharding = config_of(case), Sharding(parallel)
    sharding.check(config, case.batch, seq_of(case, config))
    return sharding


def layer_of(case: Case) -> Any:
    """One layer as the executor of stacks runs it in ``build``'s step: what a planner plans."""
    return block_apply(config_of(case), sharding=sharding_of(case))
