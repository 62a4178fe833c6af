"""Which parts of any program to remat so that it fits?

The package is also the function: ``jremat.fit(loss, *args, hbm_bytes="80GiB", target="h100")`` is
``jremat.fit.planner.fit``, whose documentation says everything.
"""

import sys

from jremat.callable_package import CallablePackage

__function__ = "jremat.fit.planner:fit"

sys.modules[__name__].__class__ = CallablePackage
