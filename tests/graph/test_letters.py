"""Letters in programs: polynomials as JAX prints them, numbers in their place."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest

from jremat.graph.arguments import take_apart
from jremat.graph.letters import Polynomial, Size, at
from jremat.graph.trace import capture

NUMBERS = {"b": 6, "s": 640, "h": 24}
PRINTED = ("b*s", "2*b*s^2 - 3*h + 4", "floordiv(s, 128)", "mod(- s, 128) + s", "max(b, h)*s", "0", "-b")


@pytest.mark.parametrize("text", PRINTED)
def test_what_jax_prints_has_the_value_that_python_gives(text):
    names = {"floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b, "max": max}
    expected = eval(text.replace("^", "**"), names | NUMBERS)
    assert Polynomial.of_text(text).at(NUMBERS) == expected
    (size,) = jax.export.symbolic_shape(f"({text.replace('-b', 'b')},)") if text not in ("0", "-b") else (None,)
    if size is not None:
        assert Polynomial.of(size).at(NUMBERS) == expected


def test_sums_products_and_shares():
    one, two = Polynomial.of_text("2*b*s"), Polynomial.of_text("s + 3")
    assert (one + two).at(NUMBERS) == one.at(NUMBERS) + two.at(NUMBERS)
    assert (one * two * Fraction(1, 2)).at(NUMBERS) == one.at(NUMBERS) * two.at(NUMBERS) // 2
    assert one + two * 0 == one and str(one * 0) == "0"


def program(f, numbers):
    b, s, h = jax.export.symbolic_shape("b, s, h", constraints=["mod(s,128) == 0", "s >= 256"])
    symbolic = capture(take_apart(f, (jax.ShapeDtypeStruct((b, s, h), jnp.bfloat16),), {})).jaxpr
    plain = jax.ShapeDtypeStruct((numbers["b"], numbers["s"], numbers["h"]), jnp.bfloat16)
    return at(symbolic, numbers), capture(take_apart(f, (plain,), {})).jaxpr


def types(jaxpr):
    return [str(v.aval.dtype) + str(tuple(map(int, v.aval.shape))) for eqn in jaxpr.eqns for v in eqn.outvars]


def test_a_program_with_numbers_put_in_is_the_program_of_these_numbers():
    f = lambda x: (jnp.tanh(x @ x.transpose(0, 2, 1)).reshape(x.shape[0], -1), x.mean(-1), x.sum() / x.shape[1])
    made, plain = program(f, NUMBERS)
    assert types(made) == types(plain)
    assert [eqn.primitive.name for eqn in made.eqns] == [eqn.primitive.name for eqn in plain.eqns]


def test_sizes_equal_by_chance_keep_their_own_letters():
    made, _ = program(lambda x: (x.sum(1), x.sum(2)), {"b": 2, "s": 256, "h": 256})
    found = [[size.letters.letters for size in v.aval.shape] for v in made.outvars]
    assert found == [[{"b"}, {"h"}], [{"b"}, {"s"}]]
    assert all(isinstance(size, Size) for v in made.outvars for size in v.aval.shape)
    assert all(type(size) is int for size in jax.make_jaxpr(jnp.sin)(jnp.ones((2, 256))).out_avals[0].shape)
