"""Which choice is best?

The package is also the function: ``jremat.plan(block, *args, num_layers=12, hbm_bytes=60 * 2**30)`` is
``jremat.plan.planner.plan``, whose documentation says everything. So the name means one thing whichever of the two was
imported first.
"""

import sys

from jremat.callable_package import CallablePackage

__function__ = "jremat.plan.planner:plan"

sys.modules[__name__].__class__ = CallablePackage
