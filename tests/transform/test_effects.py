"""Effects that a rerun would repeat are refused with their line; what a function does to its own Refs is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.experimental import io_callback

import jremat
import policies
from jremat.policy import FULL

X, POINTWISE = jnp.float32(1.0), policies.get("ops:pointwise")


def count_and_scale(x, ref):
    out = jnp.sin(x * ref[...])
    ref[...] += 1.0
    return out


def ref_to_one():
    return jax.new_ref(jnp.float32(1.0))


def closing_over(ref):
    """One function for each place in which a Ref can stand."""
    touch = lambda x: count_and_scale(x, ref)
    return {
        "plain": touch,
        "read alone": lambda x: jnp.sin(x * ref[...]),
        "scan": lambda x: lax.scan(lambda x, _: (touch(x), None), x, None, length=2)[0],
        "cond": lambda x: lax.cond(x > 0, touch, jnp.sin, x),
        "loop": lambda x: lax.fori_loop(0, 2, lambda _, x: touch(x), x),
        "jit": jax.jit(touch),
        "remat": jax.checkpoint(touch),
    }


@pytest.mark.parametrize("policy", [FULL, POINTWISE])
@pytest.mark.parametrize("place", closing_over(None))
def test_a_ref_that_a_function_closes_over_is_refused_with_its_line(place, policy):
    ref = ref_to_one()
    f = jremat.checkpoint(closing_over(ref)[place], policy, strict=False)
    for call in (f, jax.grad(f), jax.jit(f)):
        with pytest.raises(
            ValueError, match=r"f: expected no Ref .* Ref\{float32\[\]\} that it closes over at test_eff"
        ):
            call(X)
    assert ref[...] == 1.0, "nothing was run"


@pytest.mark.parametrize("policy", [FULL, POINTWISE])
def test_a_ref_among_the_arguments_is_refused_by_its_path(policy):
    ref = ref_to_one()
    with pytest.raises(ValueError, match=r"Ref\{float32\[\]\} argument 1 at test_effects.py:\d+ \(count_and_scale\)"):
        jax.grad(jremat.checkpoint(count_and_scale, policy, strict=False))(X, ref)
    with pytest.raises(ValueError, match=r"argument 0\['ref'\] at test_effects.py"):
        jremat.checkpoint(lambda given: count_and_scale(**given), policy, strict=False)({"x": X, "ref": ref})
    with pytest.raises(ValueError, match=r"argument 1 at test_effects.py"):
        jremat.remat(count_and_scale, policy, strict=False)(X, ref)


def test_all_that_reads_or_plans_a_remat_refuses_it_too():
    ref = ref_to_one()
    for call in (
        lambda: jremat.residuals(count_and_scale, X, ref, policy=FULL),
        lambda: jremat.explain(count_and_scale, X, ref, policy=FULL),
        lambda: jremat.explain(count_and_scale, X, ref),
        lambda: jremat.lint(count_and_scale, X, ref, policy=FULL),
        lambda: jremat.replay(count_and_scale, X, ref),
        lambda: jremat.replay(count_and_scale, X, ref, policy=FULL),
        lambda: jremat.plan(count_and_scale, X, ref, hbm_bytes=2**20, target="cpu"),
    ):
        with pytest.raises(ValueError, match=r"argument 1 at test_effects.py"):
            call()
    block = lambda w, x, ref: count_and_scale(w * x, ref)
    for policy in (FULL, jremat.NONE, policies.get("every_k:2")):
        run = jremat.stack(block, policy, num_layers=4)
        with pytest.raises(ValueError, match=r"block: expected no Ref .* argument 2 at test_effects.py"):
            run(jnp.ones(4), X, ref)
    with pytest.raises(ValueError, match=r"block: expected no Ref .* argument 2 at test_effects.py"):
        jremat.replay(block, jnp.ones(4), X, ref, policy=FULL, num_layers=4)
    assert ref[...] == 1.0, "nothing was run"


@pytest.mark.parametrize("ordered", [False, True])
def test_a_callback_that_must_happen_once_is_refused(ordered):
    def f(x):
        io_callback(lambda value: None, None, lax.stop_gradient(x), ordered=ordered)
        return jnp.sin(jnp.sin(x))

    for call in (
        lambda: jremat.checkpoint(f, FULL)(X),
        lambda: jremat.residuals(f, X, policy=FULL),
        lambda: jremat.stack(lambda w, x: f(w * x), FULL, num_layers=2)(jnp.ones(2), X),
    ):
        with pytest.raises(ValueError, match=r"got io_callback at test_effects.py:\d+ \(f\).*jax.debug.callback"):
            call()
    assert jremat.checkpoint(f, jremat.NONE) is f, "without remat it happens once"


def test_what_jax_lets_through_runs_as_under_its_own_remat(capfd):
    def printing(ordered):
        def f(x):
            jax.debug.print("seen {}", x, ordered=ordered)
            return jnp.sin(jnp.sin(x))

        return f

    for ordered in (False, True):
        seen = []
        for remat in (jax.checkpoint, lambda f: jremat.checkpoint(f, FULL)):
            gradient = jax.grad(remat(printing(ordered)))(X)
            jax.effects_barrier()
            seen.append((float(gradient), capfd.readouterr().out.count("seen 1.0")))
        assert seen[0] == seen[1] and seen[0][1] >= 1

    pure = lambda x: jnp.sin(x * jax.pure_callback(np.cos, x, lax.stop_gradient(x)))
    assert jnp.allclose(jax.grad(jremat.checkpoint(pure, FULL))(X), jax.grad(pure)(X))


def accumulate(x):
    ref = jax.new_ref(jnp.zeros(()))  # constant, so that JAX's own remat can't differentiate what is written
    ref[...] = jnp.sin(x)
    ref[...] += ref[...] * x
    return jnp.sin(ref[...] * x)


def accumulate_by_hand(x):
    y = jnp.sin(x)
    return jnp.sin((y + y * x) * x)


# JAX's own gradient of some of these is an internal error or 0: that is no measure.
LOCAL = {
    "plain": lambda f: f,
    "scan": lambda f: lambda x: lax.scan(lambda x, _: (f(x), None), x, None, length=2)[0],
    "cond": lambda f: lambda x: lax.cond(x > 0, f, jnp.sin, x),
    "jit": jax.jit,
    "remat": jax.checkpoint,
}


@pytest.mark.parametrize("policy", [FULL, POINTWISE], ids=["full", "pointwise"])
@pytest.mark.parametrize("place", LOCAL)
def test_a_ref_that_a_function_makes_for_itself_is_a_value_of_its_own(place, policy):
    by_hand = jax.value_and_grad(LOCAL[place](accumulate_by_hand))(X)
    found = jax.value_and_grad(jremat.checkpoint(LOCAL[place](accumulate), policy, strict=False))(X)
    assert jnp.allclose(jnp.array(found), jnp.array(by_hand), rtol=1e-5)


def test_a_local_ref_is_kept_and_recomputed_as_the_values_that_it_holds():
    def kept(f, policy):
        return jremat.residuals(f, X, policy=policy).total_bytes

    assert kept(accumulate, FULL) == kept(accumulate_by_hand, FULL) == 0
    assert kept(accumulate, POINTWISE) == kept(accumulate_by_hand, POINTWISE) > 0
    block = lambda w, x: accumulate(w * x)
    run = lambda call: jax.grad(lambda w: jremat.stack(call, FULL, num_layers=3)(w, X))(jnp.ones(3))
    assert jnp.allclose(run(block), run(lambda w, x: accumulate_by_hand(w * x)), rtol=1e-6)
    assert jremat.replay(block, jnp.ones(3), X, policy=FULL, num_layers=3).equal
    assert jremat.plan(accumulate, X, hbm_bytes=2**20, target="cpu").policy is not None


@pytest.mark.parametrize("kind", [{"hijax": False, "ref": True}, {"hijax": True, "ref": True}])
def test_nnx_variables_that_are_refs_are_refused(kind):
    with nnx.var_defaults(**kind):
        layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"argument 0.*an effect that a rerun|argument 0.*are effects that a rerun"):
        jremat.remat(layer, FULL)(jnp.ones((2, 4)))


def test_a_ref_that_is_handed_over_and_not_read_is_refused_by_its_path():
    unread = lambda x, ref: jnp.sin(x)
    for call in (
        lambda ref: jremat.checkpoint(unread, FULL)(X, ref),
        lambda ref: jremat.stack(lambda p, x, ref: jnp.sin(x), FULL, num_layers=2)((), X, ref),
        lambda ref: jremat.replay(unread, X, ref, policy=FULL),
    ):
        with pytest.raises(ValueError, match=r"expected no Ref from outside, got one at argument"):
            call(ref_to_one())
