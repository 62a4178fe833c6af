import jax
import jax.numpy as jnp
import pytest

from jremat.measure import compiled_memory


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """The bytes of a small compiled program, as XLA dumps it."""
    folder = tmp_path_factory.mktemp("dump")
    step = jax.jit(jax.grad(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w).sum()))
    shapes = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((64, 16), jnp.float32)
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_proto": True}
    compiled_memory(step, *shapes, target="cpu", num_buffers=0, compiler_options=options)
    return max(folder.glob("*after_optimizations.hlo.pb"), key=lambda file: file.stat().st_size).read_bytes()
