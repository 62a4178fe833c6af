"""Sizes as letters: polynomials that ``jax.export.symbolic_shape`` leaves in a program, and numbers in their place.

Read from the form in which JAX prints a symbolic dimension, which is the one that it reads: sums of products of
letters, powers, ``floordiv``, ``mod``, ``max`` and ``min``.
"""

import ast
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from jax.export import is_symbolic_dim
from jax.extend import core

from jremat.jax_internals import SIZE, opened, sized_type

Numbers = Mapping[str, int]
"""The value of every letter."""
_CALLS: Mapping[str, Callable[[int, int], int]] = {
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "max": max,
    "min": min,
}


@dataclass(frozen=True)
class Polynomial:
    """A sum of products of letters, as what bytes and FLOPs are in the sizes of a program.

    Args:
        terms: factor by factor, each term with its coefficient: ``((("b", "s", "s"), 2),)`` is 2·b·s². A factor that is
            no letter is a call, such as ``floordiv(s, 128)``.

    >>> two = Polynomial.of_text("2*b*s^2 + 4*s")
    >>> str(two * 3), two.at({"b": 1, "s": 5}), sorted(two.letters)
    ('6·b·s² + 12·s', 70, ['b', 's'])
    """

    terms: tuple[tuple[tuple[str, ...], Any], ...] = ()

    @classmethod
    def of(cls, size: Any) -> "Polynomial":
        """A number, a symbolic dimension or what one is printed as."""
        if isinstance(size, Polynomial | Size):
            return size if isinstance(size, Polynomial) else size.letters
        if isinstance(size, int | Fraction):
            return cls((((), size),) if size else ())
        return _parsed(str(size))

    @classmethod
    def of_text(cls, text: str) -> "Polynomial":
        """As JAX prints it, ``2*b*s^2 + 4*s``."""
        return _parsed(text)

    def __add__(self, other: Any) -> "Polynomial":
        return _collected((*self.terms, *Polynomial.of(other).terms))

    def __mul__(self, other: Any) -> "Polynomial":
        factor = Polynomial.of(other)
        return _collected(tuple((tuple(sorted(a + b)), m * n) for a, m in self.terms for b, n in factor.terms))

    def __radd__(self, other: int) -> "Polynomial":
        return self + other

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> "Polynomial":
        return self * Fraction(1, other)

    def __format__(self, spec: str) -> str:
        return str(self)

    @classmethod
    def product(cls, shape: Iterable[Any]) -> "Polynomial":
        """The number of values of an array."""
        return functools.reduce(lambda total, size: total * cls.of(size), shape, cls.of(1))

    def replaced(self, factors: tuple[str, ...], name: str, times: int | Fraction = 1) -> "Polynomial":
        """The same where one letter, so many times, stands for a product of letters.

        >>> str(Polynomial.of_text("2*b*g*m*s + m").replaced(("g", "m"), "n"))
        '2·b·n·s + m'
        """
        found = ((own, n, min(own.count(factor) for factor in factors)) for own, n in self.terms)
        return _collected(tuple((_replaced(own, factors, name, k), n * times**k) for own, n, k in found))

    def at(self, numbers: Numbers) -> Any:
        """Its value."""
        return sum(n * math.prod(_value(factor, numbers) for factor in factors) for factors, n in self.terms)

    @property
    def letters(self) -> frozenset[str]:
        """All that occur."""
        return frozenset(x for factors, _ in self.terms for factor in factors for x in _names(factor))

    def __str__(self) -> str:
        return " + ".join(f"{'·'.join(_shown(factors, n))}" for factors, n in self.terms) or "0"


class Size(int):
    """A number that remembers the letters in whose place it stands."""

    letters: Polynomial

    def __new__(cls, value: int, letters: Polynomial) -> "Size":
        size = super().__new__(cls, value)
        size.letters = letters
        return size

    def __repr__(self) -> str:  # two sizes that are equal by chance make two types, and are no common subexpressions
        return f"{int(self)}={self.letters}"


def bytes_of(shape: tuple[Any, ...], nbytes: int) -> Polynomial:
    """The polynomial of an array's bytes, from its shape of sizes that remember their letters and their number."""
    values = math.prod(shape)
    return Polynomial.product(shape) * Fraction(nbytes, values) if values else Polynomial.of(nbytes)


@functools.cache
def _parsed(text: str) -> Polynomial:
    return _read(ast.parse(text.replace("^", "**"), mode="eval").body)


def _read(node: ast.AST) -> Polynomial:
    match node:
        case ast.Constant(value=int(number)):
            return Polynomial.of(number)
        case ast.Name(id=letter):
            return Polynomial((((letter,), 1),))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _read(operand) * -1
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _read(left) + _read(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _read(left) + _read(right) * -1
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _read(left) * _read(right)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
            return functools.reduce(lambda total, _: total * _read(left), range(power), Polynomial.of(1))
    return Polynomial((((ast.unparse(node).replace("**", "^"),), 1),))


def _collected(terms: tuple[tuple[tuple[str, ...], int], ...]) -> Polynomial:
    found: dict[tuple[str, ...], int] = {}
    for factors, n in terms:
        found[factors] = found.get(factors, 0) + n
    return Polynomial(tuple((factors, _plain(n)) for factors, n in found.items() if n))


def _plain(number: Any) -> Any:
    return int(number) if number.denominator == 1 else number


def _replaced(own: tuple[str, ...], factors: tuple[str, ...], name: str, times: int) -> tuple[str, ...]:
    left = list(own)
    for factor in factors * times:
        left.remove(factor)
    return tuple(sorted([*left, *[name] * times]))


def _value(factor: str, numbers: Numbers) -> int:
    return (
        numbers[factor]
        if factor in numbers
        else _computed(ast.parse(factor.replace("^", "**"), mode="eval").body, numbers)
    )


def _computed(node: ast.AST, numbers: Numbers) -> int:
    match node:
        case ast.Call(func=ast.Name(id=name), args=[left, right]) if name in _CALLS:
            return _CALLS[name](_computed(left, numbers), _computed(right, numbers))
    return sum(
        n * math.prod(numbers[x] if x in numbers else _value(x, numbers) for x in factors)
        for factors, n in _read(node).terms
    )


@functools.cache
def _names(factor: str) -> tuple[str, ...]:
    nodes = ast.walk(ast.parse(factor.replace("^", "**")))
    return tuple(node.id for node in nodes if isinstance(node, ast.Name) and node.id not in _CALLS)


def _shown(factors: tuple[str, ...], n: Any) -> Iterator[str]:
    if n != 1 or not factors:
        yield str(n)
    for factor in dict.fromkeys(factors):
        times = factors.count(factor)
        yield factor if times == 1 else f"{factor}{''.join('⁰¹²³⁴⁵⁶⁷⁸⁹'[int(digit)] for digit in str(times))}"


def lettered(number: Any) -> Any:
    """A number as it is, symbolic dimensions as a polynomial."""
    return Polynomial.of(number) if is_symbolic_dim(number) else number


def at(jaxpr: Any, numbers: Numbers) -> Any:
    """The open jaxpr with numbers in its letters' place; each shape's sizes remember them (``Size``)."""
    return _Substitution(numbers).jaxpr(opened(jaxpr))


class _Substitution:
    def __init__(self, numbers: Numbers):
        self.numbers = numbers
        self.jaxprs: dict[int, Any] = {}  # one that is shared stays shared
        self.avals: dict[Any, Any] = {}

    def jaxpr(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self.jaxprs:
            env: dict[Any, Any] = {}
            heads = [[self._var(v, env) for v in vs] for vs in (jaxpr.invars, jaxpr.constvars)]
            eqns = [made for eqn in jaxpr.eqns if (made := self._eqn(eqn, env)) is not None]
            outs = [self._var(v, env) for v in jaxpr.outvars]
            made = jaxpr.replace(invars=heads[0], constvars=heads[1], eqns=eqns, outvars=outs)
            self.jaxprs[id(jaxpr)] = jaxpr, made  # the first is held, so that its id stays its own
        return self.jaxprs[id(jaxpr)][1]

    def _eqn(self, eqn: Any, env: dict[Any, Any]) -> Any:
        if eqn.primitive.name == SIZE:  # a size that is read as a number
            (out,) = eqn.outvars
            value = out.aval.dtype.type(int(self.size(eqn.params["dim"])))
            env[out] = core.Literal(value, out.aval)
            return None
        inputs = [self._var(v, env) for v in eqn.invars]
        if eqn.primitive.name == "convert_element_type" and isinstance(inputs[0], core.Literal):
            (out,) = eqn.outvars  # of a size: with numbers JAX itself writes the constant
            env[out] = core.Literal(out.aval.dtype.type(inputs[0].val), out.aval)
            return None
        params = {name: self.param(value) for name, value in eqn.params.items()}
        return eqn.replace(invars=inputs, outvars=[self._var(v, env) for v in eqn.outvars], params=params)

    def _var(self, var: Any, env: dict[Any, Any]) -> Any:
        if isinstance(var, core.Literal):
            return var
        if var not in env:
            env[var] = type(var)(self.aval(var.aval))
        return env[var]

    def aval(self, aval: Any) -> Any:
        shape = getattr(aval, "shape", ())
        if not any(map(is_symbolic_dim, shape)):
            return aval
        if aval not in self.avals:
            self.avals[aval] = sized_type(aval, tuple(self.size(size) for size in shape))
        return self.avals[aval]

    def size(self, size: Any) -> Any:
        if not is_symbolic_dim(size):
            return size
        letters = Polynomial.of(size)
        return Size(letters.at(self.numbers), letters)

    def param(self, value: Any) -> Any:
        if is_symbolic_dim(value):
            return int(self.size(value))
        if isinstance(value, core.ClosedJaxpr):
            return value.replace(jaxpr=self.jaxpr(value.jaxpr))
        if isinstance(value, core.Jaxpr):
            return self.jaxpr(value)
        if isinstance(value, tuple | list):
            items = [self.param(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value
