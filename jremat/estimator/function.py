"""The training step of a block or a loss of one's own, for an estimate."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax

from jremat.estimator.parallel import Parallel
from jremat.estimator.traced import Run, Traced, trace_step
from jremat.policy.layers import LayerPlan
from jremat.policy.messages import near
from jremat.policy.policy import Policy
from jremat.policy.whole_number import whole_number
from jremat.transform.chain import stack as chained
from jremat.transform.checkpoint import checkpoint


def trace_function(
    f: Callable[..., Any],
    policy: Policy | LayerPlan | None,
    args: tuple[Any, ...],
    num_layers: int | None,
    **options: Any,
) -> Traced:
    """The step around ``f(params, *batch)``, or around ``num_layers`` of a block ``f(layer_params, carry, *shared)``.

    Args:
        f: a loss, a part of a model, or a block.
        policy: of each layer, or a plan over them; of a loss, of all of it; None as it is.
        args: shapes, in numbers or letters.
        num_layers: that a block is repeated; None: ``f`` is all.
        options: of ``train_step``.

    Raises:
        ValueError: a plan without layers, or arguments that are no parameters and what goes through them.
    """
    if not args or (num_layers is not None and len(args) < 2):
        needed = (
            "parameters first" if num_layers is None else "one layer's parameters, then what goes through the layers"
        )
        raise ValueError(f"args: expected shapes, {needed}, got {len(args)} arguments")
    shape = lambda leaf: jax.ShapeDtypeStruct(jax.numpy.shape(leaf), jax.numpy.result_type(leaf))
    args = jax.tree.map(shape, args)
    params, *batch = args
    if num_layers is None:
        if isinstance(policy, LayerPlan):
            raise ValueError(f"policy: {policy.spec!r} is a plan over layers; say of how many by num_layers")
        whole = f if policy is None else checkpoint(f, policy)
        out = jax.eval_shape(f, params, *batch)
        return trace_step(whole, params, tuple(batch), out, (whole, args), (f, args), 1, **options)
    whole_number("num_layers", num_layers)
    if isinstance(policy, LayerPlan):
        policy = policy.uniform(num_layers) or policy
    run = _layers(f, policy, num_layers)
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_layers, *x.shape), x.dtype), params)
    layers, layer = (run, (stacked, *batch)), (f, (params, *batch))
    return trace_step(run, stacked, tuple(batch), batch[0], layers, layer, num_layers, **options)


def _layers(f: Callable[..., Any], policy: Policy | LayerPlan | None, num_layers: int) -> Callable[..., Any]:
    if isinstance(policy, LayerPlan):
        return chained(f, policy, num_layers=num_layers)
    block = f if policy is None or policy.keeps_everything else checkpoint(f, policy)
    return lambda params, carry, *shared: lax.scan(lambda x, own: (block(own, x, *shared), None), carry, params)[0]


def run_of(
    traced: Traced, sizes: Mapping[str, int], parallel: Parallel, jax_version: str, num_layers: int | None
) -> Run:
    """The run at these sizes.

    Raises:
        ValueError: a letter without a number, a number without a letter, degrees that don't divide.
    """
    letters = traced.letters
    for name in sizes:
        if name not in letters:
            hint = near(name, letters, 1, 0.1)
            raise ValueError(f"sizes: {name!r} is no letter in the arguments' shapes{hint}")
        whole_number(f"sizes: {name}", sizes[name])
    missing = sorted(letters - sizes.keys())
    if missing:
        raise ValueError(f"sizes: expected a number for each letter, got none for {', '.join(missing)}")
    if parallel.pipeline > 1:
        raise ValueError("pipeline: a stage of a function of one's own is that function with fewer layers")
    parallel.check_sizes(sizes)
    own = {"L": num_layers or 1, **sizes}
    return Run(traced, sizes, parallel, jax_version, 0, num_layers or 1, traced.num_params.at(own))
