"""Closed form: what a training run needs, from a config alone, without a trace.

The package is also the function: ``jremat.estimate(config, policy, batch=8, seq=1024)`` is
``jremat.estimate.transformer.estimate``. So the name means one thing whichever of the two was imported first.
"""

import sys

from jremat.callable_package import CallablePackage

__function__ = "jremat.estimate.transformer:estimate"

sys.modules[__name__].__class__ = CallablePackage
