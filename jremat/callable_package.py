"""A package that is also the function it is named after: ``jremat.plan(...)`` beside ``jremat.plan.stack``."""

import importlib
import inspect
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A module that can be called: Python looks for ``__call__`` on a module's class, not in it.

    The function is found in ``__function__``, ``module:name``, when it is first asked for.
    """

    __function__: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _function(self)(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_function(self))

    @property
    def __wrapped__(self) -> Any:
        return _function(self)


def _function(package: CallablePackage) -> Any:
    module, _, name = package.__function__.partition(":")
    return getattr(importlib.import_module(module), name)
