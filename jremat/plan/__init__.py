"""Which choice is best?

The package is also the function: ``jremat.plan(block, *args, num_layers=12, hbm_bytes=...)`` is
``jremat.plan.planner.plan``. So the name means one thing whichever of the two was imported first.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A module that can be called: Python looks for ``__call__`` on a module's class, not in it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from jremat.plan.planner import plan

        return plan(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
