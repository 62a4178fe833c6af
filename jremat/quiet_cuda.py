"""JAX's CUDA plugin, silent where there is no NVIDIA driver.

The plugin is installed to compile for GPUs that aren't here. Without a driver each start of JAX then prints the
plugin's failed version check with a traceback, and its libraries say that they found no driver: no news on such a
machine. Importing this module, before JAX starts its backends, turns the check off by the plugin's own switch and drops
those lines. The plugin still registers, so that it compiles for described GPUs. With a driver nothing is touched.

``import jremat`` imports it, and ``make`` puts a copy into .venv, imported at every start of Python there; so it
imports nothing of ours, and next to nothing at all until the plugin is loaded.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PLUGINS = ("jax_plugins.xla_cuda", "jax_cuda12_plugin", "jax_cuda13_plugin")
"""The plugin, and its libraries, some of which ``import jax`` loads already."""
SWITCH = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
# What the libraries write to descriptor 2 when they find no driver (XLA's cudart_stub.cc).
NOISE = (b"cudart_stub.cc", b"All log messages before absl::InitializeLog() is called")


class QuietFinder:
    """Finds the plugin and its libraries where Python does, and lets them load in silence."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """As Python's own finder; nothing for any other module."""
        if not name.startswith(PLUGINS) or _wanted() or has_nvidia_driver():
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = QuietLoader(spec.loader)  # type: ignore[assignment]
        return spec


class QuietLoader:
    """Another loader, in silence."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: Any) -> Any:
        """As the other loader."""
        with dropped_noise():
            return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """As the other loader; a plugin starts without its check for CUDA's libraries."""
        with dropped_noise():
            self.loader.exec_module(module)
        if hasattr(module, "initialize"):
            module.initialize = quiet(module.initialize)


def quiet(initialize: Callable[[], Any]) -> Callable[[], Any]:
    """A plugin's ``initialize`` without its check for CUDA's libraries and without noise."""

    def without_noise() -> Any:
        before = os.environ.get(SWITCH)
        os.environ[SWITCH] = "1"
        try:
            with dropped_noise():
                return initialize()
        finally:
            if before is None:
                del os.environ[SWITCH]
            else:
                os.environ[SWITCH] = before

    return without_noise


def _wanted() -> bool:
    """Whether a GPU is asked for by name: then what the plugin has to say is news."""
    return any(name in os.environ.get("JAX_PLATFORMS", "") for name in ("cuda", "gpu"))


def has_nvidia_driver() -> bool:
    """Whether the driver's library is here."""
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@contextmanager
def dropped_noise() -> Iterator[None]:
    """Hold back what native code writes to descriptor 2, then let through all but the noise."""
    import tempfile

    try:
        real = os.dup(2)
    except OSError:  # closed: nobody is bothered
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(real, 2)
            os.close(real)
            held.seek(0)
            for line in held:
                if not any(noise in line for noise in NOISE):
                    os.write(2, line)


if not any(getattr(finder, "__name__", "") == QuietFinder.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, QuietFinder)
