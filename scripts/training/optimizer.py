"""AdamW with warm-up, cosine and clipping."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from scripts.training.config import Run


def schedule(run: Run) -> optax.Schedule:
    """Learning rate of a step, counted from 0: a line up to its top, then a cosine to ``final_rate`` of it, then flat.

    The first step's is already above 0, and the last step of the schedule has the last rate.
    """
    top, last = run.optimizer.learning_rate, run.optimizer.final_rate
    cosine = optax.cosine_decay_schedule(top, run.decay_steps - run.warmup_steps, alpha=last)

    def rate(count: jax.Array) -> jax.Array:
        done = count + 1
        rising = top * done / max(run.warmup_steps, 1)
        return jnp.where(done <= run.warmup_steps, rising, cosine(done - run.warmup_steps))

    return rate


def optimizer(run: Run) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) after clipping by the global norm."""
    flags = run.optimizer
    return optax.chain(
        optax.clip_by_global_norm(flags.clip),
        optax.adamw(schedule(run), flags.beta1, flags.beta2, weight_decay=flags.weight_decay, mask=decayed),
    )


def decayed(params: Any) -> Any:
    """Which parameters decay: kernels and tables, not biases and norms (as GPT-2's and Llama's training code).

    Told by name, since the layers' parameters are stacked and a bias has as many axes as a matrix.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("bias", "scale"), params)
