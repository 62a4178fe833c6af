"""What is counted as kept, where it looks like something else."""

import jax
import jax.numpy as jnp
from jax import lax

import jremat
from jremat.policy import tag

X, W1 = jnp.ones((4, 8)), jnp.full((8, 16), 0.1)


def kept(f, *args):
    return jremat.residuals(f, *args).total_bytes


class TestCounts:
    """Of residuals, where what is kept looks like something else."""

    def leaves_bytes(self, f, *args):
        inputs = {id(arg) for arg in args}
        leaves = jax.tree.leaves(jax.vjp(f, *args)[1])
        return sum(leaf.nbytes for leaf in {id(leaf): leaf for leaf in leaves}.values() if id(leaf) not in inputs)

    def test_a_rounding_that_rounds_is_a_value_of_its_own(self):
        def f(x, w1):
            y = jnp.sin(x @ w1)
            z = lax.reduce_precision(y, 8, 7)
            return jnp.sin(y) + z * z * y

        assert kept(f, X, W1) == self.leaves_bytes(f, X, W1)

    def test_each_operand_of_a_device_put_is_its_own(self):
        def f(x, w1):
            a, b = jax.device_put((jnp.sin(x), jnp.cos(x)), jax.devices()[0])
            return tag(a * b, "product") @ w1

        assert kept(f, X, W1) == self.leaves_bytes(f, X, W1)
