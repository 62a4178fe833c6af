"""How long the lint takes on 32 layers of Llama's 1B shapes, batch 1, 2048 tokens: traced, never compiled.

    python benchmarks/lint.py

Prints seconds of one core for a stack under a scan, under the chain, in groups, and unrolled with a remat a layer.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jremat.terminal.command_line import run
from scripts.startup import start_jax

start_jax()

import jax
import jax.numpy as jnp

import jremat
import models
import policies
from models import config as sizes
from models.remat import remat
from models.transformer import Block, init_params

CONFIG = replace(sizes.get("llama-1b"), num_layers=32)
TOKENS = jax.ShapeDtypeStruct((1, 2048), jnp.int32)


def unrolled(blocks: Any, x: jax.Array) -> jax.Array:
    """The blocks one after another in Python, each under a remat of its own."""
    block = Block(CONFIG)
    layer = jremat.checkpoint(lambda params, x: block.apply({"params": params}, x), policies.get("save_only_matmuls"))
    for i in range(CONFIG.num_layers):
        x = layer(jax.tree.map(lambda leaf, i=i: leaf[i], blocks), x)
    return x.astype(jnp.float32).sum()


def main() -> None:
    """Run and print."""
    params = jax.eval_shape(lambda: init_params(CONFIG, jax.random.key(0)))
    for spec, stack in (("save_only_matmuls", "scan"), ("save_only_matmuls", "chain"), ("every_k:4", "chain")):
        model = remat(policies.get(spec), CONFIG, stack).model(CONFIG)
        loss = lambda params, tokens, model=model: models.mean_loss(model, params, tokens, tokens)
        report(f"{spec}, {stack}", loss, params, TOKENS)
    x = jax.ShapeDtypeStruct((1, 2048, CONFIG.hidden), CONFIG.compute_dtype)
    report("save_only_matmuls, unrolled", unrolled, params["blocks"], x)


def report(name: str, f: Any, *args: Any) -> None:
    """One line: how long, and what was found."""
    began = time.process_time()
    found = jremat.lint(f, *args)
    rules = ", ".join(finding.rule for finding in found) or "nothing found"
    print(f"{name:<28} {time.process_time() - began:6.2f} s  {rules}", flush=True)


if __name__ == "__main__":
    run(lambda: main() or 0, "lint")
