"""Closed form: what a training run needs, from a config alone, without a trace.

The package is also the function: ``jremat.estimate(config, policy, batch=8, seq=1024)`` is
``jremat.estimate.transformer.estimate``. So the name means one thing whichever of the two was imported first.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A module that can be called: Python looks for ``__call__`` on a module's class, not in it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from jremat.estimate.transformer import estimate

        return estimate(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
