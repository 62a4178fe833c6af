"""Scripts start JAX as the installed command does."""

from jremat.terminal.start_jax import start_jax

__all__ = ["start_jax"]
