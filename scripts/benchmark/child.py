"""One case in a process of its own: ``python -m scripts.benchmark.child CASE.json ANSWER.json``.

A process of its own because a case may take more memory than there is, crash the compiler or hang, and because a
device's peak counts from the start of its process.
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

from scripts.benchmark.config import Case


def answer(case: Case) -> dict[str, Any]:
    """The row of a case, with its error where it has one."""
    from jremat.measure import CompileError, TargetError
    from scripts.benchmark.measure import row

    try:
        return row(case)
    except CompileError as error:
        return {"status": error.reason, "error": str(error)}
    except (ValueError, TargetError) as error:
        return {"status": "failed", "error": " ".join(str(error).split())}


def main(case: Path, to: Path) -> None:
    """Read the case, leave the answer."""
    from jremat.terminal.start_jax import start_jax

    start_jax()
    found = answer(Case(**json.loads(case.read_text())))
    found["host_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # the compiler's memory, mostly
    to.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
