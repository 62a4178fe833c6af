"""Start JAX without noise where there is no GPU, and without hiding one where there is.

Call it before the first ``import jax``. With JAX's CUDA plugin installed but no NVIDIA driver, which is how programs
are compiled for a GPU that isn't there, two things are printed at every start: the plugin's libraries say that they
found no driver, and JAX reports the plugin's failed version check with a traceback. Neither is news on such a machine.
"""

import contextlib
import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator

from jremat.command.line import uninterrupted

# What the plugin's libraries write to descriptor 2 when they find no driver (XLA's cudart_stub.cc).
_NOISE = (b"cudart_stub.cc", b"All log messages before absl::InitializeLog() is called")


def start_jax() -> None:
    """Import JAX and start its default backend; a Ctrl-C meanwhile comes afterwards.

    With an NVIDIA driver it is imported, and nothing is touched. Without one, the plugin's version check is turned off
    through its own switch, so that the plugin registers and JAX falls back to the CPU, and the lines of ``_NOISE`` are
    dropped from stderr; every other line comes through.
    """
    with uninterrupted():
        if _has_nvidia_driver():
            import jax

            return
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        with _without_noise():
            import jax

            jax.devices()


def _has_nvidia_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Hold back what native code writes to descriptor 2, then let through all but the noise."""
    sys.stderr.flush()
    real = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            os.close(real)
            held.seek(0)
            for line in held:
                if not any(noise in line for noise in _NOISE):
                    os.write(2, line)
