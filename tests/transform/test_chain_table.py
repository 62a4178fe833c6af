"""Every kind of plan in every mode of differentiation: a scan's numbers, and one warning where it runs as scans."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import policies
from jremat.policy import FULL, NONE, LayerPlan, Segment, tag
from jremat.transform.chain import stack
from tests.transform.chain_case import SCALE, X, block, largest_error, weights

L = 5
SPECS = (
    "none",
    "full",
    "save:up",
    "every_k:2",
    "every_k:3,full",
    "alternate:2",
    "block:2",
    "revolve:2",
    "offload_inputs",
    "every_k:2,offload_inputs",
    "mix:2*none,rest*every_k:2",
)
PLANS = {spec: policies.get(spec) for spec in SPECS} | {
    "none, then revolve": LayerPlan((Segment((NONE,), 2), Segment((FULL,), 3, slots=2)), label="none, then revolve"),
    "revolve, then none": LayerPlan((Segment((FULL,), 3, slots=1), Segment((NONE,), 2)), label="revolve, then none"),
}


def named(p, x, scale):
    """Bears the name of a layer's input, which is then what some plans keep in its place."""
    return block(p, tag(x, "block_in"), scale)


def anew(block):
    """A block that no trace is cached for: the warning comes with the first trace of a block under a plan."""
    return lambda *args: block(*args)


def scanned(p, x, scale):
    return lax.scan(lambda x, p: (named(p, x, scale), None), x, p)[0]


P = weights(L)
REAL = {n: P[n] for n in ("in", "out")}


def output(run):
    """The last carry by real parameters, carry and what the layers share."""
    return lambda real, x, scale: run(real | {"key": P["key"]}, x, scale)


def total(f):
    return lambda *args: (f(*args) ** 2).sum()


def moved(args):
    return jax.tree.map(jnp.cos, args)


def slopes(f):
    return jax.grad(total(f), (0, 1, 2))


def linearized(f, *args):
    out, push = jax.linearize(f, *args)
    return out, push(*moved(args)), push(*args)


def twice(f, *args):
    return jax.grad(lambda *args: sum((g**2).sum() for g in jax.tree.leaves(slopes(f)(*args))), (0, 1, 2))(*args)


AS_SCANS = {
    "jvp": lambda f, *args: jax.jvp(f, args, moved(args)),
    "linearize": linearized,
    "grad of grad": twice,
    "hessian": lambda f, real, x, scale: jax.hessian(lambda scale: total(f)(real, x, scale))(scale),
}
OWN_LOOPS = {
    "vmap of grad": lambda f, real, x, scale: jax.vmap(slopes(f), (None, 0, None))(real, jnp.stack([x, -x]), scale),
}
MODES = AS_SCANS | OWN_LOOPS


def heard(run, mode):
    """What ``run()`` returns; the stack must say that it runs as scans once in modes that do, and never in others."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message=".*which the cpu backend ignores")
        found = run()
    assert all(" as scans, which " in str(w.message) for w in said), [str(w.message) for w in said]
    assert len(said) == (mode in AS_SCANS)
    return found


@functools.cache
def expected(mode):
    return jax.jit(functools.partial(MODES[mode], output(scanned)))(REAL, X, SCALE)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plan", PLANS)
def test_compiled(plan, mode):
    f = jax.jit(output(stack(anew(named), PLANS[plan], num_layers=L)))
    program = jax.jit(functools.partial(MODES[mode], f))
    found = heard(lambda: program.lower(REAL, X, SCALE).compile(), mode)(REAL, X, SCALE)
    assert largest_error(found, expected(mode)) <= 3e-6


@pytest.mark.parametrize("mode", MODES)
def test_op_by_op(mode):
    f = output(stack(anew(named), PLANS["none"], num_layers=L))
    found = heard(lambda: MODES[mode](f, REAL, X, SCALE), mode)
    assert largest_error(found, expected(mode)) <= 3e-6
