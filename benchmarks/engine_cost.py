"""What the engine's answers cost beside JAX's own trace of the gradient, and that depth costs nothing.

    python benchmarks/engine_cost.py

Times are paired: each round traces the gradient and asks the engine, on fresh functions so that no trace is found
again; the medians' ratio is what counts.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp

import jremat
from jremat.terminal.command_line import run
from models import config as sizes
from models.transformer import Transformer, init_params, mean_loss

ROUNDS = 7


def case(num_layers: int) -> tuple[Callable[[], Callable[..., Any]], tuple[Any, ...]]:
    """A maker of fresh losses of a scanned transformer, and the shapes to call them with."""
    config = replace(sizes.get("tiny-llama"), num_layers=num_layers)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32)

    def fresh() -> Callable[..., Any]:
        model = Transformer(config)
        return lambda params, tokens, targets: mean_loss(model, params, tokens, targets)

    return fresh, (params, tokens, tokens)


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(num_layers: int) -> tuple[float, float]:
    """Median seconds of one trace of the gradient, and of the engine's trace and residuals."""
    fresh, args = case(num_layers)
    gradient, engine = [], []
    for _ in range(ROUNDS):
        f = fresh()
        gradient.append(seconds(lambda f=f: jax.make_jaxpr(jax.value_and_grad(f))(*args)))
        g = fresh()
        engine.append(seconds(lambda g=g: (jremat.trace(g, *args), jremat.residuals(g, *args))))
    return statistics.median(gradient), statistics.median(engine)


def main() -> None:
    print(f"jax {jax.__version__}; {ROUNDS} rounds; tiny-llama, scanned")
    print("| layers | make_jaxpr of the gradient, ms | trace + residuals, ms | ratio |")
    print("|---|---|---|---|")
    for num_layers in (6, 24, 96):
        gradient, engine = measure(num_layers)
        print(f"| {num_layers} | {gradient * 1e3:.0f} | {engine * 1e3:.0f} | {engine / gradient:.2f} |")


if __name__ == "__main__":
    run(lambda: main() or 0, "engine_cost")
