"""Which choice is best?"""

from jremat.plan.resolve import resolve

__all__ = ["resolve"]
