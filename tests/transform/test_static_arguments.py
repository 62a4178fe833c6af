"""Which arguments are held fixed: by name, by position, and all that is no array; errors name the user's parameter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jremat
from jremat.policy import FULL

X = jnp.ones(3)


def wave(x, flag, mode="sin"):
    return jnp.sin(x) if flag and mode == "sin" else jnp.cos(x)


class TestErrors:
    @pytest.mark.parametrize("static", [{}, {"static_argnames": "flag"}, {"static_argnums": 1}])
    def test_a_traced_flag_is_named_with_the_cure(self, static):
        with pytest.raises(ValueError, match=r"flag: wave reads the value in Python.*static_argnames='flag'"):
            jax.jit(lambda x, flag: jremat.checkpoint(wave, FULL, **static)(x, flag, mode="sin"))(X, True)

    @pytest.mark.parametrize(
        "f",
        [
            lambda x, n: x.reshape(n, -1),
            lambda x, n: x.sum(n),
            lambda x, n: sum(x for _ in range(n)),
            lambda x, n: x * float(n),
            lambda x, n: x * np.asarray(n),
        ],
    )
    @pytest.mark.parametrize("mode", [(), ("mode",)])
    def test_every_way_of_reading_a_value_is_explained(self, f, mode):
        def named(x, n, *mode):
            return f(x, n)

        for call in (jremat.checkpoint(named, FULL), lambda *args: jremat.residuals(named, *args)):
            with pytest.raises(ValueError, match=r"\bn\b.*: named reads the value in Python.*static_argnames="):
                call(X, 1, *mode)

    def test_a_block_of_a_stack_a_measured_step_and_a_slice_too(self):
        def block(w, x, n):
            return sum(jnp.sin(x * w) for _ in range(n))

        for call in (
            lambda: jremat.stack(block, FULL, num_layers=3)(X, X, 2),
            lambda: jremat.compiled_memory(block, X, X, 2, target="cpu"),
            lambda: jremat.checkpoint(lambda x, n: jnp.sin(x)[:n], FULL)(X, 2),
        ):
            with pytest.raises(ValueError, match=r"n: .*reads the value in Python.*functools\.partial"):
                call()
        fixed = jremat.stack(functools.partial(block, n=2), FULL, num_layers=3)(X, X)
        assert fixed.shape == X.shape

    def test_what_is_read_of_a_pytree_or_of_several_is_named_too(self):
        def f(config, a, b):
            return jnp.sin(a) if config["n"] > 1 else a + b

        with pytest.raises(ValueError, match=r"config: f reads .*static_argnames='config'"):
            jremat.checkpoint(f, FULL)({"n": 1, "kind": "x"}, X, X)
        with pytest.raises(ValueError, match=r"a, b: g reads .*static_argnames=\('a', 'b'\)"):
            jremat.checkpoint(g, FULL)(X, 1.0, 2.0)

    def test_an_error_of_another_kind_is_left_alone(self):
        with pytest.raises(TypeError, match=r"dot_general|contracting"):
            jremat.checkpoint(lambda x, flag: x @ jnp.ones((5, 5)), FULL)(X, True)


def g(x, a, b):
    return x if a > b else -x


class TestNames:
    def test_the_name_of_varargs_stands_for_all_of_them(self):
        def f(x, *flags, **more):
            return jnp.sin(x) if flags[0] == 1 and more["power"] == 2 else jnp.cos(x)

        fixed = jremat.checkpoint(f, FULL, static_argnames=("flags", "more"))
        assert jnp.allclose(fixed(X, 1, 0, power=2), jnp.sin(X))

    def test_a_name_that_no_parameter_has_is_refused_with_a_near_one(self):
        with pytest.raises(ValueError, match=r"static_argnames: expected parameters of wave \(x, flag, mode\).*'flag'"):
            jremat.checkpoint(wave, FULL, static_argnames="flga")(X, True)
        with pytest.raises(ValueError, match=r"static_argnames: .*'deterministik'.*did you mean 'deterministic'"):
            open_ended = lambda x, deterministic=True, **more: x
            jremat.checkpoint(open_ended, FULL, static_argnames="deterministik")(X)

    def test_positional_only_keyword_only_partial_and_bound_parameters(self):
        def f(x, n, /, *, power):
            return jnp.sin(x) ** power if n == 2 and power == 3 else jnp.cos(x)

        class Holder:
            def method(self, x, n):
                return x.reshape(n, -1)

        expected = jnp.sin(X) ** 3
        assert jnp.allclose(jremat.checkpoint(f, FULL, static_argnames=("n", "power"))(X, 2, power=3), expected)
        third = functools.partial(f, power=3)
        assert jnp.allclose(jremat.checkpoint(third, FULL, static_argnames=("n", "power"))(X, 2), expected)
        assert jremat.checkpoint(Holder().method, FULL, static_argnames="n")(X, 3).shape == (3, 1)
        assert jremat.checkpoint(Holder().method, FULL, static_argnums=1)(X, 3).shape == (3, 1)

    def test_what_can_not_be_hashed_may_be_static(self):
        f = lambda x, axes: x.sum(tuple(axes))
        assert jremat.checkpoint(f, FULL, static_argnames="axes")(jnp.ones((2, 3)), [0, 1]) == 6


class TestPositions:
    @pytest.mark.parametrize("num", [1, -2, (1,), [1, 2]])
    def test_a_position_fixes_the_parameter_however_it_is_given(self, num):
        fixed = jremat.checkpoint(wave, FULL, static_argnums=num)
        assert jnp.allclose(fixed(X, 1), jnp.sin(X))
        assert jnp.allclose(fixed(X, flag=1), jnp.sin(X))

    def test_positions_that_no_parameter_has_are_refused(self):
        for wrong in (3, -4, "1", True, 1.0):
            with pytest.raises(ValueError, match=r"static_argnums: .* 3 parameters of wave \(0: x, 1: flag, 2: mode\)"):
                jremat.checkpoint(wave, FULL, static_argnums=(wrong,))(X, 1)

    def test_a_callable_without_signature_takes_positions(self):
        with pytest.raises(ValueError, match="static_argnums takes positions"):
            jremat.checkpoint(max, FULL, static_argnames="key")(2.0, 3.0)
        assert jremat.checkpoint(max, FULL, static_argnums=(0, 1))(2.0, 3.0) == 3.0

    def test_all_that_takes_names_takes_positions(self):
        f = lambda x, n: jnp.sin(sum(jnp.sin(x) for _ in range(n)))
        assert jremat.residuals(f, X, 2, policy=FULL, static_argnums=1).total_bytes == 0
        assert jremat.residuals(f, X, 2, static_argnums=1).total_bytes > 0
        assert jremat.explain(f, X, 2, policy=FULL, static_argnums=1).kept_bytes == 0
        assert jremat.replay(f, X, 2, policy=FULL, static_argnums=1).values_rerun > 0
        names = jax.checkpoint_policies.save_only_these_names("lost")
        for policy in (None, FULL, names):
            found = jremat.lint(f, X, 2, policy=policy, static_argnums=1)
            assert ("unknown-name" in {finding.rule for finding in found}) == (policy is names)
        assert jnp.allclose(jremat.remat(f, FULL, static_argnums=-1)(X, 2), f(X, 2))
