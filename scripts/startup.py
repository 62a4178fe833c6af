"""Scripts start JAX as the installed command does."""

from jremat.command.start import start_jax

__all__ = ["start_jax"]
