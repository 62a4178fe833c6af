"""Start JAX for a command."""

from jremat.quiet_cuda import has_nvidia_driver
from jremat.terminal.command_line import uninterrupted


def start_jax() -> None:
    """Import JAX and, where there is no GPU to keep free, start its default backend; a Ctrl-C comes afterwards."""
    with uninterrupted():
        import jax

        if not has_nvidia_driver():
            jax.devices()
